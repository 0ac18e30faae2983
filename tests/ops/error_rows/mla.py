"""Rows of ``error_rows.TABLE`` for sparse MLA, and valid calls of its ops."""

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32
from tests.ops.error_rows.cache import ALLOCATE_PLAIN, Entry, bytes_from, layout_rows
from tests.ops.error_rows.rope import bf16, float_rows, table_rows
from tests.ops.error_rows.sparse import flag_rows
from tests.ops.error_rows.valid import COUNTS, MINIMUM, NUMBERS, OWN, Valid, cache

DECODES = ("sparse_mla_decode", "sparse_mla_decode_paged")
SIZES = {"swa": 64, "extra": 2}
Q = Valid(bf16(5, 4, 512), "[num_tokens, num_heads, 512]")
SINK = Valid(torch.ones(4), "[num_heads]")
LENS = Valid(i32([2, 1, 0, 2, 1]), "[num_tokens]")
INDICES = i32([[0, -1]] * 5)
PLAN = i32([[0, 0, 1, 0], [1, 0, 2, 0], [1, 1, 2, 0], [2, 0, 1, 0], [3, 0, 1, 0], [4, 0, 1, 0]])


def pages(source: str) -> Valid:
    shape = f"[num_{source}_blocks, {source}_page_bytes]"
    return cache(MainLayout(SIZES[source]), shape)


WINDOW = {
    "q": Q,
    "swa_cache": pages("swa"),
    "swa_indices": Valid(INDICES, "[num_tokens, swa_width]"),
    "swa_lens": LENS,
    "extra_cache": pages("extra"),
    "extra_lens": LENS,
    "attn_sink": SINK,
    "plan": Valid(PLAN, "[num_work_tiles, 4]"),
    "cos_sin_cache": Valid(torch.ones(9, 64), "[num_positions, rope_dim]"),
}
OWN |= {
    "sparse_mla_decode": {
        **WINDOW,
        "extra_indices": Valid(INDICES, "[num_tokens, extra_width]"),
    },
    "sparse_mla_decode_paged": {
        **WINDOW,
        "extra_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_blocks]"),
    },
    "sparse_mla_gathered": {
        "q": Valid(
            bf16(5, 4, 512), "[num_tokens, num_heads, width]", "torch.bfloat16 or torch.float32"
        ),
        "kv": Valid(bf16(9, 512), "[num_rows, width]"),
        "indices": Valid(INDICES, "[num_tokens, topk]"),
        "lens": LENS,
        "attn_sink": SINK,
    },
}
NUMBERS |= {
    "batch_invariant": False,  # a plan allows nothing else, nor splits
    "extra_block_size": SIZES["extra"],
    "num_splits": 0,
    "softmax_scale": 512**-0.5,
}
MINIMUM |= {"num_splits": 0}
COUNTS |= {"num_heads": "the heads of the queries"}


def byte_cache_rows(source: str) -> Iterator[Entry]:
    """Caches that are not of the layout: what libraries would misread without complaint."""
    size, name = SIZES[source], f"{source}_cache"
    layout = MainLayout(size)
    page = layout.page_bytes
    make = f"Allocate it with MainLayout(block_size={size}).allocate(num_blocks)"
    for what, other in {
        "pages of V4.1": torch.zeros(4, 64 * 528, dtype=torch.uint8),
        "a cache of another block size": MainLayout(4).allocate(4),
        "a cache of indexer keys": IndexerLayout(size).allocate(4),
        "a dense page without its padding": torch.zeros(4, page - 1, dtype=torch.uint8),
    }.items():
        text = f"{name} must have shape [num_{source}_blocks, {page}] for layout 'v4_fp8' with "
        text += f"{source}_block_size = {size}, got {list(other.shape)}. {make}, or correct "
        text += f"{source}_block_size."
        yield f"{source}: {what}", {name: other}, ValueError, text
    wider = MainLayout(size + 1)
    yield (
        f"{source}: the block size of another cache",
        {f"{source}_block_size": size + 1},
        ValueError,
        f"{name} must have shape [num_{source}_blocks, {wider.page_bytes}] for layout 'v4_fp8' "
        f"with {source}_block_size = {size + 1}, got [4, {page}]. Allocate it with "
        f"MainLayout(block_size={size + 1}).allocate(num_blocks), or correct {source}_block_size.",
    )
    for what, stride in {
        "pages at no multiple of 16": (page + 8, 1),
        "bytes with gaps": (2 * page, 2),
        "pages inside each other": (576, 1),
        "one page for all": (0, 1),
    }.items():
        text = f"{name} must have dense pages, none inside another, that start at multiples of 16 "
        text += f"bytes, got strides {list(stride)}. {make}."
        yield f"{source}: {what}", {name: bytes_from(0, *stride, layout)}, ValueError, text
    text = f"{name} must have pages that start at multiples of 16 bytes, got storage offset 8. "
    moved = bytes_from(8, page, 1, layout)
    yield f"{source}: the first page at byte 8", {name: moved}, ValueError, f"{text}{make}."


