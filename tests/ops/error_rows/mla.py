"""Rows of sparse MLA, and valid calls of its ops."""

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from tests.helpers import i32
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.cache import PLAIN_DTYPES, cache_rows, layout_rows, plain_rows
from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import COUNTS, MINIMUM, NUMBERS, OWN, Valid, cache

DECODES = ("sparse_mla_decode", "sparse_mla_decode_paged")
SIZES = {"swa": 64, "extra": 2}
Q = Valid(bf16(5, 4, 512), "[num_tokens, num_heads, 512]")
SINK = Valid(torch.ones(4), "[num_heads]")
LENS = Valid(i32([2, 1, 0, 2, 1]), "[num_tokens]")
INDICES = i32([[0, -1]] * 5)
PLAN = i32([[0, 0, 1, 0], [1, 0, 2, 0], [1, 1, 2, 0], [2, 0, 1, 0], [3, 0, 1, 0], [4, 0, 1, 0]])


def pages(source: str) -> Valid:
    return cache(MainLayout(SIZES[source]), f"[num_{source}_blocks, {source}_page_bytes]")


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
    "sparse_mla_decode": {**WINDOW, "extra_indices": Valid(INDICES, "[num_tokens, extra_width]")},
    "sparse_mla_decode_paged": {
        **WINDOW,
        "extra_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_blocks]"),
    },
    "sparse_mla_gathered": {
        "q": Valid(bf16(5, 4, 512), "[num_tokens, num_heads, width]",
         "torch.bfloat16 or torch.float32"),
        "kv": Valid(bf16(9, 512), "[num_rows, width]"),
        "indices": Valid(INDICES, "[num_tokens, topk]"),
        "lens": LENS,
        "attn_sink": SINK,
    },
}  # fmt: skip
NUMBERS |= {
    "batch_invariant": False,  # with a plan, this must be False, and there are no splits
    "extra_block_size": SIZES["extra"],
    "num_splits": 0,
    "softmax_scale": 512**-0.5,
}
MINIMUM |= {"num_splits": 0}
COUNTS |= {"num_heads": "the heads of the queries"}
EXTRA = ("extra_cache", "extra_indices", "extra_lens")


def plain(**changed: Any) -> dict[str, Any]:
    """Return a call over plain caches with these changes."""
    caches = {f"{source}_cache": PlainLayout(size).allocate(4) for source, size in SIZES.items()}
    return {"layout": "plain", **caches, **changed}


def plain_cache_rows(source: str) -> Iterator[says.Entry]:
    size, name = SIZES[source], f"{source}_cache"
    shape = f"[num_{source}_blocks, {source}_block_size, width]"
    for entry in plain_rows(name, 512, shape, f"{source}_block_size", size):
        yield entry._replace(spoiled=plain(**entry.spoiled))
    floats = PlainLayout(size, dtype=torch.float32).allocate(4)
    yield says.dtype(name, "torch.bfloat16", torch.float32, **plain(**{name: floats}))
    narrow = PlainLayout(size, 128).allocate(4)
    yield says.agree(name, shape, "width", 512, "q", narrow, **plain(**{name: narrow}))
    away = PlainLayout(size).allocate(4, "meta")
    yield says.elsewhere(name, "cpu", "q", "meta", **plain(**{name: away}))


def query_rows() -> Iterator[says.Entry]:
    q = Q.value
    yield says.dtype("q", PLAIN_DTYPES, torch.int32, **plain(q=q.int()))
    yield says.rank("q", "[num_tokens, num_heads, width]", q[0], **plain(q=q[0]))
    yield says.no_tensor("q", None, "Pass a torch.bfloat16 tensor", **plain(q=None))


def missing_rows() -> Iterator[says.Entry]:
    """Yield calls with some arguments of the extra cache, or with its block size only."""
    for chosen in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        missing = [name for place, name in enumerate(EXTRA) if place not in chosen]
        yield says.alone(EXTRA[chosen[0]], missing[0], *missing)
    nothing = dict.fromkeys(EXTRA)
    yield says.at_least("extra_block_size", 1, 0, **nothing, extra_block_size=0)
    yield says.no_int("extra_block_size", "2", **nothing)


def plan_rows() -> Iterator[says.Entry]:
    """Yield plans that cannot cover the batch, and settings that conflict with a plan."""
    for rows in (0, 4):
        yield says.rows_for_tokens("plan", 5, "q", rows, plan=PLAN[:rows])
    for value in (1, 7):
        yield says.not_with("num_splits", "a plan", value, 0, num_splits=value)
    yield says.not_with("batch_invariant", "a plan", True, False, batch_invariant=True)
    yield says.not_with("num_splits", "a plan", 2, 0, num_splits=2, batch_invariant=True)


def flash_mla_plan_rows() -> Iterator[says.Entry]:
    """Yield invalid plans of FlashMLA, plans for other calls, and two plans in one call."""
    name, metadata = "flash_mla_plan", torch.zeros(9, 8, dtype=torch.int32)

    def only(plan: object, **settings: object) -> dict[str, Any]:
        return {"plan": None, name: plan, **settings}

    yield says.not_with(name, "a plan", "both", flash_mla_plan=metadata)
    rule, do = "be None for impl 'reference'", "Pass impl='flash_mla', or leave it out"
    yield says.wrong(name, rule, "a plan", do, **only(metadata, impl="reference"))
    yield says.no_tensor(name, [1], "Pass a torch.int32 tensor", **only([1]))
    yield says.dtype(name, "torch.int32", torch.int64, **only(metadata.long()))
    yield says.exactly(name, "[num_rows, 8]", PLAN, 1, **only(PLAN))
    rule, do = "have more than 6 rows for as many tokens", "of the lens of this call"
    yield says.wrong(name, rule, 6, f"Make it with flash_mla_metadata {do}", **only(metadata[:6]))


CACHES = [
    *layout_rows("v4_fp8", "plain"),
    *says.float_rows("softmax_scale", 0),
    *[row for source, size in SIZES.items()
     for names in ((f"{source}_cache", f"num_{source}_blocks", f"{source}_block_size"),)
     for row in (*cache_rows(MainLayout, IndexerLayout, *names, size), *plain_cache_rows(source))],
    *query_rows(),
]  # fmt: skip
SHARED = [
    *CACHES,
    *says.flag_rows("batch_invariant"),
    says.at_least("swa_width", 1, 0, swa_indices=i32([[]] * 5)),
    *plan_rows(),
    says.exactly("plan", "[num_work_tiles, 4]", PLAN[:, :3].contiguous(), 1),
    *flash_mla_plan_rows(),
    says.alone("positions", "cos_sin_cache"),
    says.alone("cos_sin_cache", "positions"),
    *says.angle_rows("width", 512),
]
TABLE: dict[str, list[says.Entry]] = {
    "sparse_mla_decode": [*SHARED, says.at_least("extra_width", 1, 0, extra_indices=i32([[]] * 5)),
     *missing_rows()],
    "sparse_mla_decode_paged": SHARED,
    "sparse_mla_gathered": [*says.float_rows("softmax_scale", 0),
     says.at_least("topk", 1, 0, indices=i32([[]] * 5)),
     says.dtype("kv", "torch.bfloat16", torch.ones(9, 512)),
     says.dtype("kv", "torch.float32", torch.bfloat16, q=torch.ones(5, 4, 512))],
}  # fmt: skip
