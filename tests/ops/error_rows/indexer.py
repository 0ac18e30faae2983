"""Rows of ``error_rows.TABLE`` for the lightning indexer, and valid calls of its ops."""

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import ALLOCATE_PLAIN, Entry, cache_rows, layout_rows
from tests.ops.error_rows.rope import TABLE, float_rows
from tests.ops.error_rows.sparse import flag_rows
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
    "indexer_quantize_q": {
        **TABLE,
        "q": Valid(torch.ones(5, 2, 128, dtype=torch.bfloat16), "[num_tokens, num_heads, 128]"),
        "weights": Valid(
            torch.ones(5, 2, dtype=torch.bfloat16),
            "[num_tokens, num_heads]",
            "torch.bfloat16 or torch.float32",
        ),
    },
    "indexer_logits": {
        **QUERY,
        "k_cache": INDEXER,
        "lens": IN_ROWS["lens"],
        "schedule": SCHEDULE,
    },
    "indexer_logits_ragged": {
        **QUERY,
        "k": Valid(torch.ones(4, 128, dtype=torch.uint8), "[num_k, 128]"),
        "scales": Valid(torch.ones(4), "[num_k]"),
        "row_start": Valid(i32([0, 0, 1, 2, 3]), "[num_tokens]"),
        "row_stop": Valid(i32([1, 1, 2, 3, 4]), "[num_tokens]"),
    },
    "indexer_topk": {"logits": Valid(torch.ones(5, 4), "[num_tokens, num_rows]"), "lens": LENS},
    "indexer_select": {
        **QUERY,
        "k_cache": INDEXER,
        "positions": IN_ROWS["positions"],
        "schedule": SCHEDULE,
    },
}
COUNTS |= {"num_heads": "the heads of the queries", "num_k": "the gathered keys"}

BYTES: Entry = (
    "codes as bytes",
    {"q": torch.ones(5, 2, 128, dtype=torch.uint8)},
    TypeError,
    "q must be torch.float8_e4m3fn, got torch.uint8. Read its bytes with "
    ".view(torch.float8_e4m3fn).",
)


def odd(columns: int) -> Entry:
    text = (
        f"cos_sin_cache must have an even number of columns, at most dim = 128, got [9, {columns}]"
    )
    return (
        f"a table of {columns} columns",
        {"cos_sin_cache": torch.ones(9, columns)},
        ValueError,
        f"{text}. Pass [cos | sin] of the rotated pairs.",
    )


Q = QUERY["q"].value


