"""Rows of ``error_rows.TABLE`` for the compressor, and valid calls of its ops."""

import math
from collections.abc import Iterator

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from tests.helpers import i32, i64
from tests.ops.error_rows.cache import ALLOCATE_PLAIN, Entry, cache_rows, inside_rows, layout_rows
from tests.ops.error_rows.valid import MAIN, NUMBERS, ORDER, OWN, Valid

SAVE, COMPRESS, STEP = ("save_compressor_states",), ("compress_and_insert",), ("save_and_compress",)
ALLOCATE = "Allocate it with StateLayout(block_size).allocate(num_blocks)."


def states(block_size: int, width: int) -> Valid:
    value = StateLayout(block_size, width).allocate(4)
    shape = "[num_state_blocks, state_values]"
    return Valid(value, shape, "torch.float32", " for layout 'v4_state'", ALLOCATE)


OWN |= {
    **{
        op: {
            "kv_score": Valid(torch.ones(5, 12), "[num_tokens, 12]"),
            "ape": Valid(torch.ones(4, 6), "[4, width]"),
            "states": states(64, 12),
        }
        for op in SAVE
    },
    **{
        op: {
            "kv_score": Valid(torch.ones(5, 2048), "[num_tokens, 2048]"),
            "ape": Valid(torch.ones(4, 1024), "[4, 1024]"),
            "states": states(4, 2048),
            "state_block_table": Valid(
                i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_state_blocks]"
            ),
            "norm_weight": Valid(torch.ones(512), "[512]"),
            "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, rope_dim]"),
            "k_cache": MAIN,
        }
        for op in (*COMPRESS, *STEP)
    },
}
for op in STEP:
    OWN[op]["state_slot_mapping"] = Valid(i64([12, 13, 8, 9, 4]), "[num_tokens]")
NUMBERS |= {"eps": 1e-6, "overlap": True, "state_block_size": 4}
COMPRESS_ORDER = (
    "positions",
    "req_indices",
    "slot_mapping",
    "state_block_table",
    "k_cache",
    "norm_weight",
    "cos_sin_cache",
    "ape",
    "kv_score",
    "states",
)
ORDER |= {
    **dict.fromkeys(SAVE, ("slot_mapping", "positions", "ape", "kv_score", "states")),
    **dict.fromkeys(COMPRESS, COMPRESS_ORDER),
    **dict.fromkeys(STEP, (*COMPRESS_ORDER, "state_slot_mapping")),
}


def states_rows(block_size: int, width: int, size_name: str) -> Iterator[Entry]:
    """States that are not those of the compressor, or that kernels cannot read 16 bytes at a
    time."""
    layout = StateLayout(block_size, width)
    values = layout.page_bytes // 4
    make = f"Allocate it with StateLayout(block_size={block_size}, width={width})"
    make += ".allocate(num_blocks)"
    for what, other in {
        "states of a wider compressor": StateLayout(block_size, 4 * width),
        "states with more rows per page": StateLayout(4 * block_size, width),
    }.items():
        text = f"states must have shape [num_state_blocks, {values}] for layout 'v4_state' with "
        text += f"{size_name} = {block_size}, got [4, {other.page_bytes // 4}]. {make}, or correct "
        text += f"{size_name}."
        yield what, {"states": other.allocate(4)}, ValueError, text
    for what, stride in {
        "states at no multiple of 16 bytes": (values + 2, 1),
        "states with gaps": (2 * values, 2),
        "one page of states for all": (0, 1),
    }.items():
        memory = torch.zeros(16 * values)
        text = "states must have dense pages, none inside another, that start at multiples of 16 "
        text += f"bytes, got strides {list(stride)}. {make}."
        yield what, {"states": memory.as_strided((4, values), stride)}, ValueError, text
    text = "states must have pages that start at multiples of 16 bytes, got storage offset 2. "
    offset = torch.zeros(4 * values + 2)[2:].view(4, values)
    yield "states from the third value on", {"states": offset}, ValueError, f"{text}{make}."


