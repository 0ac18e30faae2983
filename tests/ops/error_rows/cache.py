"""Rows of the ops of paged caches, which other stems share, and of functions that make caches."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.valid import MAIN

ALLOCATE_PLAIN = "Allocate it with PlainLayout(block_size).allocate(num_blocks)"
PLAIN_DTYPES = "torch.bfloat16 or torch.float32"
ALIGNED = "start at multiples of 16 bytes"


def made_by(layout: Layout) -> str:
    width = f", width={layout.width}" if isinstance(layout, (StateLayout, MlaFp8Layout)) else ""
    name = type(layout).__name__
    return f"Allocate it with {name}(block_size={layout.block_size}{width}).allocate(num_blocks)"


def no_pages(
    name: str, layout: Layout, shape: str, value: Tensor, size_name: str, /, **spoiled: Any
) -> says.Entry:
    """Return a row for a cache of another layout or block size."""
    must = f"have shape {shape} for layout {layout.tag!r} with {size_name} = {layout.block_size}"
    return says.of_shape(name, must, value, f"{made_by(layout)}, or correct {size_name}", **spoiled)


def loose_pages(name: str, layout: Layout, value: Tensor) -> says.Entry:
    must = f"have dense pages, none inside another, that {ALIGNED}"
    got = f"strides {list(value.stride())}"
    return says.wrong(name, must, got, made_by(layout), **{name: value})


def shifted_pages(name: str, layout: Layout, value: Tensor) -> says.Entry:
    got = f"storage offset {value.storage_offset()}"
    return says.wrong(name, f"have pages that {ALIGNED}", got, made_by(layout), **{name: value})


def bytes_from(offset: int, page_stride: int, byte_stride: int, layout: Layout) -> Tensor:
    """Return 4 blocks with this offset and these strides."""
    shape, stride = layout.shape(4), (page_stride, byte_stride)
    last = 3 * page_stride + (layout.page_bytes - 1) * byte_stride
    return torch.zeros(offset + last + 1, dtype=torch.uint8).as_strided(shape, stride, offset)


def cache_rows(
    kind: type[Layout],
    other: type[Layout],
    name: str = "k_cache",
    blocks: str = "num_blocks",
    size_name: str = "block_size",
    size: int = 64,
) -> Iterator[says.Entry]:
    """Yield caches that violate the layout, which libraries would misread silently."""
    layout, wider = kind(size), kind(size + 8)
    page = layout.page_bytes
    for value in (
        torch.zeros(4, 64 * 528, dtype=torch.uint8),  # V4.1's block size
        wider.allocate(4),
        other(size).allocate(4),
        torch.zeros(4, page - 1, dtype=torch.uint8),  # a dense block without its padding
    ):
        yield no_pages(name, layout, f"[{blocks}, {page}]", value, size_name)
    given, shape = layout.allocate(4), f"[{blocks}, {wider.page_bytes}]"
    yield no_pages(name, wider, shape, given, size_name, **{size_name: size + 8})
    for stride in ((page + 8, 1), (2 * page, 2), (1, 4), (576, 1), (0, 1)):
        yield loose_pages(name, layout, bytes_from(0, *stride, layout))
    for offset in (8, 1):
        yield shifted_pages(name, layout, bytes_from(offset, page, 1, layout))


def layout_rows(*allowed: str) -> Iterator[says.Entry]:
    tags = {"v4_fp8", "v4_indexer_fp8", "plain", "v4_state", "v4.1_fp8", ""} - {*allowed}
    kinds = (None, 64, MainLayout(64), ["v4_fp8"])
    belongs_to = "the cache was written with"
    return says.word_rows("layout", belongs_to, *allowed, unknown=(*sorted(tags),), no_str=kinds)


def inside_rows(name: str, width: int) -> Iterator[says.Entry]:
    """Yield plain caches whose rows share memory, as arguments to write to."""
    memory = torch.zeros(4 * 64 * width, dtype=torch.bfloat16)
    must = "have no row inside another, as it is written to"
    for stride in (
        *((0, width, 1), (width, 0, 1), (0, 0, 1), (64 * width, width // 2, 1)),
        *((63 * width, width, 1), (width, 3 * width, 1)),
    ):
        call = {"layout": "plain", name: memory.as_strided((4, 64, width), stride)}
        yield says.wrong(name, must, f"strides {[*stride]}", ALLOCATE_PLAIN, **call)


def gaps(width: int, kind: torch.dtype = torch.bfloat16, size: int = 64) -> Tensor:
    return torch.zeros(4, size, 2 * width, dtype=kind)[..., ::2]


def other_size(name: str, width: int, size_name: str, size: int, value: Tensor) -> says.Entry:
    must, got = f"have pages of {size_name} = {size} rows", [4, value.shape[1], width]
    do = f"Correct {size_name}, or pass the cache that it belongs to"
    return says.wrong(name, must, got, do, **{name: value})


def row_rows(name: str, values: Tensor) -> Iterator[says.Entry]:
    """Yield blocks without rows, and rows with gaps; ``values`` have gaps."""
    none, strides = values[:, :0], f"strides {[*values.stride()]}"
    yield says.of_shape(name, "have pages of at least 1 row", none, ALLOCATE_PLAIN)
    yield says.wrong(name, "have dense rows", strides, ALLOCATE_PLAIN, **{name: values})


def plain_rows(
    name: str, width: int, shape: str, size_name: str, size: int, kind: torch.dtype = torch.bfloat16
) -> Iterator[says.Entry]:
    """Yield caches that are not plain; the calls need the layout's tag."""
    for value in (MAIN.value, torch.zeros(4, size, width, dtype=torch.float16)):
        yield says.dtype(name, PLAIN_DTYPES, value, ALLOCATE_PLAIN, "plain")
    yield says.no_tensor(name, 3, ALLOCATE_PLAIN)
    yield says.rank(name, shape, torch.zeros(64, width, dtype=kind))
    yield other_size(name, width, size_name, size, PlainLayout(3, width, kind).allocate(4))
    yield from row_rows(name, gaps(width, kind, size))


