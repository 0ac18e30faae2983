"""Rows of the specification of a model's metadata."""

from tests.ops.error_rows.wording import Entry, multiple, wrong

TABLE: dict[str, list[Entry]] = {
    "AttentionSpec": [
        multiple("block_tokens", "lcm(c4_ratio, c128_ratio)", 128, 130, 256),
        wrong("indexer_workspace", "be at least max_model_len // c4_ratio = 1024", 1023,
         "Raise it, or lower max_model_len: a chunk holds all keys of a request",
         **{"indexer_workspace": 1023, "max_model_len": 4096}),
    ]
}  # fmt: skip
