"""Rows of ``error_rows.TABLE`` for dense MLA, and valid calls of its ops."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import Entry, inside_rows, layout_rows
from tests.ops.error_rows.mla import plan_rows
from tests.ops.error_rows.rope import bf16, float_rows
from tests.ops.error_rows.sparse import flag_rows
from tests.ops.error_rows.valid import COUNTS, NUMBERS, ORDER, OWN, Valid

INSERTS = ("mla_insert_kv",)
GATHERS = ("mla_gather_kv", "mla_gather_codes")
HALVES = "torch.bfloat16 or torch.float16 or torch.float32"
LAYOUT = MlaFp8Layout(64, 32)
CACHE = Valid(
    LAYOUT.allocate(4),
    "[num_blocks, block_size, row_bytes]",
    "torch.uint8",
    " for layout 'mla_fp8'",
    "Allocate it with MlaFp8Layout(block_size).allocate(num_blocks).",
)
SCALE = Valid(torch.ones(1), "[1]")
CODED = {"kv_cache": CACHE, "layout": Valid("mla_fp8", ""), "scale": SCALE}
PLAN = Valid(i32([[token, 0, 1, 0] for token in range(6)]), "[num_tiles, 4]")
WEIGHT = torch.ones(192, 4).to(torch.float8_e4m3fn)
OWN |= {
    **{
        op: {
            **CODED,
            "kv_c": Valid(bf16(5, 24), "[num_rows, kv_lora_rank]", HALVES),
            "k_pe": Valid(bf16(5, 8), "[num_rows, rope_dim]"),
        }
        for op in INSERTS
    },
    **{op: {**CODED, "slot_mapping": Valid(i64([0, 1, -1]), "[num_rows]")} for op in GATHERS},
    "mla_dequantize_rows": {
        **CODED,
        "codes": Valid(torch.zeros(5, 32, dtype=torch.uint8), "[num_rows, row_bytes]"),
    },
    "mla_absorb_q": {
        "q_nope": Valid(bf16(5, 2, 16), "[num_tokens, num_heads, qk_nope_head_dim]", HALVES),
        "q_pe": Valid(bf16(5, 2, 8), "[num_tokens, num_heads, rope_dim]"),
        "w_uk_t": Valid(bf16(2, 16, 24), "[num_heads, qk_nope_head_dim, kv_lora_rank]"),
        "q_scale": SCALE,
    },
    "mla_v_up": {
        "x": Valid(bf16(5, 2, 24), "[num_tokens, num_heads, kv_lora_rank]", HALVES),
        "w_uv": Valid(bf16(2, 24, 16), "[num_heads, kv_lora_rank, v_head_dim]"),
    },
    "mla_expand_kv": {
        "kv_c": Valid(bf16(5, 24), "[num_rows, kv_lora_rank]", HALVES),
        "w_kv_b": Valid(bf16(2, 16, 24), "[num_heads, width, kv_lora_rank]"),
        "num_valid": Valid(i32([3]), "[1]"),
    },
    "quantize_per_tensor": {"x": Valid(bf16(5, 3), "[num_tokens, size]", HALVES, any_rank=True)},
    "mla_decode": {
        **CODED,
        "q": Valid(
            bf16(5, 4, 32).to(torch.float8_e4m3fn),
            "[num_tokens, num_heads, width]",
            f"{HALVES} or torch.float8_e4m3fn",
            advice="Pass the result of mla_absorb_q.",
        ),
        "seq_lens": Valid(i32([9, 7, 4, 0, 1]), "[num_tokens]"),
        "plan": PLAN,
        "q_scale": SCALE,
        "kv_scale": SCALE,
    },
    "split_kv_b_proj": {
        "weight": Valid(WEIGHT, "[192, kv_lora_rank]"),
        "scale": Valid(torch.ones(2, 1), "[2, 1]"),
    },
}
NUMBERS |= {"kv_lora_rank": 24, "qk_nope_head_dim": 2, "v_head_dim": 1}
COUNTS |= {
    "num_rows": "the rows that are given or read",
    "kv_lora_rank": "the values of a latent",
    "qk_nope_head_dim": "the values of a query without RoPE",
}
ORDER |= {
    **dict.fromkeys(INSERTS, ("slot_mapping", "kv_c", "k_pe", "kv_cache", "scale")),
    "split_kv_b_proj": ("weight", "scale"),
}
MADE = "Allocate it with MlaFp8Layout(block_size=64, width=32).allocate(num_blocks)"


def far_apart(page: int, row: int, byte: int, offset: int = 0) -> Tensor:
    """4 blocks of 64 rows of 32 bytes somewhere in memory."""
    last = 3 * page + 63 * row + 31 * byte
    room = torch.zeros(offset + last + 1, dtype=torch.uint8)
    return room.as_strided((4, 64, 32), (page, row, byte), offset)


def cache_rows() -> Iterator[Entry]:
    """Caches that are not of the layout."""
    for what, cache in {
        "rows of another width": MlaFp8Layout(64, 48).allocate(4),
        "rows of tiles": MlaDsFp8Layout(64).allocate(4),
        "pages of another size": MlaFp8Layout(2, 32).allocate(4),
    }.items():
        text = "kv_cache must have shape [num_blocks, 64, 32] for layout 'mla_fp8' with "
        text += f"block_size = 64, got {list(cache.shape)}. {MADE}, or correct block_size."
        yield what, {"kv_cache": cache}, ValueError, text
    yield from stride_rows()
    text = "kv_cache must have shape [num_blocks, 64, 656] for layout 'mla_ds_fp8' with "
    text += "block_size = 64, got [4, 64, 32]. Allocate it with "
    text += "MlaDsFp8Layout(block_size=64).allocate(num_blocks), or correct block_size."
    tiled = {"layout": "mla_ds_fp8", "q": bf16(5, 4, 576), "kv_lora_rank": 512}
    yield "the tag of tiles", tiled, ValueError, text


def stride_rows() -> Iterator[Entry]:
    for what, strides in {
        "pages at no multiple of 16": (2056, 32, 1),
        "rows apart": (4096, 64, 1),
        "bytes with gaps": (4096, 64, 2),
        "pages inside each other": (1024, 32, 1),
    }.items():
        text = "kv_cache must have dense pages, none inside another, that start at multiples of 16 "
        text += f"bytes, got strides {list(strides)}. {MADE}."
        yield what, {"kv_cache": far_apart(*strides)}, ValueError, text
    text = "kv_cache must have pages that start at multiples of 16 bytes, got storage offset 8. "
    moved = far_apart(2048, 32, 1, offset=8)
    yield "the first page at byte 8", {"kv_cache": moved}, ValueError, f"{text}{MADE}."


def no_scale(name: str) -> str:
    return f"{name} must be None with layout 'plain', got a tensor. Pass one of the two."


def insert_rows() -> Iterator[Entry]:
    yield from layout_rows("plain", "mla_fp8", "mla_ds_fp8")
    yield from stride_rows()
    for value in ("ue8m0", "float"):
        text = f"scale_format must be 'float32', got {value!r}. "
        text += "Pass the scale_format that layout 'mla_fp8' has."
        yield f"scales in {value}", {"scale_format": value}, ValueError, text
    text = "kv_c must have at least num_tokens = 5 rows as in slot_mapping, got 4. "
    text += "Pass a row for every token."
    yield "fewer rows than slots", {"kv_c": bf16(4, 24)}, ValueError, text
    plain = PlainLayout(64, 32).allocate(4)
    bare = {"layout": "plain", "kv_cache": plain}
    yield "a scale of plain rows", bare, ValueError, no_scale("scale")
    text = "kv_cache must have shape [num_blocks, block_size, 32], got [4, 64, 16]. "
    text += "Pass exactly 32 entries in dimension 2."
    narrow = {**bare, "kv_cache": plain[..., :16]}
    yield "plain rows of another width", narrow, ValueError, text
    text = "kv_cache must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16)."
    yield "plain rows of floats", {**bare, "kv_cache": plain.float()}, TypeError, text
    yield from inside_rows("kv_cache", 32)
    text = "kv_c must have shape [num_rows, 512], got [5, 24]. "
    text += "Pass exactly 512 entries in dimension 1."
    yield "a latent of 24 in tiles", {"layout": "mla_ds_fp8"}, ValueError, text


def gather_rows(*layouts: str) -> Iterator[Entry]:
    yield from layout_rows(*layouts)
    yield from stride_rows()
    text = "kv_cache must have shape [num_blocks, 64, 656] for layout 'mla_ds_fp8' with "
    text += "block_size = 64, got [4, 64, 32]. Allocate it with "
    text += "MlaDsFp8Layout(block_size=64).allocate(num_blocks), or correct block_size."
    yield "the tag of tiles", {"layout": "mla_ds_fp8"}, ValueError, text


def decode_rows() -> Iterator[Entry]:
    yield from layout_rows("plain", "mla_fp8", "mla_ds_fp8")
    yield from float_rows("softmax_scale", 0)
    yield from flag_rows("batch_invariant")
    yield from (row for row in plan_rows() if "columns" not in row[0] and "rows" not in row[0])
    yield from cache_rows()
    text = "plan must have at least num_tokens = 5 rows as in q, got 4. Pass a row for every token."
    yield "a plan of 4 rows", {"plan": PLAN.value[:4]}, ValueError, text
    text = "kv_lora_rank must be at most the width of q = 32, got 33. "
    text += "Lower kv_lora_rank, or raise the width of q."
    yield "values wider than keys", {"kv_lora_rank": 33}, ValueError, text
    q = bf16(5, 4, 32)
    text = "q_scale must be None with a q of torch.bfloat16, got a tensor. Pass one of the two."
    yield "a scale of no codes", {"q": q}, ValueError, text
    plain = {
        "layout": "plain",
        "q": q,
        "q_scale": None,
        "kv_cache": PlainLayout(64, 32).allocate(4),
    }
    yield "a scale of plain rows", plain, ValueError, no_scale("kv_scale")
    text = f"q must be {HALVES}, got torch.float8_e4m3fn. Pass the result of mla_absorb_q."
    yield "codes for plain rows", {"layout": "plain"}, TypeError, text
    text = "kv_cache must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16)."
    floats = plain["kv_cache"].float()
    yield "plain rows of floats", {**plain, "kv_cache": floats}, TypeError, text
    tiles = {"layout": "mla_ds_fp8", "q": bf16(5, 4, 576)}
    text = "kv_lora_rank must be 512 with layout 'mla_ds_fp8', got 24. Pass 512."
    yield "another rank in tiles", tiles, ValueError, text
    text = "q must have shape [num_tokens, num_heads, 576], got [5, 4, 32]. "
    text += "Pass exactly 576 entries in dimension 2."
    yield "another width in tiles", {**tiles, "q": q}, ValueError, text


def weight_rows() -> Iterator[Entry]:
    text = "weight must be a tensor or a module, got list. Pass kv_b_proj or its weight."
    yield "a list", {"weight": [[1.0]]}, TypeError, text
    text = "scale must be None with a module, got a tensor. Pass one of the two."
    yield "a module and a scale", {"weight": torch.nn.Linear(4, 192)}, ValueError, text
    text = "scale must be None with a weight of torch.float32, got a tensor. Pass one of the two."
    yield "a scale of no codes", {"weight": WEIGHT.float()}, ValueError, text
    text = "weight must have shape [192, kv_lora_rank], got [191, 4]. "
    text += "Pass exactly 192 entries in dimension 0."
    yield "a weight of other heads", {"weight": WEIGHT[1:]}, ValueError, text
    for dtype in (torch.int8, torch.float8_e4m3fn):
        text = f"dtype must be None or {HALVES}, got {dtype}. Pass the dtype of the model."
        yield f"results of {dtype}", {"dtype": dtype}, TypeError, text


DENSE_MLA_TABLE: dict[str, list[Entry]] = {
    **{op: list(insert_rows()) for op in INSERTS},
    "mla_gather_kv": list(gather_rows("plain", "mla_fp8", "mla_ds_fp8")),
    "mla_gather_codes": list(gather_rows("mla_fp8", "mla_ds_fp8")),
    "mla_dequantize_rows": [
        *layout_rows("mla_fp8", "mla_ds_fp8"),
        (
            "rows of codes as tiles",
            {"layout": "mla_ds_fp8"},
            ValueError,
            "codes must have shape [num_rows, 656], got [5, 32]. "
            "Pass exactly 656 entries in dimension 1.",
        ),
    ],
    "mla_absorb_q": [
        (
            "queries of other dtypes",
            {"q_pe": bf16(5, 2, 8).half()},
            TypeError,
            "q_pe must be torch.bfloat16, got torch.float16. Cast it with .to(torch.bfloat16).",
        ),
    ],
    "mla_v_up": [
        (
            "weights of another dtype",
            {"w_uv": torch.ones(2, 24, 16)},
            TypeError,
            "w_uv must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16).",
        ),
    ],
    "mla_expand_kv": [
        (
            "a weight in two dimensions",
            {"w_kv_b": bf16(32, 24)},
            ValueError,
            "w_kv_b must have shape [num_heads, width, kv_lora_rank], got [32, 24]. "
            "Pass a tensor of 3 dimensions.",
        ),
    ],
    "quantize_per_tensor": [
        (
            "a scalar",
            {"x": torch.tensor(1.0)},
            ValueError,
            "x must have shape [num_tokens, ...], got []. Pass a tensor of at least 1 dimension.",
        ),
    ],
    "mla_decode": list(decode_rows()),
    "split_kv_b_proj": list(weight_rows()),
}
