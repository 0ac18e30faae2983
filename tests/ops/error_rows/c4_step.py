"""Rows of ``insert_c4_step``: the rows of the ops that it contains, and a valid call."""

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import cache_rows
from tests.ops.error_rows.compressor import states_rows
from tests.ops.error_rows.valid import COUNTS, MAIN, ORDER, OWN, Valid, cache
from tests.ops.error_rows.wording import Entry, exactly, flag_rows, float_rows, slots_for_tokens

BFLOAT16 = torch.bfloat16


def states(prefix: str, width: int) -> Valid:
    value = StateLayout(4, width).allocate(4)
    shape = f"[num_{prefix}state_blocks, {prefix}state_values]"
    advice = "Allocate it with StateLayout(block_size).allocate(num_blocks)"
    return Valid(value, shape, "torch.float32", "v4_state", advice)


def compressor(prefix: str, dim: int) -> dict[str, Valid]:
    return {
        f"{prefix}kv_score": Valid(torch.ones(5, 4 * dim), f"[num_tokens, {4 * dim}]"),
        f"{prefix}ape": Valid(torch.ones(4, 2 * dim), f"[4, {2 * dim}]"),
        f"{prefix}norm_weight": Valid(torch.ones(dim), f"[{dim}]"),
        f"{prefix}states": states(prefix, 4 * dim),
    }


OWN["insert_c4_step"] = {
    "q": Valid(torch.ones(5, 2, 512, dtype=BFLOAT16), "[num_tokens, num_heads, 512]"),
    "kv": Valid(torch.ones(5, 512, dtype=BFLOAT16), "[num_tokens, 512]"),
    "indexer_q": Valid(torch.ones(5, 2, 128, dtype=BFLOAT16), "[num_tokens, num_index_heads, 128]"),
    "indexer_weights": Valid(torch.ones(5, 2, dtype=BFLOAT16), "[num_tokens, num_index_heads]",
     "torch.bfloat16 or torch.float32"),
    **compressor("", 512),
    **compressor("indexer_", 128),
    "swa_cache": cache(MainLayout(64), "[num_swa_blocks, swa_page_bytes]"),
    "swa_slot_mapping": Valid(i64([0, 1, 2, 3, 4]), "[num_slots]"),
    "k_cache": MAIN,
    "indexer_cache": cache(IndexerLayout(64), "[num_indexer_blocks, indexer_page_bytes]"),
    "state_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_state_blocks]"),
    "state_slot_mapping": Valid(i64([12, 13, 8, 9, 4]), "[num_tokens]"),
    "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, 64]"),
}  # fmt: skip
ORDER["insert_c4_step"] = (
    *("q", "kv", "positions", "req_indices", "slot_mapping", "state_block_table"),
    *("state_slot_mapping", "swa_slot_mapping", "cos_sin_cache", "swa_cache"),
    *("k_cache", "norm_weight", "ape", "kv_score", "states"),
    *("indexer_cache", "indexer_norm_weight", "indexer_ape", "indexer_kv_score"),
    *("indexer_states", "indexer_q", "indexer_weights"),
)
COUNTS["num_index_heads"] = "the heads of the indexer's queries"

WINDOW = ("swa_cache", "num_swa_blocks", "swa_block_size")
INDEXER = ("indexer_cache", "num_indexer_blocks")
TABLE: dict[str, list[Entry]] = {
    "insert_c4_step": [
        *cache_rows(MainLayout, IndexerLayout),
        *cache_rows(MainLayout, IndexerLayout, *WINDOW),
        *(row for row in cache_rows(IndexerLayout, MainLayout, *INDEXER)
          if "block_size" not in row.spoiled),  # the op checks the other cache first
        *states_rows(4, 2048, "state_block_size"),
        *states_rows(4, 512, "state_block_size", "indexer_"),
        *float_rows("eps", 0),
        *float_rows("softmax_scale", 0, optional=True),
        *flag_rows("save_first"),
        slots_for_tokens("swa_slot_mapping", i64([-1] * 6)),
        exactly("ape", "[4, 1024]", torch.ones(128, 1024), 0),
        exactly("indexer_ape", "[4, 256]", torch.ones(128, 256), 0),
    ]
}  # fmt: skip