def tagged(entries: Iterator[says.Entry]) -> Iterator[says.Entry]:
    for entry in entries:
        yield entry._replace(spoiled={"layout": "plain", **entry.spoiled})


def row_count_rows(width: int) -> Iterator[says.Entry]:
    for count in (4, 0):
        rows = torch.ones(count, width, dtype=torch.bfloat16)
        yield says.rows_for_tokens("k", 5, "slot_mapping", count, k=rows)
    yield says.rows_for_tokens("k", 6, "slot_mapping", 5, slot_mapping=i64([-1] * 6))


def insert_plain_rows() -> Iterator[says.Entry]:
    """Yield rows of ``insert_k_cache``, whose cache is not quantised."""
    floats = PlainLayout(64, dtype=torch.float32).allocate(4)
    yield says.dtype("k", "torch.float32", torch.bfloat16, k_cache=floats)
    for value in (MAIN.value, torch.zeros(4, 64, 512, dtype=torch.float16)):
        yield says.dtype("k_cache", PLAIN_DTYPES, value, ALLOCATE_PLAIN, "plain")
    yield from row_rows("k_cache", gaps(512))
    for entry in inside_rows("k_cache", 512):
        yield entry._replace(spoiled={"k_cache": entry.spoiled["k_cache"]})


PLAIN_CACHE = PlainLayout(64).allocate(4)
FAR_OFFSET = says.at_most("offset", "num_rows", 4, 5)
TABLES = i32([[0]] * 16384)
MANY: dict[str, Any] = {"seq_lens": TABLES[:, 0], "gather_lens": None, "block_table": TABLES}
OUT = torch.zeros(3, 4, 512, dtype=torch.bfloat16)
TABLE: dict[str, list[says.Entry]] = {
    **{
        op: [*cache_rows(kind, other), *layout_rows(tag), *row_count_rows(width)]
        for op, kind, other, tag, width in (
            ("quantize_and_insert_k_cache", MainLayout, IndexerLayout, "v4_fp8", 512),
            ("quantize_and_insert_indexer_k", IndexerLayout, MainLayout, "v4_indexer_fp8", 128),
        )
    },
    "insert_k_cache": [*insert_plain_rows(), *row_count_rows(512)],
    "dequantize_and_gather_k_cache": [
        *cache_rows(MainLayout, IndexerLayout),
        *layout_rows("v4_fp8"),
        FAR_OFFSET,
        *[says.wrong("out", "have no row inside another, as it is written to",
         f"strides {[*stride]}", "Pass a tensor with memory for every row",
         out=OUT.flatten().as_strided((3, 4, 512), stride))
         for stride in ((0, 512, 1), (512, 0, 1), (2048, 512, 0), (1, 2, 4))],
        says.too_many(out=OUT[:1, :1].expand(16384, 1, 512)[:, :0], offset=0, **MANY),
        says.elsewhere("k_cache", "meta", "out", "cpu", out=OUT.to("meta")),
    ],
    "gather_k_cache": [
        *cache_rows(MainLayout, IndexerLayout),
        *layout_rows("v4_fp8", "plain"),
        *tagged(plain_rows("k_cache", 512, "[num_blocks, block_size, width]", "block_size", 64)),
        says.dtype("k_cache", "torch.uint8", PLAIN_CACHE, MAIN.advice, "v4_fp8"),
        says.elsewhere("seq_lens", "meta", "k_cache", "cpu", layout="plain",
         k_cache=PLAIN_CACHE.to("meta")),
        FAR_OFFSET,
        says.at_most("offset", "num_rows", 0, 1, num_rows=0),
        says.too_many(**MANY),
    ],
    "gather_indexer_k": [
        *cache_rows(IndexerLayout, MainLayout),
        *layout_rows("v4_indexer_fp8"),
        says.no_entry("cu_seq_lens"),
        says.too_many(cu_seq_lens=i32([0] * 16385), block_table=TABLES),
        says.elsewhere("cu_seq_lens", "meta", "k_cache", "cpu",
         k_cache=IndexerLayout(64).allocate(4, "meta")),
    ],
}  # fmt: skip


