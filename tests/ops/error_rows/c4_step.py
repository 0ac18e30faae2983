"""Rows of ``error_rows.TABLE`` for ``insert_c4_step``: those of the ops that it is made of, under
its names, and a valid call of it."""

from collections.abc import Iterable, Iterator

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, StateLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import Entry, cache_rows
from tests.ops.error_rows.compressor import states_rows
from tests.ops.error_rows.rope import float_rows
from tests.ops.error_rows.valid import COUNTS, MAIN, ORDER, OWN, Valid, cache

BFLOAT16 = torch.bfloat16
OF_INDEXER = {
    "k_cache": "indexer_cache",
    "num_blocks": "num_indexer_blocks",
    "states": "indexer_states",
    "num_state_blocks": "num_indexer_state_blocks",
}
OF_WINDOW = {
    "k_cache": "swa_cache",
    "num_blocks": "num_swa_blocks",
    "block_size": "swa_block_size",
}


def states(prefix: str, width: int) -> Valid:
    value = StateLayout(4, width).allocate(4)
    shape = f"[num_{prefix}state_blocks, {prefix}state_values]"
    advice = "Allocate it with StateLayout(block_size).allocate(num_blocks)."
    return Valid(value, shape, "torch.float32", " for layout 'v4_state'", advice)


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
    "indexer_weights": Valid(
        torch.ones(5, 2, dtype=BFLOAT16),
        "[num_tokens, num_index_heads]",
        "torch.bfloat16 or torch.float32",
    ),
    **compressor("", 512),
    **compressor("indexer_", 128),
    "swa_cache": cache(MainLayout(64), "[num_swa_blocks, swa_page_bytes]"),
    "swa_slot_mapping": Valid(i64([0, 1, 2, 3, 4]), "[num_slots]"),
    "k_cache": MAIN,
    "indexer_cache": cache(IndexerLayout(64), "[num_indexer_blocks, indexer_page_bytes]"),
    "state_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_state_blocks]"),
    "state_slot_mapping": Valid(i64([12, 13, 8, 9, 4]), "[num_tokens]"),
    "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, 64]"),
}
ORDER["insert_c4_step"] = (
    *("q", "kv", "positions", "req_indices", "slot_mapping", "state_block_table"),
    *("state_slot_mapping", "swa_slot_mapping", "cos_sin_cache", "swa_cache"),
    *("k_cache", "norm_weight", "ape", "kv_score", "states"),
    *("indexer_cache", "indexer_norm_weight", "indexer_ape", "indexer_kv_score"),
    *("indexer_states", "indexer_q", "indexer_weights"),
)
COUNTS["num_index_heads"] = "the heads of the indexer's queries"


def renamed(entries: Iterable[Entry], names: dict[str, str]) -> Iterator[Entry]:
    """Entries about an argument under another name; "(block_size" is that of a layout."""
    for what, spoiled, error, text in entries:
        for old, new in names.items():
            for before in (" ", "["):
                text = f" {text}".replace(f"{before}{old}", f"{before}{new}")[1:]
        spoiled = {names.get(name, name): value for name, value in spoiled.items()}
        yield f"{what}: {', '.join(spoiled)}", spoiled, error, text


def own_rows() -> Iterator[Entry]:
    yield (
        "more slots than tokens",
        {"swa_slot_mapping": i64([-1] * 6)},
        ValueError,
        "swa_slot_mapping must have at most num_tokens = 5 entries as in q, got 6. "
        "Pass one per token, or fewer.",
    )
    for name, shape in (("", "[4, 1024]"), ("indexer_", "[4, 256]")):
        width = shape[4:-1]
        yield (
            f"the {name}bias of another ratio",
            {f"{name}ape": torch.ones(128, int(width))},
            ValueError,
            f"{name}ape must have shape {shape}, got [128, {width}]. "
            "Pass exactly 4 entries in dimension 0.",
        )


C4_TABLE: dict[str, list[Entry]] = {
    "insert_c4_step": [
        *cache_rows(MainLayout, IndexerLayout),
        *renamed(cache_rows(MainLayout, IndexerLayout), OF_WINDOW),
        *(
            row
            for row in renamed(cache_rows(IndexerLayout, MainLayout), OF_INDEXER)
            if "block_size" not in row[1]  # the other cache is looked at first
        ),
        *states_rows(4, 2048, "state_block_size"),
        *renamed(states_rows(4, 512, "state_block_size"), OF_INDEXER),
        *float_rows("eps", 0),
        *(row for row in float_rows("softmax_scale", 0) if row[1]["softmax_scale"] is not None),
        *own_rows(),
    ]
}
