"""Rows of the ops for rotation, norm and packing, and valid calls of these ops."""

import math
from collections.abc import Iterator

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows import cache, wording as says
from tests.ops.error_rows.valid import MAIN, MINIMUM, NUMBERS, OWN, Valid

EVERY_DTYPE = "torch.int32 torch.int64 torch.float32 torch.bool"
ANY = "Pass a tensor of any dtype"


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


ANGLES = {"cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, rope_dim]")}
SHAPE, FLOATS = "[num_tokens, num_heads, dim]", "torch.bfloat16 or torch.float32"
X = Valid(bf16(5, 2, 128), SHAPE, FLOATS, advice="", any_rank=True)
OWN |= {
    "apply_rope": {**ANGLES, "x": X},
    "inverse_rope_group": {**ANGLES, "o": Valid(bf16(5, 4, 128), "[num_tokens, num_heads, dim]")},
    "inverse_rope_group_quantize": {**ANGLES,
     "o": Valid(bf16(5, 4, 512), "[num_tokens, num_heads, 512]")},
    "qnorm_rope_kv_insert": {"q": Valid(bf16(5, 2, 512), "[num_tokens, num_heads, 512]"),
     "kv": Valid(bf16(5, 512), "[num_tokens, 512]"), "k_cache": MAIN,
     "slot_mapping": Valid(i64([0, 1, 2, 3, 4]), "[num_slots]"),
     "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, 64]")},
    "pack_seq": {"x": Valid(bf16(5, 3), "[num_tokens, size]", EVERY_DTYPE, advice=ANY,
     any_rank=True)},
    "unpack_seq": {"packed": Valid(bf16(3, 2, 4), "[num_reqs, next_n, size]", EVERY_DTYPE,
     advice=ANY, any_rank=True)},
}  # fmt: skip
NUMBERS |= {"num_groups": 2, "num_positions": 9, "rope_dim": 64, "theta": 10000.0}
NUMBERS |= {"scale_layout": "column_padded"}
MINIMUM |= {"num_positions": 0, "rope_dim": 2}


def plain_insert_rows() -> Iterator[says.Entry]:
    for value in (MAIN.value, PlainLayout(64, dtype=torch.float32).allocate(4)):
        yield says.dtype("k_cache", "torch.bfloat16", value, cache.ALLOCATE_PLAIN, "plain")
    narrow = PlainLayout(64, 128).allocate(4)
    yield says.exactly("k_cache", "[num_blocks, block_size, 512]", narrow, 2)
    yield cache.other_size("k_cache", 512, "block_size", 64, PlainLayout(2).allocate(4))


def pad_rows() -> Iterator[says.Entry]:
    for kind, pad, low, high in (
        (torch.uint8, -1.0, 0, 255),
        (torch.uint8, 0.5, 0, 255),
        (torch.int32, math.inf, -(2**31), 2**31 - 1),
        (torch.int8, math.nan, -128, 127),
        (torch.bool, 2.0, 0, 1),
        (torch.float8_e4m3fn, -math.inf, 0, 0),
    ):
        must = f"be a whole number in {low}..{high} for x of {kind}"
        x, do = torch.zeros(5).to(kind), "Pass one that x can hold"
        yield says.wrong("pad", must, pad, do, x=x, pad=pad)


THREE_GROUPS = says.multiple("num_heads", "num_groups", 3, 4, 6, num_groups=3)
TABLE: dict[str, list[says.Entry]] = {
    "rope_cos_sin_cache": [
        *says.float_rows("theta", 1),
        says.multiple("rope_dim", "values of a pair", 2, 5, 6),
        says.of_type("scaling", "be a YarnScaling or None", 16.0,
         "Pass YarnScaling(...), or leave it out"),
        says.wrong("device", "be a device", "'nowhere'", "Pass a torch.device, its name, or None",
         device="nowhere"),
    ],
    "YarnScaling": [
        *[row for name in ("factor", "beta_fast", "beta_slow") for row in says.float_rows(name, 0)],
        says.wrong("beta_fast", "be at least beta_slow = 33.0", 32.0, "Swap the two",
         beta_slow=33.0),
    ],
    "apply_rope": [
        *(row for name in ("inverse", "rope_first", "interleaved") for row in says.flag_rows(name)),
        *says.angle_rows("dim", 128),
        *[says.rank("x", "[num_tokens, dim]", bf16(*shape)) for shape in ((5,), (5, 1, 1, 64))],
    ],
    "inverse_rope_group": [THREE_GROUPS, *says.angle_rows("dim", 128)],
    "inverse_rope_group_quantize": [
        THREE_GROUPS,
        *says.angle_rows("dim", 512),
        *says.word_rows("scale_layout", "the matrix product takes",
         "row", "column_padded", "ue8m0_packed", unknown=("column", "", "ROW")),
    ],
    "qnorm_rope_kv_insert": [
        *cache.cache_rows(MainLayout, IndexerLayout),
        *cache.layout_rows("v4_fp8", "plain"),
        *cache.inside_rows("k_cache", 512),
        *says.float_rows("eps", 0),
        says.slots_for_tokens("slot_mapping", i64([-1] * 6)),
        *cache.tagged(plain_insert_rows()),
    ],
    "pack_seq": [
        *[says.no_float("pad", value) for value in (True, "1", None, torch.tensor(2.0))],
        *pad_rows(),
        says.rank("x", "[num_tokens, ...]", bf16(1)[0], "at least "),
        says.no_entry("query_start_loc"),
    ],
    "unpack_seq": [
        says.rank("packed", "[num_reqs, next_n, ...]", bf16(3), "at least "),
        says.too_many(packed=bf16(16384, 1), query_start_loc=i32([0] * 16385)),
    ],
}  # fmt: skip
