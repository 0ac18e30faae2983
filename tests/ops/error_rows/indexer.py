"""Rows of the lightning indexer, and valid calls of its ops."""

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.cache import PLAIN_DTYPES, cache_rows, layout_rows, plain_rows
from tests.ops.error_rows.rope import ANGLES
from tests.ops.error_rows.valid import COUNTS, INDEXER, OWN, Valid

QUERY = {
    "q": Valid(torch.ones(5, 2, 128).to(torch.float8_e4m3fn), "[num_tokens, num_heads, 128]"),
    "weights": Valid(torch.ones(5, 2), "[num_tokens, num_heads]"),
}
LENS = Valid(i32([1, 2, 0, 1, 1]), "[num_tokens]")
IN_ROWS = {
    "lens": LENS._replace(any_rank=True),
    "positions": Valid(i64([7, 8, 5, 6, 3]), "[num_tokens]", any_rank=True),
}
SCHEDULE = Valid(i32([[0, 0], [2, 1], [5, 0]]), "[num_sms + 1, 2]")
OWN |= {
    "indexer_quantize_q": {**ANGLES,
     "q": Valid(torch.ones(5, 2, 128, dtype=torch.bfloat16), "[num_tokens, num_heads, 128]"),
     "weights": Valid(torch.ones(5, 2, dtype=torch.bfloat16), "[num_tokens, num_heads]",
     "torch.bfloat16 or torch.float32")},
    "indexer_logits": {**QUERY, "k_cache": INDEXER, "lens": IN_ROWS["lens"], "schedule": SCHEDULE},
    "indexer_logits_ragged": {**QUERY,
     "k": Valid(torch.ones(4, 128, dtype=torch.uint8), "[num_k, 128]"),
     "scales": Valid(torch.ones(4), "[num_k]"),
     "row_start": Valid(i32([0, 0, 1, 2, 3]), "[num_tokens]"),
     "row_stop": Valid(i32([1, 1, 2, 3, 4]), "[num_tokens]")},
    "indexer_topk": {"logits": Valid(torch.ones(5, 4), "[num_tokens, num_rows]"), "lens": LENS},
    "indexer_select": {**QUERY, "k_cache": INDEXER, "positions": IN_ROWS["positions"],
     "schedule": SCHEDULE},
}  # fmt: skip
COUNTS |= {"num_heads": "the heads of the queries", "num_k": "the gathered keys"}

Q, E4M3 = QUERY["q"].value, "torch.float8_e4m3fn"
BYTES = says.dtype("q", E4M3, Q.view(torch.uint8), f"Read its bytes with .view({E4M3})")


def plain(kind: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    """Return a call over a plain cache with these changes."""
    cache = PlainLayout(64, 128, kind).allocate(4)
    return {"layout": "plain", "q": Q.to(kind), "k_cache": cache, **changed}


def cached(width: int = 128, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return PlainLayout(64, width, kind).allocate(4)


def plain_cache_rows() -> Iterator[says.Entry]:
    half, blocks = torch.bfloat16, "[num_blocks, block_size"
    for entry in plain_rows("k_cache", 128, f"{blocks}, width]", "block_size", 64, torch.float32):
        yield entry._replace(spoiled=plain(**entry.spoiled))
    yield says.dtype("q", PLAIN_DTYPES, E4M3, **plain(q=Q))
    yield says.no_tensor("q", None, "Pass a torch.bfloat16 tensor", **plain(q=None))
    yield says.dtype("q", E4M3, Q.to(half))
    narrow = plain(q=torch.ones(5, 2, 64))
    yield says.exactly("q", "[num_tokens, num_heads, 128]", narrow["q"], 2, **narrow)
    halves = plain(half, weights=torch.ones(5, 2, dtype=half))
    yield says.dtype("weights", "torch.float32", half, **halves)
    yield says.dtype("k_cache", "torch.float32", half, **plain(k_cache=cached(kind=half)))
    yield says.dtype("k_cache", "torch.bfloat16", torch.float32, **plain(half, k_cache=cached()))
    wide = plain(k_cache=cached(512))
    yield says.exactly("k_cache", f"{blocks}, 128]", wide["k_cache"], 2, **wide)
    yield says.elsewhere("k_cache", "cpu", "q", "meta", **plain(k_cache=cached().to("meta")))


def in_rows(name: str) -> Iterator[says.Entry]:
    """Yield errors of an argument that may also have shape [num_reqs, next_n]."""
    value, table = IN_ROWS[name].value, i32([[7, 3], [2, 5], [1, 4]])
    six = torch.cat((value, value[:1])).view(3, 2)
    for other in (value[None, None], value[0]):
        yield says.rank(name, "[num_tokens]", other)
    must = "have shape [num_reqs, next_n] of num_tokens = 5 entries as in q"
    yield says.of_shape(name, must, six, "Pass one per token")
    one = {"block_table": table, name: value[None]}
    yield says.agree("block_table", "[num_reqs, max_blocks]", "num_reqs", 1, name, table, **one)
    given = {"q": Q[[0, 1, 2, 3, 4, 4]], "weights": torch.ones(6, 2), name: six}
    given["req_indices"] = i32([0, 0, 1, 1, 2, 2])
    must, do = f"be None with {name} [num_reqs, next_n]", "It is of tokens: flatten both"
    yield says.wrong("schedule", must, "a tensor", do, **given)


PAGED = [
    BYTES,
    *cache_rows(IndexerLayout, MainLayout),
    *layout_rows("v4_indexer_fp8", "plain"),
    *plain_cache_rows(),
]
TABLE: dict[str, list[says.Entry]] = {
    "indexer_quantize_q": [*says.angle_rows("dim", 128),
     *says.float_rows("softmax_scale", 0, optional=True),
     *says.flag_rows("rope_first"), *says.flag_rows("interleaved")],
    "indexer_logits": [*PAGED, *in_rows("lens")],
    "indexer_logits_ragged": [BYTES,
     says.dtype("k", "torch.uint8", torch.ones(4, 128).to(torch.float8_e4m3fn),
     "Read its bytes with .view(torch.uint8)")],
    "indexer_select": [*PAGED, *says.flag_rows("slots"), *in_rows("positions")],
}  # fmt: skip