SMALL = MainLayout(2)


def buffers(
    layout: Any = SMALL, num_layers: int = 2, num_blocks: int = 1, layer: int = 0
) -> Tensor:
    return KVCacheBuffers(layout, num_layers=num_layers, num_blocks=num_blocks)[layer]


LAYOUTS = (MainLayout, IndexerLayout, PlainLayout, StateLayout, MlaFp8Layout, MlaDsFp8Layout)
MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: partial(kind, block_size=4) for kind in LAYOUTS},
    "KVCacheBuffers": buffers,
}
DTYPES = "torch.bfloat16, torch.float16 or torch.float32"
PAD, LAYER = "Pad kv_lora_rank or qk_rope_head_dim", "Construct it with more layers"
A_LAYOUT = "Pass one of dsv4_ops.core.layout, such as MainLayout(block_size=64)"
# rows of functions that make caches
MAKER_ROWS = [
    *(("MainLayout", says.no_int("block_size", size)) for size in (True, 2.5, None)),
    *((name, says.at_least("block_size", 1, n)) for name in [*MAKERS][:-1] for n in (0, -64)),
    ("PlainLayout", says.at_least("width", 1, 0)),
    ("PlainLayout", says.dtype("dtype", DTYPES, torch.int8, "Pass the dtype of the rows")),
    ("MlaFp8Layout", says.at_least("width", 16, 8)),
    ("MlaFp8Layout", says.wrong("width", "be a multiple of 16", 24, PAD)),
    ("StateLayout", says.at_least("width", 1, -1)),
    ("KVCacheBuffers", says.of_type("layout", "be a layout", "v4_fp8", A_LAYOUT)),
    *(("KVCacheBuffers", says.at_least("num_layers", 1, layers)) for layers in (0, -1)),
    ("KVCacheBuffers", says.at_least("num_blocks", 0, -1)),
    *(("KVCacheBuffers", says.wrong("layer", "be in -2..1", n, LAYER, IndexError))
     for n in (2, -3)),
]  # fmt: skip
