"""Rows of ``error_rows.TABLE`` for the lightning indexer, and valid calls of its ops."""

import torch
from error_rows_cache import Entry, cache_rows
from error_rows_rope import TABLE, float_rows
from error_rows_valid import COUNTS, INDEXER, OWN, Valid
from helpers import i32

from dsv4_ops.core.layout import IndexerLayout, MainLayout

QUERY = {
    "q": Valid(torch.ones(5, 2, 128).to(torch.float8_e4m3fn), "[num_tokens, num_heads, 128]"),
    "weights": Valid(torch.ones(5, 2), "[num_tokens, num_heads]"),
}
LENS = Valid(i32([1, 2, 0, 1, 1]), "[num_tokens]")
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
    "indexer_logits": {**QUERY, "k_cache": INDEXER, "lens": LENS},
    "indexer_logits_ragged": {
        **QUERY,
        "k": Valid(torch.ones(4, 128, dtype=torch.uint8), "[num_k, 128]"),
        "scales": Valid(torch.ones(4), "[num_k]"),
        "row_start": Valid(i32([0, 0, 1, 2, 3]), "[num_tokens]"),
        "row_stop": Valid(i32([1, 1, 2, 3, 4]), "[num_tokens]"),
    },
    "indexer_topk": {"logits": Valid(torch.ones(5, 4), "[num_tokens, num_rows]"), "lens": LENS},
    "indexer_select": {**QUERY, "k_cache": INDEXER},
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


INDEXER_TABLE: dict[str, list[Entry]] = {
    "indexer_quantize_q": [
        odd(63),
        odd(130),
        *(row for row in float_rows("softmax_scale", 0) if row[1]["softmax_scale"] is not None),
    ],
    "indexer_logits": [BYTES, *cache_rows(IndexerLayout, MainLayout)],
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
    "indexer_select": [BYTES, *cache_rows(IndexerLayout, MainLayout)],
}
