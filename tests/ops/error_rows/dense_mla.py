"""Rows of dense MLA, and valid calls of its ops."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows import cache as cache_rows, wording as says
from tests.ops.error_rows.cache import inside_rows, layout_rows, loose_pages, no_pages
from tests.ops.error_rows.mla import plan_rows
from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import COUNTS, NUMBERS, ORDER, OWN, Valid

GATHERS = ("mla_gather_kv", "mla_gather_codes")
HALVES = "torch.bfloat16 or torch.float16 or torch.float32"
LAYOUT = MlaFp8Layout(64, 32)
ALLOCATE = "Allocate it with MlaFp8Layout(block_size).allocate(num_blocks)"
ROWS = "[num_blocks, block_size, row_bytes]"
CACHE = Valid(LAYOUT.allocate(4), ROWS, "torch.uint8", "mla_fp8", ALLOCATE)
SCALE = Valid(torch.ones(1), "[1]")
CODED = {"kv_cache": CACHE, "layout": Valid("mla_fp8", ""), "scale": SCALE}
PLAN = Valid(i32([[token, 0, 1, 0] for token in range(6)]), "[num_tiles, 4]")
WEIGHT = torch.ones(192, 4).to(torch.float8_e4m3fn)
OWN |= {
    "mla_insert_kv": {**CODED, "kv_c": Valid(bf16(5, 24), "[num_rows, kv_lora_rank]", HALVES),
     "k_pe": Valid(bf16(5, 8), "[num_rows, rope_dim]")},
    **{op: {**CODED, "slot_mapping": Valid(i64([0, 1, -1]), "[num_rows]")} for op in GATHERS},
    "mla_dequantize_rows": {**CODED,
     "codes": Valid(torch.zeros(5, 32, dtype=torch.uint8), "[num_rows, row_bytes]")},
    "mla_absorb_q": {
     "q_nope": Valid(bf16(5, 2, 16), "[num_tokens, num_heads, qk_nope_head_dim]", HALVES),
     "q_pe": Valid(bf16(5, 2, 8), "[num_tokens, num_heads, rope_dim]"),
     "w_uk_t": Valid(bf16(2, 16, 24), "[num_heads, qk_nope_head_dim, kv_lora_rank]"),
     "q_scale": SCALE},
    "mla_v_up": {"x": Valid(bf16(5, 2, 24), "[num_tokens, num_heads, kv_lora_rank]", HALVES),
     "w_uv": Valid(bf16(2, 24, 16), "[num_heads, kv_lora_rank, v_head_dim]")},
    "mla_expand_kv": {"kv_c": Valid(bf16(5, 24), "[num_rows, kv_lora_rank]", HALVES),
     "w_kv_b": Valid(bf16(2, 16, 24), "[num_heads, width, kv_lora_rank]"),
     "num_valid": Valid(i32([3]), "[1]")},
    "quantize_per_tensor": {"x": Valid(bf16(5, 3), "[num_tokens, size]", HALVES, any_rank=True)},
    "mla_decode": {**CODED,
     "q": Valid(bf16(5, 4, 32).to(torch.float8_e4m3fn), "[num_tokens, num_heads, width]",
     f"{HALVES} or torch.float8_e4m3fn", advice="Pass the result of mla_absorb_q"),
     "seq_lens": Valid(i32([9, 7, 4, 0, 1]), "[num_tokens]"), "plan": PLAN, "q_scale": SCALE,
     "kv_scale": SCALE},
    "mla_sparse": {"q": Valid(bf16(5, 4, 32), "[num_tokens, num_heads, width]", HALVES,
     advice="Pass the result of mla_absorb_q"),
     "kv_cache": Valid(PlainLayout(64, 32).allocate(4), "[num_blocks, block_size, width]",
     HALVES, "plain", "Allocate it with PlainLayout(block_size).allocate(num_blocks)"),
     "indices": Valid(i32([[0, -1]] * 5), "[num_tokens, topk]"),
     "lens": Valid(i32([2, 1, 0, 2, 1]), "[num_tokens]")},
    "split_kv_b_proj": {"weight": Valid(WEIGHT, "[192, kv_lora_rank]"),
     "scale": Valid(torch.ones(2, 1), "[2, 1]")},
}  # fmt: skip
NUMBERS |= {"kv_lora_rank": 24, "qk_nope_head_dim": 2, "v_head_dim": 1}
COUNTS |= {
    "num_rows": "the rows that are given or read",
    "kv_lora_rank": "the values of a latent",
    "qk_nope_head_dim": "the values of a query without RoPE",
}
ORDER |= {
    "mla_insert_kv": ("slot_mapping", "kv_c", "k_pe", "kv_cache", "scale"),
    "split_kv_b_proj": ("weight", "scale"),
}
CODED_LAYOUTS = ("mla_fp8", "mla_ds_fp8")
TILED = {"layout": "mla_ds_fp8"}


def far_apart(page: int, row: int, byte: int, offset: int = 0) -> Tensor:
    """Return 4 blocks of 64 rows of 32 bytes, with these strides and this offset."""
    last = 3 * page + 63 * row + 31 * byte
    room = torch.zeros(offset + last + 1, dtype=torch.uint8)
    return room.as_strided((4, 64, 32), (page, row, byte), offset)


def tiled_row(**more: object) -> says.Entry:
    shape, value = "[num_blocks, 64, 656]", CACHE.value
    return no_pages("kv_cache", MlaDsFp8Layout(64), shape, value, "block_size", **TILED, **more)


def stride_rows() -> Iterator[says.Entry]:
    for strides in ((2056, 32, 1), (4096, 64, 1), (4096, 64, 2), (1024, 32, 1)):
        yield loose_pages("kv_cache", LAYOUT, far_apart(*strides))
    yield cache_rows.shifted_pages("kv_cache", LAYOUT, far_apart(2048, 32, 1, offset=8))


def insert_rows() -> Iterator[says.Entry]:
    yield from layout_rows("plain", *CODED_LAYOUTS)
    yield from stride_rows()
    formats = {"unknown": ("ue8m0", "float"), "no_str": ()}
    yield from says.word_rows("scale_format", "layout 'mla_fp8' has", "float32", **formats)
    yield says.rows_for_tokens("kv_c", 5, "slot_mapping", 4, kv_c=bf16(4, 24))
    plain = PlainLayout(64, 32).allocate(4)
    bare = {"layout": "plain", "kv_cache": plain}
    yield says.not_with("scale", "layout 'plain'", "a tensor", **bare)
    narrow = {**bare, "kv_cache": plain[..., :16]}
    yield says.exactly("kv_cache", "[num_blocks, block_size, 32]", narrow["kv_cache"], 2, **narrow)
    floats = {**bare, "kv_cache": plain.float()}
    yield says.dtype("kv_cache", "torch.bfloat16", torch.float32, **floats)
    yield from inside_rows("kv_cache", 32)
    yield says.exactly("kv_c", "[num_rows, 512]", bf16(5, 24), 1, **TILED)


def decode_rows() -> Iterator[says.Entry]:
    yield from layout_rows("plain", *CODED_LAYOUTS)
    yield from says.float_rows("softmax_scale", 0)
    yield from says.flag_rows("batch_invariant")
    yield from (row for row in plan_rows() if "plan" not in row.spoiled)
    for other in (MlaFp8Layout(64, 48), MlaDsFp8Layout(64), MlaFp8Layout(2, 32)):
        cache, shape = other.allocate(4), "[num_blocks, 64, 32]"
        yield no_pages("kv_cache", LAYOUT, shape, cache, "block_size")
    yield from stride_rows()
    yield tiled_row(q=bf16(5, 4, 576), kv_lora_rank=512)
    yield says.rows_for_tokens("plan", 5, "q", 4, plan=PLAN.value[:4])
    yield says.at_most("kv_lora_rank", "the width of q", 32, 33)
    q = bf16(5, 4, 32)
    yield says.not_with("q_scale", "a q of torch.bfloat16", "a tensor", q=q)
    cache = PlainLayout(64, 32).allocate(4)
    plain = {"layout": "plain", "q": q, "q_scale": None, "kv_cache": cache}
    yield says.not_with("kv_scale", "layout 'plain'", "a tensor", **plain)
    do = "Pass the result of mla_absorb_q"
    yield says.dtype("q", HALVES, torch.float8_e4m3fn, do, layout="plain")
    floats = {**plain, "kv_cache": cache.float()}
    yield says.dtype("kv_cache", "torch.bfloat16", torch.float32, **floats)
    rule = "be 512 with layout 'mla_ds_fp8'"
    yield says.wrong("kv_lora_rank", rule, 24, "Pass 512", **TILED, q=bf16(5, 4, 576))
    yield says.exactly("q", "[num_tokens, num_heads, 576]", q, 2, **TILED)


def sparse_rows() -> Iterator[says.Entry]:
    yield from layout_rows("plain", "mla_ds_fp8")
    yield from says.float_rows("softmax_scale", 0)
    yield from says.flag_rows("batch_invariant")
    yield says.at_least("num_splits", 0, -1)
    yield says.at_least("topk", 1, 0, indices=i32([[]] * 5))
    yield says.at_most("kv_lora_rank", "the width of q", 32, 33)
    q = bf16(5, 4, 576)
    rule = "be 512 with layout 'mla_ds_fp8'"
    yield says.wrong("kv_lora_rank", rule, 24, "Pass 512", **TILED, q=q)
    yield says.exactly("q", "[num_tokens, num_heads, 576]", bf16(5, 4, 32), 2, **TILED)
    yield tiled_row(q=q, kv_lora_rank=512)
    floats = PlainLayout(64, 32, torch.float32).allocate(4)
    yield says.dtype("kv_cache", "torch.bfloat16", torch.float32, kv_cache=floats)


def weight_rows() -> Iterator[says.Entry]:
    rule, do = "be a tensor or a module", "Pass kv_b_proj or its weight"
    yield says.of_type("weight", rule, [[1.0]], do)
    yield says.not_with("scale", "a module", "a tensor", weight=torch.nn.Linear(4, 192))
    yield says.not_with("scale", "a weight of torch.float32", "a tensor", weight=WEIGHT.float())
    yield says.exactly("weight", "[192, kv_lora_rank]", WEIGHT[1:], 0)
    for kind in (torch.int8, torch.float8_e4m3fn):
        yield says.dtype("dtype", f"None or {HALVES}", kind, "Pass the dtype of the model")


TABLE: dict[str, list[says.Entry]] = {
    "mla_insert_kv": list(insert_rows()),
    **{op: [*layout_rows(*layouts, *CODED_LAYOUTS), *stride_rows(), tiled_row()]
     for op, layouts in (("mla_gather_kv", ("plain",)), ("mla_gather_codes", ()))},
    "mla_dequantize_rows": [*layout_rows(*CODED_LAYOUTS),
     says.exactly("codes", "[num_rows, 656]", torch.zeros(5, 32, dtype=torch.uint8), 1, **TILED)],
    "quantize_per_tensor": [says.rank("x", "[num_tokens, ...]", torch.tensor(1.0), "at least ")],
    "mla_decode": list(decode_rows()),
    "mla_sparse": list(sparse_rows()),
    "split_kv_b_proj": list(weight_rows()),
}  # fmt: skip