def plain(**changed: Any) -> dict[str, Any]:
    """A call over plain caches with something changed."""
    caches = {f"{source}_cache": PlainLayout(size).allocate(4) for source, size in SIZES.items()}
    return {"layout": "plain", **caches, **changed}


def plain_cache_rows(source: str) -> Iterator[Entry]:
    size, name = SIZES[source], f"{source}_cache"
    shape = f"[num_{source}_blocks, {source}_block_size, width]"
    gaps = torch.zeros(4, size, 1024, dtype=torch.bfloat16)[..., ::2]
    half = torch.zeros(4, size, 512, dtype=torch.float16)
    dtypes = f"{name} must be torch.bfloat16 or torch.float32 for layout 'plain', got"
    for what, value, error, text in (
        (
            "the plain tag for an FP8 cache",
            MainLayout(size).allocate(4),
            TypeError,
            f"{dtypes} torch.uint8. {ALLOCATE_PLAIN}",
        ),
        ("half precision", half, TypeError, f"{dtypes} torch.float16. {ALLOCATE_PLAIN}"),
        (
            "no plain cache",
            3,
            TypeError,
            f"{name} must be a tensor, got int. {ALLOCATE_PLAIN}",
        ),
        (
            "a plain cache without pages",
            gaps[0],
            ValueError,
            f"{name} must have shape {shape}, got [{size}, 512]. Pass a tensor of 3 dimensions.",
        ),
        (
            "plain pages without rows",
            gaps[:, :0],
            ValueError,
            f"{name} must have pages of at least 1 row, got [4, 0, 512]. {ALLOCATE_PLAIN}",
        ),
        (
            "a plain cache of another block size",
            PlainLayout(3).allocate(4),
            ValueError,
            f"{name} must have pages of {source}_block_size = {size} rows, got [4, 3, 512]. "
            f"Correct {source}_block_size, or pass the cache that it belongs to.",
        ),
        (
            "plain rows with gaps",
            gaps,
            ValueError,
            f"{name} must have dense rows, got strides {list(gaps.stride())}. {ALLOCATE_PLAIN}",
        ),
        (
            "a plain cache of floats for bf16 queries",
            PlainLayout(size, dtype=torch.float32).allocate(4),
            TypeError,
            f"{name} must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16).",
        ),
        (
            "a plain cache of another width",
            PlainLayout(size, 128).allocate(4),
            ValueError,
            f"{name} must have shape {shape} with width = 512 as in q, got [4, {size}, 128]. "
            "Make them agree: width counts the values of a row.",
        ),
        (
            "a plain cache elsewhere",
            PlainLayout(size).allocate(4, "meta"),
            ValueError,
            f"{name} must be on cpu like q, got meta. Move all tensors of a call to one device.",
        ),
    ):
        yield f"{source}: {what}", plain(**{name: value}), error, text


def query_rows() -> Iterator[Entry]:
    text = "q must be torch.bfloat16 or torch.float32, got torch.int32. "
    yield (
        "plain: queries of ints",
        plain(q=Q.value.int()),
        TypeError,
        f"{text}Cast it with .to(torch.bfloat16).",
    )
    yield (
        "plain: one token's queries",
        plain(q=Q.value[0]),
        ValueError,
        "q must have shape [num_tokens, num_heads, width], got [4, 512]. "
        "Pass a tensor of 3 dimensions.",
    )
    yield (
        "plain: no queries",
        plain(q=None),
        TypeError,
        "q must be a tensor, got NoneType. Pass a torch.bfloat16 tensor.",
    )


def column_rows(name: str, width: str) -> Iterator[Entry]:
    text = f"{width} must be at least 1, got 0. Pass 1 or more."
    yield f"{name} without columns", {name: i32([[]] * 5)}, ValueError, text


def missing_rows() -> Iterator[Entry]:
    """Some of the three arguments of the extra cache."""
    names = ("extra_cache", "extra_indices", "extra_lens")
    for chosen in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        missing = next(name for place, name in enumerate(names) if place not in chosen)
        first = names[chosen[0]]
        nothing = {name: None for place, name in enumerate(names) if place not in chosen}
        text = f"{first} must be None without {missing}, got a tensor. Pass both or neither."
        yield f"only {[names[place] for place in chosen]}", nothing, ValueError, text


def unused_size_rows() -> Iterator[Entry]:
    """The block size of a cache that is not there."""
    nothing: dict[str, Any] = dict.fromkeys(("extra_cache", "extra_indices", "extra_lens"))
    yield (
        "no extra cache, but pages of 0 rows",
        {**nothing, "extra_block_size": 0},
        ValueError,
        "extra_block_size must be at least 1, got 0. Pass 1 or more.",
    )
    yield (
        "no extra cache, but a str of rows",
        {**nothing, "extra_block_size": "2"},
        TypeError,
        "extra_block_size must be an int, got str. "
        "Pass a Python int that is known on the host, never a tensor.",
    )


