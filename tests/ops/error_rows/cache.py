"""Rows of ``error_rows.TABLE`` for the ops of paged caches, and the errors of what makes caches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4_ops.attention.caches import KVCacheBuffers
from dsv4_ops.core.layout import (
    IndexerLayout,
    Layout,
    MainLayout,
    MlaDsFp8Layout,
    MlaFp8Layout,
    PlainLayout,
    StateLayout,
)
from tests.helpers import i32, i64
from tests.ops.error_rows.valid import INDEXER, INSERT_PLAIN, MAIN, QUANTIZE_INDEXER, QUANTIZE_K

Entry = tuple[str, dict[str, Any], type[Exception], str]

MANY_LENS, MANY_TABLES = torch.zeros(16384, dtype=torch.int32), i32([[0]] * 16384)
TOO_MANY = "num_reqs must be at most 16383, got 16384. Split the batch."
ALLOCATE_PLAIN = "Allocate it with PlainLayout(block_size).allocate(num_blocks)."
NO_ROWS = "k_cache must have pages of at least 1 row, got [4, 0, 512]. " + ALLOCATE_PLAIN
APART = "k_cache must have dense rows, got strides [65536, 1024, 2]. " + ALLOCATE_PLAIN
GAPS = torch.zeros(4, 64, 1024, dtype=torch.bfloat16)[..., ::2]
WORKSPACE = torch.zeros(3 * 4 * 512, dtype=torch.bfloat16)
FAR_OFFSET: Entry = (
    "no room behind the offset",
    {"offset": 5},
    ValueError,
    "offset must be at most num_rows = 4, got 5. Lower offset, or raise num_rows.",
)


def bytes_from(offset: int, page_stride: int, byte_stride: int, layout: Layout) -> torch.Tensor:
    """4 blocks somewhere in memory."""
    shape, stride = layout.shape(4), (page_stride, byte_stride)
    last = 3 * page_stride + (layout.page_bytes - 1) * byte_stride
    return torch.zeros(offset + last + 1, dtype=torch.uint8).as_strided(shape, stride, offset)


def cache_rows(kind: type[Layout], other: type[Layout]) -> Iterator[Entry]:
    """Caches that are not of the layout: what libraries would misread without complaint."""
    layout = kind(64)
    tag, page = layout.tag, layout.page_bytes
    make = f"Allocate it with {kind.__name__}(block_size=64).allocate(num_blocks)"
    for what, cache in {
        "pages of V4.1": torch.zeros(4, 64 * 528, dtype=torch.uint8),
        "a cache of another block size": kind(2).allocate(4),
        "a cache of the other layout": other(64).allocate(4),
        "a dense page without its padding": torch.zeros(4, page - 1, dtype=torch.uint8),
    }.items():
        text = f"k_cache must have shape [num_blocks, {page}] for layout {tag!r} with block_size "
        text += f"= 64, got {list(cache.shape)}. {make}, or correct block_size."
        yield what, {"k_cache": cache}, ValueError, text
    yield (
        "the block size of another cache",
        {"block_size": 2},
        ValueError,
        f"k_cache must have shape [num_blocks, {kind(2).page_bytes}] for layout {tag!r} with "
        f"block_size = 2, got [4, {page}]. Allocate it with {kind.__name__}(block_size=2)"
        ".allocate(num_blocks), or correct block_size.",
    )
    for what, stride in {
        "pages at no multiple of 16": (page + 8, 1),
        "bytes with gaps": (2 * page, 2),
        "bytes across pages": (1, 4),
        "pages inside each other": (576, 1),
        "one page for all": (0, 1),
    }.items():
        text = "k_cache must have dense pages, none inside another, that start at multiples of 16 "
        text += f"bytes, got strides {list(stride)}. {make}."
        yield what, {"k_cache": bytes_from(0, *stride, layout)}, ValueError, text
    for offset in (8, 1):
        text = "k_cache must have pages that start at multiples of 16 bytes, got storage offset "
        text += f"{offset}. {make}."
        cache = bytes_from(offset, page, 1, layout)
        yield f"the first page at byte {offset}", {"k_cache": cache}, ValueError, text


def layout_rows(*allowed: str) -> Iterator[Entry]:
    advice = "Pass the layout that the cache was written with."
    known = " or ".join(repr(tag) for tag in allowed)
    unknown = {"v4_fp8", "v4_indexer_fp8", "plain", "v4_state", "v4.1_fp8", ""} - {*allowed}
    for tag in sorted(unknown):
        text = f"layout must be {known}, got {tag!r}. {advice}"
        yield f"layout {tag!r}", {"layout": tag}, ValueError, text
    for value in (None, 64, MainLayout(64), ["v4_fp8"]):
        name = type(value).__name__
        text = f"layout must be a str, got {name}. {advice}"
        yield f"layout is {name}", {"layout": value}, TypeError, text


def row_count_rows(width: int) -> Iterator[Entry]:
    for count in (4, 0):
        yield (
            f"{count} keys for 5 tokens",
            {"k": torch.ones(count, width, dtype=torch.bfloat16)},
            ValueError,
            f"k must have at least num_tokens = 5 rows as in slot_mapping, got {count}. "
            "Pass a row for every token.",
        )
    yield (
        "more slots than keys",
        {"slot_mapping": i64([-1] * 6)},
        ValueError,
        "k must have at least num_tokens = 6 rows as in slot_mapping, got 5. "
        "Pass a row for every token.",
    )


def inside_rows(name: str, width: int) -> Iterator[Entry]:
    """Plain caches to write to, rows of which share memory."""
    memory = torch.zeros(4 * 64 * width, dtype=torch.bfloat16)
    for what, stride in {
        "one page for all": (0, width, 1),
        "one row for all of a page": (width, 0, 1),
        "one row for all": (0, 0, 1),
        "rows inside each other": (64 * width, width // 2, 1),
        "pages inside each other": (63 * width, width, 1),
        "rows in place of other pages": (width, 3 * width, 1),
    }.items():
        text = f"{name} must have no row inside another, as it is written to, got strides "
        text += f"{list(stride)}. {ALLOCATE_PLAIN}"
        call = {"layout": "plain", name: memory.as_strided((4, 64, width), stride)}
        yield f"plain: {what}", call, ValueError, text


def plain_rows() -> Iterator[Entry]:
    """``insert_k_cache``: a cache without quantisation."""
    yield (
        "float keys rounded on the way",
        {"k_cache": PlainLayout(64, dtype=torch.float32).allocate(4)},
        TypeError,
        "k must be torch.float32, got torch.bfloat16. Cast it with .to(torch.float32).",
    )
    yield (
        "half precision",
        {"k_cache": torch.zeros(4, 64, 512, dtype=torch.float16)},
        TypeError,
        "k_cache must be torch.bfloat16 or torch.float32 for layout 'plain', got torch.float16. "
        + ALLOCATE_PLAIN,
    )
    yield (
        "an FP8 cache",
        {"k_cache": MAIN.value},
        TypeError,
        "k_cache must be torch.bfloat16 or torch.float32 for layout 'plain', got torch.uint8. "
        + ALLOCATE_PLAIN,
    )
    yield "pages without rows", {"k_cache": GAPS[:, :0]}, ValueError, NO_ROWS
    yield "rows with gaps", {"k_cache": GAPS}, ValueError, APART
    for what, call, error, text in inside_rows("k_cache", 512):
        yield what, {"k_cache": call["k_cache"]}, error, text


def plain_gather_rows() -> Iterator[Entry]:
    """``gather_k_cache`` takes plain caches too."""
    plain = PlainLayout(64).allocate(4)
    yield (
        "a plain cache without its tag",
        {"k_cache": plain},
        TypeError,
        f"k_cache must be torch.uint8 for layout 'v4_fp8', got torch.bfloat16. {MAIN.advice}",
    )
    yield (
        "the plain tag for an FP8 cache",
        {"layout": "plain"},
        TypeError,
        "k_cache must be torch.bfloat16 or torch.float32 for layout 'plain', got torch.uint8. "
        + ALLOCATE_PLAIN,
    )
    yield (
        "the plain tag for no cache",
        {"layout": "plain", "k_cache": None},
        TypeError,
        f"k_cache must be a tensor, got NoneType. {ALLOCATE_PLAIN}",
    )
    yield (
        "a plain cache without pages",
        {"layout": "plain", "k_cache": plain[0]},
        ValueError,
        "k_cache must have shape [num_blocks, block_size, width], got [64, 512]. "
        "Pass a tensor of 3 dimensions.",
    )
    yield (
        "a plain cache of another block size",
        {"layout": "plain", "k_cache": PlainLayout(2).allocate(4)},
        ValueError,
        "k_cache must have pages of block_size = 64 rows, got [4, 2, 512]. "
        "Correct block_size, or pass the cache that it belongs to.",
    )
    yield (
        "plain pages without rows",
        {"layout": "plain", "k_cache": GAPS[:, :0]},
        ValueError,
        NO_ROWS,
    )
    yield "plain rows with gaps", {"layout": "plain", "k_cache": GAPS}, ValueError, APART
    yield (
        "a plain cache elsewhere",
        {"layout": "plain", "k_cache": plain.to("meta")},
        ValueError,
        "seq_lens must be on meta like k_cache, got cpu. Move all tensors of a call to one device.",
    )


MANY: dict[str, Any] = {"seq_lens": MANY_LENS, "gather_lens": None, "block_table": MANY_TABLES}
CACHE_TABLE: dict[str, list[Entry]] = {
    **{
        op: [
            *cache_rows(MainLayout, IndexerLayout),
            *layout_rows("v4_fp8"),
            *row_count_rows(512),
        ]
        for op in QUANTIZE_K
    },
    **{
        op: [
            *cache_rows(IndexerLayout, MainLayout),
            *layout_rows("v4_indexer_fp8"),
            *row_count_rows(128),
        ]
        for op in QUANTIZE_INDEXER
    },
    **{op: [*plain_rows(), *row_count_rows(512)] for op in INSERT_PLAIN},
    "dequantize_and_gather_k_cache": [
        *cache_rows(MainLayout, IndexerLayout),
        *layout_rows("v4_fp8"),
        FAR_OFFSET,
        *[
            (
                f"a workspace of strides {stride}",
                {"out": WORKSPACE.as_strided((3, 4, 512), stride)},
                ValueError,
                "out must have no row inside another, as it is written to, got strides "
                f"{[*stride]}. Pass a tensor with memory for every row.",
            )
            for stride in ((0, 512, 1), (512, 0, 1), (2048, 512, 0), (1, 2, 4))
        ],
        (
            "too many requests",
            {"out": torch.zeros(16384, 1, 512, dtype=torch.bfloat16)[:, :0], "offset": 0, **MANY},
            ValueError,
            TOO_MANY,
        ),
        (
            "a workspace elsewhere",
            {"out": torch.zeros(3, 4, 512, dtype=torch.bfloat16, device="meta")},
            ValueError,
            "k_cache must be on meta like out, got cpu. Move all tensors of a call to one device.",
        ),
    ],
    "gather_k_cache": [
        *cache_rows(MainLayout, IndexerLayout),
        *layout_rows("v4_fp8", "plain"),
        *plain_gather_rows(),
        FAR_OFFSET,
        (
            "no row, but an offset",
            {"num_rows": 0},
            ValueError,
            "offset must be at most num_rows = 0, got 1. Lower offset, or raise num_rows.",
        ),
        ("too many requests", MANY, ValueError, TOO_MANY),
    ],
    "gather_indexer_k": [
        *cache_rows(IndexerLayout, MainLayout),
        *layout_rows("v4_indexer_fp8"),
        (
            "no entry",
            {"cu_seq_lens": i32([])},
            ValueError,
            "cu_seq_lens must have shape [num_reqs + 1], got [0]. "
            "Pass at least 1 entry, even for an empty batch.",
        ),
        (
            "too many requests",
            {"cu_seq_lens": torch.zeros(16385, dtype=torch.int32), "block_table": MANY_TABLES},
            ValueError,
            TOO_MANY,
        ),
        (
            "a cache elsewhere",
            {"k_cache": INDEXER.value.to("meta")},
            ValueError,
            "cu_seq_lens must be on meta like k_cache, got cpu. "
            "Move all tensors of a call to one device.",
        ),
    ],
}


def caches(num_layers: int, num_blocks: int) -> KVCacheBuffers:
    return KVCacheBuffers(MainLayout(2), num_layers=num_layers, num_blocks=num_blocks)


LAYOUTS = (MainLayout, IndexerLayout, PlainLayout, StateLayout, MlaFp8Layout, MlaDsFp8Layout)
# what makes caches: who complains, call, error, message behind the name
NO_INT = "Pass a Python int that is known on the host, never a tensor."
CONSTRUCTORS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    *(
        (
            "MainLayout",
            lambda size=size: MainLayout(size),
            TypeError,
            f"block_size must be an int, got {type(size).__name__}. {NO_INT}",
        )
        for size in (True, 2.5, None)
    ),
    (
        "PlainLayout",
        lambda: PlainLayout(4, width=0),
        ValueError,
        "width must be at least 1, got 0. Pass 1 or more.",
    ),
    (
        "PlainLayout",
        lambda: PlainLayout(4, dtype=torch.int8),
        TypeError,
        "dtype must be torch.bfloat16, torch.float16 or torch.float32, got torch.int8. Pass the "
        "dtype of the rows.",
    ),
    (
        "MlaFp8Layout",
        lambda: MlaFp8Layout(4, width=8),
        ValueError,
        "width must be at least 16, got 8. Pass 16 or more.",
    ),
    (
        "MlaFp8Layout",
        lambda: MlaFp8Layout(4, width=24),
        ValueError,
        "width must be a multiple of 16, got 24. Pad kv_lora_rank or qk_rope_head_dim.",
    ),
    (
        "StateLayout",
        lambda: StateLayout(4, width=-1),
        ValueError,
        "width must be at least 1, got -1. Pass 1 or more.",
    ),
    (
        "KVCacheBuffers",
        lambda: KVCacheBuffers("v4_fp8", num_layers=1, num_blocks=1),
        TypeError,
        "layout must be a layout, got str. Pass one of dsv4_ops.core.layout, such as "
        "MainLayout(block_size=64).",
    ),
    *(
        (
            kind.__name__,
            lambda kind=kind, size=size: kind(size),
            ValueError,
            f"block_size must be at least 1, got {size}. Pass 1 or more.",
        )
        for kind in LAYOUTS
        for size in (0, -64)
    ),
    *(
        (
            "KVCacheBuffers",
            lambda layers=layers: caches(layers, 1),
            ValueError,
            f"num_layers must be at least 1, got {layers}. Pass 1 or more.",
        )
        for layers in (0, -1)
    ),
    (
        "KVCacheBuffers",
        lambda: caches(1, -1),
        ValueError,
        "num_blocks must be at least 0, got -1. Pass 0 or more.",
    ),
    *(
        (
            "KVCacheBuffers",
            lambda layer=layer: caches(2, 1)[layer],
            IndexError,
            f"layer must be in -2..1, got {layer}. Construct it with more layers.",
        )
        for layer in (2, -3)
    ),
]