def plain(dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    """A call over a plain cache with something changed."""
    return {
        "layout": "plain",
        "q": Q.to(dtype),
        "k_cache": PlainLayout(64, 128, dtype).allocate(4),
        **changed,
    }


def plain_rows() -> Iterator[Entry]:
    shape = "k_cache must have shape [num_blocks, block_size, 128], got"
    dtypes = "must be torch.bfloat16 or torch.float32"
    gaps = torch.zeros(4, 64, 256)[..., ::2]
    yield from (
        (
            "codes for a plain cache",
            plain(q=Q),
            TypeError,
            f"q {dtypes}, got torch.float8_e4m3fn. Cast it with .to(torch.bfloat16).",
        ),
        (
            "no queries for a plain cache",
            plain(q=None),
            TypeError,
            "q must be a tensor, got NoneType. Pass a torch.bfloat16 tensor.",
        ),
        (
            "plain queries for an FP8 cache",
            {"q": Q.to(torch.bfloat16)},
            TypeError,
            "q must be torch.float8_e4m3fn, got torch.bfloat16. "
            "Cast it with .to(torch.float8_e4m3fn).",
        ),
        (
            "plain queries of another width",
            plain(q=torch.ones(5, 2, 64)),
            ValueError,
            "q must have shape [num_tokens, num_heads, 128], got [5, 2, 64]. "
            "Pass exactly 128 entries in dimension 2.",
        ),
        (
            "weights of plain queries in half precision",
            plain(torch.bfloat16, weights=torch.ones(5, 2, dtype=torch.bfloat16)),
            TypeError,
            "weights must be torch.float32, got torch.bfloat16. Cast it with .to(torch.float32).",
        ),
        (
            "the plain tag for an FP8 cache",
            plain(k_cache=IndexerLayout(64).allocate(4)),
            TypeError,
            f"k_cache {dtypes} for layout 'plain', got torch.uint8. {ALLOCATE_PLAIN}",
        ),
        (
            "no plain cache",
            plain(k_cache=None),
            TypeError,
            f"k_cache must be a tensor, got NoneType. {ALLOCATE_PLAIN}",
        ),
        (
            "a plain cache of bf16 for queries of floats",
            plain(k_cache=PlainLayout(64, 128).allocate(4)),
            TypeError,
            "k_cache must be torch.float32, got torch.bfloat16. Cast it with .to(torch.float32).",
        ),
        (
            "a plain cache of floats for bf16 queries",
            plain(torch.bfloat16, k_cache=PlainLayout(64, 128, torch.float32).allocate(4)),
            TypeError,
            "k_cache must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16).",
        ),
        (
            "a plain cache of the attention's keys",
            plain(k_cache=PlainLayout(64, 512, torch.float32).allocate(4)),
            ValueError,
            f"{shape} [4, 64, 512]. Pass exactly 128 entries in dimension 2.",
        ),
        (
            "a plain cache of another block size",
            plain(k_cache=PlainLayout(2, 128, torch.float32).allocate(4)),
            ValueError,
            "k_cache must have pages of block_size = 64 rows, got [4, 2, 128]. "
            "Correct block_size, or pass the cache that it belongs to.",
        ),
        (
            "plain pages without rows",
            plain(k_cache=gaps[:, :0]),
            ValueError,
            f"k_cache must have pages of at least 1 row, got [4, 0, 128]. {ALLOCATE_PLAIN}",
        ),
        (
            "plain rows with gaps",
            plain(k_cache=gaps),
            ValueError,
            f"k_cache must have dense rows, got strides {list(gaps.stride())}. {ALLOCATE_PLAIN}",
        ),
        (
            "a plain cache elsewhere",
            plain(k_cache=PlainLayout(64, 128, torch.float32).allocate(4, "meta")),
            ValueError,
            "k_cache must be on cpu like q, got meta. Move all tensors of a call to one device.",
        ),
    )


def in_rows(name: str) -> Iterator[Entry]:
    """Errors of an argument that may be [num_reqs, next_n] too."""
    value = IN_ROWS[name].value
    six = torch.cat((value, value[:1])).view(3, 2)
    queries = {"q": Q[[0, 1, 2, 3, 4, 4]], "weights": torch.ones(6, 2)}
    requests = {"req_indices": i32([0, 0, 1, 1, 2, 2])}
    yield from (
        (
            f"{name} of rank 3",
            {name: value[None, None]},
            ValueError,
            f"{name} must have shape [num_tokens], got [1, 1, 5]. Pass a tensor of 1 dimension.",
        ),
        (
            f"one number as {name}",
            {name: value[0]},
            ValueError,
            f"{name} must have shape [num_tokens], got []. Pass a tensor of 1 dimension.",
        ),
        (
            f"rows of {name} for other tokens",
            {name: six},
            ValueError,
            f"{name} must have shape [num_reqs, next_n] of num_tokens = 5 entries as in q, "
            "got [3, 2]. Pass one per token.",
        ),
        (
            f"a row of {name} for another number of requests",
            {name: value[None]},
            ValueError,
            f"block_table must have shape [num_reqs, max_blocks] with num_reqs = 1 as in {name}, "
            "got [3, 2]. Make them agree: num_reqs counts the requests of the batch, padding "
            "requests included.",
        ),
        (
            f"rows of {name} and a schedule of tokens",
            {name: six, **queries, **requests},
            ValueError,
            f"schedule must be None with {name} [num_reqs, next_n], got a tensor. "
            "It is of tokens: flatten both.",
        ),
    )


PAGED: list[Entry] = [
    BYTES,
    *cache_rows(IndexerLayout, MainLayout),
    *layout_rows("v4_indexer_fp8", "plain"),
    *plain_rows(),
]
INDEXER_TABLE: dict[str, list[Entry]] = {
    "indexer_quantize_q": [
        odd(63),
        odd(130),
        *(row for row in float_rows("softmax_scale", 0) if row[1]["softmax_scale"] is not None),
    ],
    "indexer_logits": [*PAGED, *in_rows("lens")],
    "indexer_logits_ragged": [
        BYTES,
        (
            "keys as numbers",
            {"k": torch.ones(4, 128).to(torch.float8_e4m3fn)},
            TypeError,
            "k must be torch.uint8, got torch.float8_e4m3fn. Read its bytes with "
            ".view(torch.uint8).",
        ),
    ],
    "indexer_topk": [
        (
            "logits in half precision",
            {"logits": torch.ones(5, 4, dtype=torch.bfloat16)},
            TypeError,
            "logits must be torch.float32, got torch.bfloat16. Cast it with .to(torch.float32).",
        ),
    ],
    "indexer_select": [*PAGED, *flag_rows("slots"), *in_rows("positions")],
}
