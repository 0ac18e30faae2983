"""Rows of ``error_rows.TABLE`` for rotation, norm and packing, and valid calls of their ops."""

import math
from collections.abc import Iterator

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import ALLOCATE_PLAIN, Entry, cache_rows, inside_rows, layout_rows
from tests.ops.error_rows.sparse import flag_rows
from tests.ops.error_rows.valid import MAIN, MINIMUM, NUMBERS, OWN, Valid

QNORM = ("qnorm_rope_kv_insert",)
GROUPS = ("inverse_rope_group", "inverse_rope_group_quantize")
EVERY_DTYPE = "torch.int32 torch.int64 torch.float32 torch.bool"
ANY = "Pass a tensor of any dtype."
NO_FLOAT = "Pass a Python float that is known on the host, never a tensor."


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


TABLE = {"cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, rope_dim]")}
X = Valid(
    bf16(5, 2, 128),
    "[num_tokens, num_heads, dim]",
    "torch.bfloat16 or torch.float32",
    advice="",
    any_rank=True,
)
OWN |= {
    "apply_rope": {**TABLE, "x": X},
    "inverse_rope_group": {**TABLE, "o": Valid(bf16(5, 4, 128), "[num_tokens, num_heads, dim]")},
    "inverse_rope_group_quantize": {
        **TABLE,
        "o": Valid(bf16(5, 4, 512), "[num_tokens, num_heads, 512]"),
    },
    **{
        op: {
            "q": Valid(bf16(5, 2, 512), "[num_tokens, num_heads, 512]"),
            "kv": Valid(bf16(5, 512), "[num_tokens, 512]"),
            "k_cache": MAIN,
            "slot_mapping": Valid(i64([0, 1, 2, 3, 4]), "[num_slots]"),
            "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, 64]"),
        }
        for op in QNORM
    },
    "pack_seq": {
        "x": Valid(bf16(5, 3), "[num_tokens, size]", EVERY_DTYPE, advice=ANY, any_rank=True)
    },
    "unpack_seq": {
        "packed": Valid(
            bf16(3, 2, 4), "[num_reqs, next_n, size]", EVERY_DTYPE, advice=ANY, any_rank=True
        )
    },
}
NUMBERS |= {
    "num_groups": 2,
    "num_positions": 9,
    "rope_dim": 64,
    "scale_layout": "column_padded",
    "theta": 10000.0,
}
MINIMUM |= {"num_positions": 0, "rope_dim": 2}


def float_rows(name: str, least: int, *, bounded: bool = True) -> Iterator[Entry]:
    """A float that is none, or not above ``least``."""
    for value in (True, "1", None, torch.tensor(2.0)):
        kind = type(value).__name__
        text = f"{name} must be a float, got {kind}. {NO_FLOAT}"
        yield f"{name} is {kind}", {name: value}, TypeError, text
    for value in (float(least), least - 1.0, math.nan, math.inf) if bounded else ():
        text = f"{name} must be above {least} and finite, got {value}. "
        text += f"Pass a number above {least}."
        yield f"{name} of {value}", {name: value}, ValueError, text


def table_rows(most_name: str, most: int) -> Iterator[Entry]:
    for columns in (63, most + 2):
        text = f"cos_sin_cache must have an even number of columns, at most {most_name} = {most}, "
        text += f"got [9, {columns}]. Pass [cos | sin] of the rotated pairs."
        table = torch.ones(9, columns)
        yield f"{columns} columns of angles", {"cos_sin_cache": table}, ValueError, text


def rank_rows(name: str, value: torch.Tensor, shape: str, advice: str) -> Entry:
    text = f"{name} must have shape {shape}, got {list(value.shape)}. {advice}"
    return f"{name} of rank {value.dim()}", {name: value}, ValueError, text


def group_rows() -> Iterator[Entry]:
    text = "num_heads must be a multiple of num_groups = 3, got 4. Use num_heads = 6."
    yield "three groups of four heads", {"num_groups": 3}, ValueError, text


def scale_rows() -> Iterator[Entry]:
    known = "'row' or 'column_padded' or 'ue8m0_packed'"
    advice = "Pass the scale_layout that the matrix product takes."
    for value in ("column", "", "ROW"):
        text = f"scale_layout must be {known}, got {value!r}. {advice}"
        yield f"scale layout {value!r}", {"scale_layout": value}, ValueError, text
    for other in (None, 1):
        kind = type(other).__name__
        text = f"scale_layout must be a str, got {kind}. {advice}"
        yield f"scale layout is {kind}", {"scale_layout": other}, TypeError, text