def plan_rows() -> Iterator[Entry]:
    """Plans that cannot cover the batch, and what a plan leaves nothing to decide for."""
    for rows in (0, 4):
        text = f"plan must have at least num_tokens = 5 rows as in q, got {rows}. "
        text += "Pass a row for every token."
        yield f"a plan of {rows} rows", {"plan": PLAN[:rows]}, ValueError, text
    three = PLAN[:, :3].contiguous()
    yield (
        "a plan of three columns",
        {"plan": three},
        ValueError,
        "plan must have shape [num_work_tiles, 4], got [6, 3]. "
        "Pass exactly 4 entries in dimension 1.",
    )
    for name, neutral, values in (("num_splits", 0, (1, 7)), ("batch_invariant", False, (True,))):
        for value in values:
            text = f"{name} must be {neutral} with a plan, got {value}. Pass one of the two."
            yield f"a plan and {name} = {value}", {name: value}, ValueError, text
    text = "num_splits must be 0 with a plan, got 2. Pass one of the two."
    both = {"num_splits": 2, "batch_invariant": True}
    yield "a plan, splits and batch invariance", both, ValueError, text


def flash_mla_plan_rows() -> Iterator[Entry]:
    """What is no plan of FlashMLA's, for no such call, or beside another one."""
    metadata = torch.zeros(9, 8, dtype=torch.int32)

    def alone(plan: object, **settings: object) -> dict[str, object]:
        return {"plan": None, "flash_mla_plan": plan, **settings}

    yield (
        "two plans",
        {"flash_mla_plan": metadata},
        ValueError,
        "flash_mla_plan must be None with a plan, got both. Pass one of the two.",
    )
    yield (
        "a plan of FlashMLA for the reference",
        alone(metadata, impl="reference"),
        ValueError,
        "flash_mla_plan must be None for impl 'reference', got a plan. "
        "Pass impl='flash_mla', or leave it out.",
    )
    yield (
        "a plan of FlashMLA that is a list",
        alone([1]),
        TypeError,
        "flash_mla_plan must be a tensor, got list. Pass a torch.int32 tensor.",
    )
    yield (
        "a plan of FlashMLA in int64",
        alone(metadata.long()),
        TypeError,
        "flash_mla_plan must be torch.int32, got torch.int64. Cast it with .to(torch.int32).",
    )
    yield (
        "a plan of ours in the place of FlashMLA's",
        alone(PLAN),
        ValueError,
        "flash_mla_plan must have shape [num_rows, 8], got [6, 4]. "
        "Pass exactly 8 entries in dimension 1.",
    )
    yield (
        "a plan of FlashMLA without parts",
        alone(metadata[:6]),
        ValueError,
        "flash_mla_plan must have more than 6 rows for as many tokens, got 6. "
        "Make it with flash_mla_metadata of the lens of this call.",
    )


def turn_rows() -> Iterator[Entry]:
    """One of the two without the other, and tables of no pairs of the row."""
    for given, other in (("positions", "cos_sin_cache"), ("cos_sin_cache", "positions")):
        text = f"{given} must be None without {other}, got a tensor. Pass both or neither."
        yield f"only {given}", {other: None}, ValueError, text
    yield from table_rows("width", 512)


CACHES: list[Entry] = [
    *layout_rows("v4_fp8", "plain"),
    *float_rows("softmax_scale", 0),
    *byte_cache_rows("swa"),
    *byte_cache_rows("extra"),
    *plain_cache_rows("swa"),
    *plain_cache_rows("extra"),
    *query_rows(),
]
SHARED: list[Entry] = [
    *CACHES,
    *flag_rows("batch_invariant"),
    *column_rows("swa_indices", "swa_width"),
    *plan_rows(),
    *flash_mla_plan_rows(),
    *turn_rows(),
]
MLA_TABLE: dict[str, list[Entry]] = {
    "sparse_mla_decode": [
        *SHARED,
        *column_rows("extra_indices", "extra_width"),
        *missing_rows(),
        *unused_size_rows(),
    ],
    "sparse_mla_decode_paged": SHARED,
    "sparse_mla_gathered": [
        *float_rows("softmax_scale", 0),
        *column_rows("indices", "topk"),
        (
            "keys of floats for bf16 queries",
            {"kv": torch.ones(9, 512)},
            TypeError,
            "kv must be torch.bfloat16, got torch.float32. Cast it with .to(torch.bfloat16).",
        ),
        (
            "bf16 keys for queries of floats",
            {"q": torch.ones(5, 4, 512)},
            TypeError,
            "kv must be torch.float32, got torch.bfloat16. Cast it with .to(torch.float32).",
        ),
    ],
}
