"""Rows of the compressor, and valid calls of its ops."""

from collections.abc import Iterator

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from tests.helpers import i32, i64
from tests.ops.error_rows import cache, wording as says
from tests.ops.error_rows.valid import MAIN, NUMBERS, ORDER, OWN, Valid

SAVE, STEP = "save_compressor_states", "save_and_compress"
BOTH = ("compress_and_insert", STEP)
ALLOCATE = "Allocate it with StateLayout(block_size).allocate(num_blocks)"


def states(block_size: int, width: int) -> Valid:
    value = StateLayout(block_size, width).allocate(4)
    return Valid(value, "[num_state_blocks, state_values]", "torch.float32", "v4_state", ALLOCATE)


OWN |= {
    SAVE: {"kv_score": Valid(torch.ones(5, 12), "[num_tokens, 12]"),
     "ape": Valid(torch.ones(4, 6), "[4, width]"), "states": states(64, 12)},
    **{op: {"kv_score": Valid(torch.ones(5, 2048), "[num_tokens, 2048]"),
     "ape": Valid(torch.ones(4, 1024), "[4, 1024]"), "states": states(4, 2048),
     "state_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_state_blocks]"),
     "norm_weight": Valid(torch.ones(512), "[512]"), "k_cache": MAIN,
     "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, rope_dim]")} for op in BOTH},
}  # fmt: skip
OWN[STEP]["state_slot_mapping"] = Valid(i64([12, 13, 8, 9, 4]), "[num_tokens]")
NUMBERS |= {"eps": 1e-6, "overlap": True, "state_block_size": 4}
COMPRESS_ORDER = (
    "positions", "req_indices", "slot_mapping", "state_block_table", "k_cache", "norm_weight",
    "cos_sin_cache", "ape", "kv_score", "states",
)  # fmt: skip
ORDER |= {
    SAVE: ("slot_mapping", "positions", "ape", "kv_score", "states"),
    "compress_and_insert": COMPRESS_ORDER,
    STEP: (*COMPRESS_ORDER, "state_slot_mapping"),
}


def states_rows(block_size: int, width: int, size: str, prefix: str = "") -> Iterator[says.Entry]:
    """Yield states of wrong sizes, and states that kernels cannot read in units of 16 bytes."""
    layout, name = StateLayout(block_size, width), f"{prefix}states"
    values = layout.page_bytes // 4
    shape = f"[num_{prefix}state_blocks, {values}]"
    for other in (StateLayout(block_size, 4 * width), StateLayout(4 * block_size, width)):
        yield cache.no_pages(name, layout, shape, other.allocate(4), size)
    memory = torch.zeros(16 * values)
    for stride in ((values + 2, 1), (2 * values, 2), (0, 1)):
        yield cache.loose_pages(name, layout, memory.as_strided((4, values), stride))
    yield cache.shifted_pages(name, layout, memory[2:][: 4 * values].view(4, values))


def plain_compress_rows() -> Iterator[says.Entry]:
    must = "have an even size where rows are rotated"
    do = "Pass a cos_sin_cache without columns, or rows of whole pairs"
    odd = {"k_cache": torch.zeros(4, 64, 3), "norm_weight": torch.ones(3)}
    yield says.wrong("norm_weight", must, 3, do, **odd, cos_sin_cache=torch.ones(9, 2))
    yield says.dtype("k_cache", cache.PLAIN_DTYPES, MAIN.value, cache.ALLOCATE_PLAIN, "plain")
    narrow, norm = PlainLayout(64, 128).allocate(4), torch.ones(512)
    yield says.exactly("norm_weight", "[128]", norm, 0, k_cache=narrow)
    yield cache.other_size("k_cache", 512, "block_size", 64, PlainLayout(2).allocate(4))


def compress_rows() -> Iterator[says.Entry]:
    yield from says.angle_rows("head_dim", 512)
    ape = torch.ones(4, 1024)
    yield says.exactly("ape", "[4, 512]", ape, 1, overlap=False)
    yield says.exactly("ape", "[128, 1024]", ape, 0, compress_ratio=128)
    layout = {"layout": "v4_indexer_fp8"}
    shape = "[num_blocks, 8640]"
    yield cache.no_pages("k_cache", IndexerLayout(64), shape, MAIN.value, "block_size", **layout)
    yield from cache.tagged(plain_compress_rows())
    yield from cache.inside_rows("k_cache", 512)


TABLE: dict[str, list[says.Entry]] = {
    SAVE: [*states_rows(64, 12, "block_size")],
    **{op: [*cache.cache_rows(MainLayout, IndexerLayout),
     *cache.layout_rows("v4_fp8", "v4_indexer_fp8", "plain"), *says.float_rows("eps", 0),
     *states_rows(4, 2048, "state_block_size"), *says.flag_rows("overlap"), *compress_rows(),
     *(says.flag_rows("save_first") if op == STEP else ())] for op in BOTH},
}  # fmt: skip
