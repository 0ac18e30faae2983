"""A fake of vLLM's build of FlashMLA on a CPU: ops with the same names, schemas and registration.
The ops compute what FlashMLA documents, and refuse arguments that FlashMLA would misread."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout, MlaDsFp8Layout
from dsv4_ops.reference import mla
from dsv4_ops.reference.sparse_mla import KeyCache
from tests.oracles import plan as oracle

NAMESPACE = "_flashmla_C"
DECODE = (
    "sparse_decode_fwd(Tensor _0, Tensor _1, Tensor _2, Tensor? _3, Tensor? _4, Tensor? _5, "
    "Tensor? _6, Tensor? _7, Tensor? _8, Tensor? _9, int _10, float _11, Tensor? _12) "
    "-> (Tensor _0, Tensor _1, Tensor? _2, Tensor? _3)"
)
DENSE = (
    "dense_decode_fwd(Tensor _0, Tensor _1, int _2, Tensor _3, Tensor _4, float _5, bool _6, "
    "Tensor? _7, Tensor? _8, Tensor? _9) -> (Tensor _0, Tensor _1, Tensor? _2, Tensor? _3)"
)
PREFILL = (
    "sparse_prefill_fwd(Tensor _0, Tensor _1, Tensor _2, float _3, int _4, Tensor? _5, "
    "Tensor? _6, Tensor? _7) -> Tensor[] _0"
)
PARTS = 3
calls: list[str] = []
plans: list[int] = []
"""Numbers of tokens of the calls for which the fake made a plan itself."""


def require(fact: bool, what: str) -> None:
    if not fact:
        raise RuntimeError(f"FlashMLA would misread {what}")


def keys_of(view: Tensor, slots: Tensor, lens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys of the listed slots, and a mask of valid keys."""
    blocks, size, one, row = view.shape
    is_v32 = row == 656
    require(one == 1 and row in (584, 656) and view.stride()[1::2] == (row, 1), "the cache")
    pages = MainLayout(size).page_bytes
    require(is_v32 or blocks == 1 or view.stride(0) == pages, "the padding of the pages")
    require(slots.shape[2] % 64 == 0 and slots.stride(2) == 1, "lists of another width")
    require(bool(((slots >= -1) & (slots < blocks * size)).all()), "slots that do not exist")
    slots = slots[:, 0].long()
    column = torch.arange(slots.shape[1])
    counts = slots >= 0
    if lens is not None:
        require(lens.is_contiguous() and lens.dtype == torch.int32, "the lengths")
        require(bool(((lens >= 0) & (lens <= slots.shape[1])).all()), "lengths out of range")
        require(not is_v32, "lengths of rows of 656 bytes")
        counts = counts & (column < lens[:, None])
    if is_v32:
        stored, _ = mla.stored_rows(view[:, :, 0], slots // size, slots % size)
        scales = stored.view(torch.float32)[..., 128:132]
        scales.copy_(scales.bfloat16())
        keys = mla.values_of(stored, torch.uint8, MlaDsFp8Layout.tag)
        return torch.where(counts[..., None], keys, 0), counts
    cache = view.as_strided((blocks, 584 * size), (view.stride(0), 1))
    pages = torch.where(counts, slots // size, -1)
    keys, _ = KeyCache(cache, size, MainLayout.tag).at(pages, slots % size)
    keys = torch.where(counts[..., None], keys.float(), 0)
    return keys, counts


def attended(
    q: Tensor, keys: Tensor, counts: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.einsum("bhd,bkd->bhk", q.float(), keys) * scale
    logits = logits.masked_fill(~counts[:, None], -math.inf)
    lse = logits.logsumexp(-1)
    lse = torch.where(lse == -math.inf, math.inf, lse)  # FlashMLA's lse without keys
    out = torch.einsum("bhk,bkd->bhd", torch.exp(logits - lse[..., None]), keys[..., :512])
    if sink is not None:
        out = out / (1 + torch.exp(sink[None] - lse))[..., None]
    return out.to(q.dtype), logits.amax(-1), lse


def planned(b: int, *lists: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return a plan for these lists; the fake refuses it for other lists."""
    widths = [slots.shape[2] for slots, _ in lists] + [0]
    pairs = zip(widths, lists, strict=False)
    lens = [[width] * b if counts is None else counts.tolist() for width, (_, counts) in pairs]
    sizes = {"swa_width": widths[0], "extra_width": widths[1], "num_sm_parts": PARTS}
    rows = torch.tensor(oracle.flash_mla_metadata(*lens, **sizes), dtype=torch.int32)
    return rows[:PARTS].clone(), rows[PARTS:].flatten()[: b + 1].clone()


def decode(
    q, kv, indices, lens, sink, schedule, splits, extra_kv, extra_indices, extra_lens, d_v, scale,
    out,
):  # fmt: skip
    q.data_ptr()  # raises in a trace: traces must not call this function
    calls.append("decode")
    b, queries, heads, width = q.shape
    require(b > 0 and queries == 1 and d_v == 512, "the queries")
    require((width, kv.shape[3]) in ((512, 584), (576, 656)), "rows of another model")
    require(q.is_contiguous() and q.data_ptr() % 16 == 0, "queries anywhere")
    require(heads in (64, 128) and q.dtype == torch.bfloat16, "the heads")
    require(sink is None or sink.is_contiguous(), "the sink")
    pairs = [(indices, lens)] + ([] if extra_kv is None else [(extra_indices, extra_lens)])
    wanted = planned(b, *pairs)
    if schedule is None:
        plans.append(b)
        schedule, splits = wanted
    require(schedule.storage_offset() % 8 == 0, "rows of a plan anywhere")
    require(schedule.is_contiguous() and splits.is_contiguous(), "a plan with gaps")
    require(schedule.shape == (PARTS, 8) and splits.shape == (b + 1,), "a plan of other sizes")
    same = torch.equal(schedule, wanted[0]) and torch.equal(splits, wanted[1])
    require(same, "a stale plan")
    keys, counts = keys_of(kv, indices, lens)
    if extra_kv is not None:
        more, some = keys_of(extra_kv, extra_indices, extra_lens)
        keys, counts = torch.cat([keys, more], 1), torch.cat([counts, some], 1)
    found, _, lse = attended(q[:, 0], keys, counts, sink, scale)
    return found[:, None], lse[:, None].transpose(1, 2), schedule, splits


def dense_decode(q, kv, d_v, lens, block_table, scale, causal, schedule, splits, out):
    q.data_ptr()
    calls.append("dense_decode")
    b, queries, _, width = q.shape
    require(b > 0 and queries == 1 and not causal and (width, d_v) == (576, 512), "the queries")
    require(q.is_contiguous() and q.data_ptr() % 16 == 0, "queries anywhere")
    require(q.dtype == kv.dtype and q.dtype in (torch.bfloat16, torch.float16), "the rows")
    require(kv.shape[1:] == (64, 1, 576) and kv.stride()[1::2] == (576, 1), "the pages")
    require(block_table.shape[0] == b and block_table.stride(1) == 1, "the block table")
    require(block_table.shape[1] > 0, "a block table without columns")
    require(block_table.dtype == lens.dtype == torch.int32 and lens.is_contiguous(), "the lengths")
    require(bool(((lens >= 0) & (lens <= block_table.shape[1] * 64)).all()), "lengths out of range")
    column = torch.arange(block_table.shape[1])
    read = column * 64 < lens[:, None].clamp(min=1)  # at least the first block
    pages = torch.where(read, block_table, 0).long()
    require(bool(((pages >= 0) & (pages < kv.shape[0])).all()), "pages that do not exist")
    counts = torch.arange(block_table.shape[1] * 64) < lens[:, None]
    keys = torch.where(counts[..., None], kv[pages].flatten(1, 3).float(), 0)
    logits = torch.einsum("bhd,bkd->bhk", q[:, 0].float(), keys) * scale
    logits = logits.masked_fill(~counts[:, None], -math.inf)
    lse = logits.logsumexp(-1)
    shares = torch.exp(logits - torch.where(lse == -math.inf, math.inf, lse)[..., None])
    found = torch.einsum("bhk,bkd->bhd", shares.to(q.dtype).float(), keys[..., :512])
    found = torch.where((lse == -math.inf)[..., None], math.nan, found)  # undefined without keys
    lse = torch.where(lse == -math.inf, math.inf, lse)
    plan = torch.zeros(PARTS, 8, dtype=torch.int32), torch.zeros(b + 1, dtype=torch.int32)
    return found[:, None].to(q.dtype), lse[:, None].transpose(1, 2), *plan


def prefill(q, kv, indices, scale, d_v, sink, lens, out):
    q.data_ptr()
    calls.append("prefill")
    require(q.is_contiguous() and q.data_ptr() % 16 == 0, "queries anywhere")
    require(q.shape[1] in (64, 128) and q.shape[2] in (512, 576) and d_v == 512, "the queries")
    require(kv.shape[1:] == (1, q.shape[2]) and kv.is_contiguous(), "the rows")
    require(indices.shape[1] == 1 and indices.shape[2] % 128 == 0, "lists of another width")
    require(indices.shape[2] > 0 and indices.stride(2) == 1, "lists of another width")
    require(lens.is_contiguous() and lens.dtype == indices.dtype == torch.int32, "the lengths")
    require(bool(((lens >= 0) & (lens <= indices.shape[2])).all()), "lengths out of range")
    require(sink is None or (sink.is_contiguous() and sink.dtype == torch.float32), "the sink")
    slots = indices[:, 0].long()
    require(bool(((slots >= -1) & (slots < kv.shape[0])).all()), "rows that do not exist")
    counts = (slots >= 0) & (torch.arange(slots.shape[1]) < lens[:, None])
    keys = torch.where(counts[..., None], kv[:, 0][slots.clamp(min=0)].float(), 0)
    found, row_max, lse = attended(q, keys, counts, sink, scale)
    return [found, row_max, lse]


@contextmanager
def registered() -> Iterator[None]:
    """Register the ops as vLLM does, as functions for all devices."""
    from dsv4_ops.dispatch import libraries
    from dsv4_ops.kernels import opaque_op
    from dsv4_ops.lowering import _compat, register

    library = torch.library.Library(NAMESPACE, "DEF")
    for schema, function in ((DECODE, decode), (DENSE, dense_decode), (PREFILL, prefill)):
        name = library.define(schema)
        library.impl(name, function, "CompositeImplicitAutograd")
    libraries.load.cache_clear()
    try:
        yield
    finally:
        libraries.load.cache_clear()
        opaque_op._described.clear()
        for op in register.registered:
            _compat.lowerings.pop(op, None)
        register.registered.clear()
        if NAMESPACE in opaque_op._fragments:
            opaque_op._fragments.pop(NAMESPACE)._destroy()
        library._destroy()
        delattr(torch.ops, NAMESPACE)
