"""Rows of ``error_rows.TABLE`` for the specification of a model's metadata."""

from tests.ops.error_rows.cache import Entry

METADATA_TABLE: dict[str, list[Entry]] = {
    "AttentionSpec": [
        (
            "pages of no whole C128 rows",
            {"block_tokens": 130},
            ValueError,
            "block_tokens must be a multiple of lcm(c4_ratio, c128_ratio) = 128, got 130. "
            "Use block_tokens = 256.",
        ),
        (
            "a workspace that the keys of a request do not fit into",
            {"indexer_workspace": 1023, "max_model_len": 4096},
            ValueError,
            "indexer_workspace must be at least max_model_len // c4_ratio = 1024, got 1023. "
            "Raise it, or lower max_model_len: a chunk holds all keys of a request.",
        ),
    ]
}