def number_rows() -> Iterator[Entry]:
    for value in (0.0, -1e-6, math.nan, math.inf):
        text = f"eps must be above 0 and finite, got {value}. Pass a number above 0."
        yield f"an epsilon of {value}", {"eps": value}, ValueError, text
    for value in (True, "1e-6", None, torch.tensor(1e-6)):
        name = type(value).__name__
        text = f"eps must be a float, got {name}. "
        text += "Pass a Python float that is known on the host, never a tensor."
        yield f"an epsilon that is {name}", {"eps": value}, TypeError, text
    for value in (1, None, "True"):
        name = type(value).__name__
        text = f"overlap must be a bool, got {name}. Pass True or False."
        yield f"overlap is {name}", {"overlap": value}, TypeError, text


def compress_rows() -> Iterator[Entry]:
    pairs = "Pass [cos | sin] of the rotated pairs."
    for columns in (63, 514):
        text = "cos_sin_cache must have an even number of columns, at most head_dim = 512, got "
        table = torch.ones(9, columns)
        yield (
            f"{columns} columns of angles",
            {"cos_sin_cache": table},
            ValueError,
            f"{text}[9, {columns}]. {pairs}",
        )
    text = "norm_weight must have an even size where rows are rotated, got 3. Pass a cos_sin_cache "
    odd = {"k_cache": torch.zeros(4, 64, 3), "norm_weight": torch.ones(3), "layout": "plain"}
    yield (
        "rows of a pair and a half",
        odd | {"cos_sin_cache": torch.ones(9, 2)},
        ValueError,
        f"{text}without columns, or rows of whole pairs.",
    )
    yield (
        "projections that do not overlap",
        {"overlap": False},
        ValueError,
        "ape must have shape [4, 512], got [4, 1024]. Pass exactly 512 entries in dimension 1.",
    )
    yield (
        "the bias of another ratio",
        {"compress_ratio": 128},
        ValueError,
        "ape must have shape [128, 1024], got [4, 1024]. Pass exactly 128 entries in dimension 0.",
    )
    yield (
        "the indexer's layout for a cache of keys",
        {"layout": "v4_indexer_fp8"},
        ValueError,
        "k_cache must have shape [num_blocks, 8640] for layout 'v4_indexer_fp8' with block_size = "
        "64, got [4, 37440]. Allocate it with IndexerLayout(block_size=64).allocate(num_blocks), "
        "or correct block_size.",
    )
    yield (
        "the plain tag for an FP8 cache",
        {"layout": "plain"},
        TypeError,
        "k_cache must be torch.bfloat16 or torch.float32 for layout 'plain', got torch.uint8. "
        + ALLOCATE_PLAIN,
    )
    yield (
        "the norm of another width than the plain cache",
        {"layout": "plain", "k_cache": PlainLayout(64, 128).allocate(4)},
        ValueError,
        "norm_weight must have shape [128], got [512]. Pass exactly 128 entries in dimension 0.",
    )
    yield (
        "a plain cache of another block size",
        {"layout": "plain", "k_cache": PlainLayout(2).allocate(4)},
        ValueError,
        "k_cache must have pages of block_size = 64 rows, got [4, 2, 512]. "
        "Correct block_size, or pass the cache that it belongs to.",
    )
    yield from inside_rows("k_cache", 512)


COMPRESSOR_TABLE: dict[str, list[Entry]] = {
    **{op: [*states_rows(64, 12, "block_size")] for op in SAVE},
    **{
        op: [
            *cache_rows(MainLayout, IndexerLayout),
            *layout_rows("v4_fp8", "v4_indexer_fp8", "plain"),
            *states_rows(4, 2048, "state_block_size"),
            *number_rows(),
            *compress_rows(),
        ]
        for op in (*COMPRESS, *STEP)
    },
}
