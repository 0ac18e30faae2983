"""Rows of sparse MLA, and valid calls of its ops."""

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32
from tests.ops.error_rows.cache import PLAIN_DTYPES, cache_rows, layout_rows, plain_rows
from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import COUNTS, MINIMUM, NUMBERS, OWN, Valid, cache
from tests.ops.error_rows.wording import (
    Entry,
    agree,
    alone,
    angle_rows,
    at_least,
    dtype,
    elsewhere,
    exactly,
    flag_rows,
    float_rows,
    no_int,
    no_tensor,
    not_with,
    rank,
    rows_for_tokens,
    wrong,
)

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
EXTRA = ("extra_cache", "extra_indices", "extra_lens")


def plain(**changed: Any) -> dict[str, Any]:
    """A call over plain caches with something changed."""
    caches = {f"{source}_cache": PlainLayout(size).allocate(4) for source, size in SIZES.items()}
    return {"layout": "plain", **caches, **changed}


def plain_cache_rows(source: str) -> Iterator[Entry]:
    size, name = SIZES[source], f"{source}_cache"
    shape = f"[num_{source}_blocks, {source}_block_size, width]"
    for entry in plain_rows(name, 512, shape, f"{source}_block_size", size):
        yield entry._replace(spoiled=plain(**entry.spoiled))
    floats = PlainLayout(size, dtype=torch.float32).allocate(4)
    yield dtype(name, "torch.bfloat16", torch.float32, **plain(**{name: floats}))
    narrow = PlainLayout(size, 128).allocate(4)
    yield agree(name, shape, "width", 512, "q", narrow, **plain(**{name: narrow}))
    away = PlainLayout(size).allocate(4, "meta")
    yield elsewhere(name, "cpu", "q", "meta", **plain(**{name: away}))


def query_rows() -> Iterator[Entry]:
    q = Q.value
    yield dtype("q", PLAIN_DTYPES, torch.int32, **plain(q=q.int()))
    yield rank("q", "[num_tokens, num_heads, width]", q[0], **plain(q=q[0]))
    yield no_tensor("q", None, "Pass a torch.bfloat16 tensor", **plain(q=None))


def missing_rows() -> Iterator[Entry]:
    """Some of the three arguments of the extra cache, or none, but its block size."""
    for chosen in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        missing = [name for place, name in enumerate(EXTRA) if place not in chosen]
        yield alone(EXTRA[chosen[0]], missing[0], *missing)
    nothing = dict.fromkeys(EXTRA)
    yield at_least("extra_block_size", 1, 0, **nothing, extra_block_size=0)
    yield no_int("extra_block_size", "2", **nothing)


def plan_rows() -> Iterator[Entry]:
    """Plans that cannot cover the batch, and what a plan leaves nothing to decide for."""
    for rows in (0, 4):
        yield rows_for_tokens("plan", 5, "q", rows, plan=PLAN[:rows])
    for value in (1, 7):
        yield not_with("num_splits", "a plan", value, 0, num_splits=value)
    yield not_with("batch_invariant", "a plan", True, False, batch_invariant=True)
    yield not_with("num_splits", "a plan", 2, 0, num_splits=2, batch_invariant=True)


def flash_mla_plan_rows() -> Iterator[Entry]:
    """What is no plan of FlashMLA's, for no such call, or beside another one."""
    name, metadata = "flash_mla_plan", torch.zeros(9, 8, dtype=torch.int32)

    def alone(plan: object, **settings: object) -> dict[str, Any]:
        return {"plan": None, name: plan, **settings}

    yield not_with(name, "a plan", "both", flash_mla_plan=metadata)
    rule, do = "be None for impl 'reference'", "Pass impl='flash_mla', or leave it out"
    yield wrong(name, rule, "a plan", do, **alone(metadata, impl="reference"))
    yield no_tensor(name, [1], "Pass a torch.int32 tensor", **alone([1]))
    yield dtype(name, "torch.int32", torch.int64, **alone(metadata.long()))
    yield exactly(name, "[num_rows, 8]", PLAN, 1, **alone(PLAN))
    rule, do = "have more than 6 rows for as many tokens", "of the lens of this call"
    yield wrong(name, rule, 6, f"Make it with flash_mla_metadata {do}", **alone(metadata[:6]))


CACHES = [
    *layout_rows("v4_fp8", "plain"),
    *float_rows("softmax_scale", 0),
    *[
        row
        for source, size in SIZES.items()
        for names in ((f"{source}_cache", f"num_{source}_blocks", f"{source}_block_size"),)
        for row in (
            *cache_rows(MainLayout, IndexerLayout, *names, size),
            *plain_cache_rows(source),
        )
    ],
    *query_rows(),
]
SHARED = [
    *CACHES,
    *flag_rows("batch_invariant"),
    at_least("swa_width", 1, 0, swa_indices=i32([[]] * 5)),
    *plan_rows(),
    exactly("plan", "[num_work_tiles, 4]", PLAN[:, :3].contiguous(), 1),
    *flash_mla_plan_rows(),
    alone("positions", "cos_sin_cache"),
    alone("cos_sin_cache", "positions"),
    *angle_rows("width", 512),
]
TABLE: dict[str, list[Entry]] = {
    "sparse_mla_decode": [
        *SHARED,
        at_least("extra_width", 1, 0, extra_indices=i32([[]] * 5)),
        *missing_rows(),
    ],
    "sparse_mla_decode_paged": SHARED,
    "sparse_mla_gathered": [
        *float_rows("softmax_scale", 0),
        at_least("topk", 1, 0, indices=i32([[]] * 5)),
        dtype("kv", "torch.bfloat16", torch.ones(9, 512)),
        dtype("kv", "torch.float32", torch.bfloat16, q=torch.ones(5, 4, 512)),
    ],
}
