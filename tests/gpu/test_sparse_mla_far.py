"""Sparse MLA over caches and queries larger than 4 GiB, at bytes beyond 2^31 and 2^32. Run on a GPU
with ``pytest -m gpu tests``."""

import math

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import Layout, MainLayout, PlainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.sparse_mla import BARE
from tests.helpers import INT32_MAX
from tests.support import attention_batches as batches


def far_slots(layout: Layout, blocks: int) -> Tensor:
    """Return slots around the bytes 2^31 and 2^32, and the last slots."""
    borders = (2**31, 2**32, blocks * layout.page_bytes)
    pages = [border // layout.page_bytes - back for border in borders for back in (1, 2, 3)]
    slots = [page * layout.block_size + row for page in pages for row in (0, layout.block_size - 1)]
    assert max(slots) < INT32_MAX
    return torch.tensor(slots)


@pytest.mark.parametrize("name", [batches.DECODE, batches.PAGED])
@pytest.mark.parametrize("kind", ["v4_fp8", "plain"])
def test_caches_beyond_4_gib(gpu_memory_alone: None, name: str, kind: str) -> None:
    """Rows at bytes beyond 2^31 and 2^32, and plain rows at elements beyond them, give the same
    results as equal rows in a small cache."""
    made, layout = batches.generator(3), MainLayout(64) if kind == "v4_fp8" else PlainLayout(64)
    gibibytes = 5 if kind == "v4_fp8" else 8
    blocks = math.ceil(gibibytes * 2**30 / layout.page_bytes)
    slots = far_slots(layout, blocks)
    k, far = batches.keys_of(made, len(slots)), len(slots)
    large, small = layout.allocate(blocks, batches.DEVICE), layout.allocate(far, "cpu")
    assert large.nbytes > 2**32
    near = torch.arange(far) * 64 + slots % 64  # one row per block, at the same place of the block
    for cache, places in ((large, slots), (small, near)):
        rows = k.to(cache.device), cache, places.to(cache.device)
        if kind == "plain":
            ops.insert_k_cache(*rows)
        else:
            ops.quantize_and_insert_k_cache(*rows, block_size=64)

    tokens, heads = 6, 64
    q, sink = batches.normal(made, tokens, heads, 512), batches.sink_of(made, heads)
    chosen = batches.integers(made, 0, far, tokens, 24).long()
    lens = torch.full((tokens,), 24, dtype=torch.int32)
    table = batches.integers(made, 0, far, tokens, 3).long()
    chosen[0] = torch.arange(24) % far

    def call(cache: Tensor, places: Tensor) -> Case:
        swa = (cache, places[chosen].int(), lens)
        if name == batches.DECODE:
            extra = (cache, places[chosen.flip(1)].int(), lens // 2)
        else:
            pages = (places // 64)[table].int()
            extra = (cache, torch.full_like(lens, 150), torch.arange(tokens).int(), pages)
        return Case("far", (q, *swa, *extra, sink, *BARE), batches.settings_of(64, 64, layout=kind))

    # a block of the large cache has two of the rows, a block of the small cache one: the paged op
    # reads whole blocks of the table, so both caches must hold the same blocks
    if name == batches.PAGED:
        small = small.new_zeros(layout.shape(far))
        small.copy_(large[(slots // 64).to(batches.DEVICE)])
    expected = call(small, near)
    moved = call(large, slots)
    tensors = moved.on(batches.DEVICE).tensors
    actual = tuple(OPS[name].op(*tensors, **moved.settings))
    batches.agrees(name, expected, actual)
    del large, tensors, moved
    torch.cuda.empty_cache()


def test_queries_beyond_4_gib(gpu_memory_alone: None) -> None:
    """The last of 33,000 tokens with 128 heads have queries and outputs beyond 2^31 elements."""
    tokens, made = 33000, batches.generator(4)
    case = batches.decode_case(4, 8, 128, None)
    q = case.tensors[0].repeat(tokens // 8, 1, 1).to(batches.DEVICE)
    assert q.numel() > 2**31
    moved = case.on(batches.DEVICE)
    indices = moved.tensors[2].repeat(tokens // 8, 1)
    lens = moved.tensors[3].repeat(tokens // 8)
    order = torch.randperm(tokens, generator=made).to(batches.DEVICE)[: tokens - 8]
    indices[: tokens - 8] = indices[order]
    rest = (None, None, None, *moved.tensors[-4:])
    out, lse = OPS[batches.DECODE].op(q, moved.tensors[1], indices, lens, *rest, **case.settings)
    batches.agrees(batches.DECODE, case, (out[-8:], lse[-8:]))
    del q, out
    torch.cuda.empty_cache()