def insert_rows() -> Iterator[Entry]:
    yield (
        "more slots than tokens",
        {"slot_mapping": i64([-1] * 6)},
        ValueError,
        "slot_mapping must have at most num_tokens = 5 entries as in q, got 6. "
        "Pass one per token, or fewer.",
    )
    yield (
        "the plain tag for an FP8 cache",
        {"layout": "plain"},
        TypeError,
        f"k_cache must be torch.bfloat16 for layout 'plain', got torch.uint8. {ALLOCATE_PLAIN}",
    )
    yield (
        "a plain cache of floats",
        {"layout": "plain", "k_cache": PlainLayout(64, dtype=torch.float32).allocate(4)},
        TypeError,
        f"k_cache must be torch.bfloat16 for layout 'plain', got torch.float32. {ALLOCATE_PLAIN}",
    )
    yield (
        "a plain cache of another width",
        {"layout": "plain", "k_cache": PlainLayout(64, 128).allocate(4)},
        ValueError,
        "k_cache must have shape [num_blocks, block_size, 512], got [4, 64, 128]. "
        "Pass exactly 512 entries in dimension 2.",
    )
    yield (
        "a plain cache of another block size",
        {"layout": "plain", "k_cache": PlainLayout(2).allocate(4)},
        ValueError,
        "k_cache must have pages of block_size = 64 rows, got [4, 2, 512]. "
        "Correct block_size, or pass the cache that it belongs to.",
    )


def pad_rows() -> Iterator[Entry]:
    for dtype, pad, low, high in (
        (torch.uint8, -1.0, 0, 255),
        (torch.uint8, 0.5, 0, 255),
        (torch.int32, math.inf, -(2**31), 2**31 - 1),
        (torch.int8, math.nan, -128, 127),
        (torch.bool, 2.0, 0, 1),
        (torch.float8_e4m3fn, -math.inf, 0, 0),
    ):
        text = f"pad must be a whole number in {low}..{high} for x of {dtype}, got {pad}. "
        spoiled = {"x": torch.zeros(5).to(dtype), "pad": pad}
        yield f"{pad} in {dtype}", spoiled, ValueError, f"{text}Pass one that x can hold."


ROPE_TABLE: dict[str, list[Entry]] = {
    "rope_cos_sin_cache": [
        *float_rows("theta", 1),
        (
            "half a pair",
            {"rope_dim": 5},
            ValueError,
            "rope_dim must be a multiple of values of a pair = 2, got 5. Use rope_dim = 6.",
        ),
        (
            "a factor as scaling",
            {"scaling": 16.0},
            TypeError,
            "scaling must be a YarnScaling or None, got float. "
            "Pass YarnScaling(...), or leave it out.",
        ),
        (
            "no such device",
            {"device": "nowhere"},
            ValueError,
            "device must be a device, got 'nowhere'. Pass a torch.device, its name, or None.",
        ),
    ],
    "YarnScaling": [
        *float_rows("factor", 0),
        *float_rows("beta_fast", 0),
        *float_rows("beta_slow", 0),
        (
            "slow before fast",
            {"beta_slow": 33.0},
            ValueError,
            "beta_fast must be at least beta_slow = 33.0, got 32.0. Swap the two.",
        ),
    ],
    "apply_rope": [
        *flag_rows("inverse"),
        *table_rows("dim", 128),
        rank_rows("x", bf16(5), "[num_tokens, dim]", "Pass a tensor of 2 dimensions."),
        rank_rows("x", bf16(5, 1, 1, 64), "[num_tokens, dim]", "Pass a tensor of 2 dimensions."),
    ],
    "inverse_rope_group": [*group_rows(), *table_rows("dim", 128)],
    "inverse_rope_group_quantize": [*group_rows(), *table_rows("dim", 512), *scale_rows()],
    **{
        op: [
            *cache_rows(MainLayout, IndexerLayout),
            *layout_rows("v4_fp8", "plain"),
            *inside_rows("k_cache", 512),
            *float_rows("eps", 0),
            *insert_rows(),
        ]
        for op in QNORM
    },
    "pack_seq": [
        *float_rows("pad", 0, bounded=False),
        *pad_rows(),
        rank_rows("x", bf16(1)[0], "[num_tokens, ...]", "Pass a tensor of at least 1 dimension."),
        (
            "no start",
            {"query_start_loc": i32([])},
            ValueError,
            "query_start_loc must have shape [num_reqs + 1], got [0]. "
            "Pass at least 1 entry, even for an empty batch.",
        ),
    ],
    "unpack_seq": [
        rank_rows(
            "packed", bf16(3), "[num_reqs, next_n, ...]", "Pass a tensor of at least 2 dimensions."
        ),
        (
            "too many requests",
            {
                "packed": bf16(16384, 1),
                "query_start_loc": torch.zeros(16385, dtype=torch.int32),
            },
            ValueError,
            "num_reqs must be at most 16383, got 16384. Split the batch.",
        ),
    ],
}
