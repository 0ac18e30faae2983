"""FlashMLA for sparse and dense MLA: convert our arguments to FlashMLA's, and its results to ours.

FlashMLA checks no values, so we first set absent slots to -1, which FlashMLA skips. FlashMLA makes
a plan in every call that passes none. FlashMLA's planner reads the lengths, so its plan is right
only for these lengths. The same holds for a plan that ``flash_mla_metadata`` made. A plan that
``flash_mla_plan`` made depends on sizes alone, so it is right for any lengths: with such a plan,
FlashMLA gets no lengths, and we set the entries past the lengths to -1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import CACHE_ALIGNMENT, KEY_BLOCK, MainLayout, MlaDsFp8Layout
from dsv4_ops.core.tiles import METADATA_COLUMNS
from dsv4_ops.core.types import (
    ABSENT,
    FlashMlaPlan,
    MlaAttention,
    SparseMla,
    SparseMlaGathered,
)
from dsv4_ops.dispatch import libraries
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.common.attention.calls import (
    DecodeCall,
    GatheredCall,
    PrefillCall,
    empty_results,
)
from dsv4_ops.reference.bf16_workspace import gather_rows
from dsv4_ops.reference.sanitize import Listed, compact_pages, list_slots, no_key
from dsv4_ops.reference.sparse_mla import apply_inverse_rope

WIDTH = MainLayout.head_dim
KEYS = 64
"""Keys per step of FlashMLA. Lists are padded to a multiple of this number."""

_SCHEDULE = 5
"""Index of the schedule among the arguments of the decode."""

_DECODE = (
    "(Tensor q, Tensor kv, Tensor indices, Tensor? lens, Tensor? attn_sink, Tensor? schedule, "
    "Tensor? num_splits, Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_lens, int d_v, "
    "float scale) -> (Tensor, Tensor, Tensor, Tensor)"
)
_PREFILL = (
    "(Tensor q, Tensor kv, Tensor indices, float scale, int d_v, Tensor? attn_sink, Tensor? lens) "
    "-> (Tensor, Tensor, Tensor)"
)

_DENSE = (
    "(Tensor q, Tensor kv, int d_v, Tensor lens, Tensor block_table, float scale, bool causal, "
    "Tensor? schedule, Tensor? num_splits) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _library() -> Any:
    return libraries.load(libraries.FLASH_MLA)


def packaged() -> bool:
    """Return whether the library registers its functions as ops. Only then can an AOTInductor
    package call the library."""
    return isinstance(_library(), torch._ops._OpNamespace)


def _run(name: str, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call ``name``: an op of vLLM's build, or a function of DeepSeek's own module."""
    library = _library()
    if packaged():
        op = getattr(library, name).default
        results = op(*arguments, *opaque_op.trailing(op, len(arguments)))
    else:
        results = getattr(library.flash_mla_interface.flash_mla_cuda, name)(*arguments)
    out, lse, schedule, num_splits = results
    return out, lse, schedule, num_splits


def _decode(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, schedule, num_splits = _run("sparse_decode_fwd", arguments)
    if arguments[_SCHEDULE] is not None:  # an op must not return an argument
        schedule, num_splits = schedule.new_empty(0), num_splits.new_empty(0)
    return out, lse, schedule, num_splits


def _dense_decode(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _run("dense_decode_fwd", arguments)


def _prefill(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    library = _library()
    if packaged():
        op = library.sparse_prefill_fwd.default
        out, max_logits, lse = op(*arguments, *opaque_op.trailing(op, len(arguments)))[:3]
    else:
        q, kv, indices, scale, d_v, sink, lens = arguments
        results = library.flash_mla_sparse_fwd(q, kv, indices, scale, d_v, sink, lens)
        out, max_logits, lse = results[:3]
    return out, max_logits, lse


def _decode_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, queries, heads, _ = q.shape
    lse = q.new_empty((tokens, queries, heads), dtype=torch.float32).transpose(1, 2)
    schedule = q.new_empty(
        (num_sm_parts(q.device, int(heads)), METADATA_COLUMNS), dtype=torch.int32
    )
    num_splits = q.new_empty((tokens + 1,), dtype=torch.int32)
    return q.new_empty((tokens, queries, heads, WIDTH)), lse, schedule, num_splits


def _prefill_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    per_head = q.shape[:2]
    logs = (q.new_empty(per_head, dtype=torch.float32) for _ in range(2))
    return (q.new_empty((*per_head, WIDTH)), *logs)  # type: ignore[return-value]


def num_sm_parts(device: torch.device, heads: int) -> int:
    """Return the number of parts into which FlashMLA divides its work: 64 times the number of SMs,
    divided by the number of heads; 1 if ``device`` is not a GPU."""
    if device.type != "cuda":
        return 1
    return max(torch.cuda.get_device_properties(device).multi_processor_count * 64 // heads, 1)


dense_decode = opaque_op.define("_flash_mla_dense_decode", _DENSE, _dense_decode, _decode_fake)
decode = opaque_op.define("_flash_mla_decode", _DECODE, _decode, _decode_fake)
prefill = opaque_op.define("_flash_mla_prefill", _PREFILL, _prefill, _prefill_fake)


def lowered() -> dict[Any, Any]:
    """Return the library's op for each op of ours, for compiled code; nothing if it has no ops."""
    if not packaged():
        return {}
    library = _library()
    pairs = {
        decode: (library.sparse_decode_fwd.default, _decode_fake),
        dense_decode: (library.dense_decode_fwd.default, _decode_fake),
        prefill: (library.sparse_prefill_fwd.default, lambda *args: list(_prefill_fake(*args))),
    }
    for library, fake in pairs.values():
        opaque_op.describe(library, fake)
    return {ours: library for ours, (library, _) in pairs.items()}


def sparse_mla_decode(
    launch: Any,
    *args: Any,
    flash_mla_plan: Tensor | None = None,
    impl: str = "",
    **named: Any,
) -> SparseMla:
    return _attend(launch, DecodeCall(*args, **named), flash_mla_plan)


def sparse_mla_decode_paged(
    launch: Any,
    *args: Any,
    flash_mla_plan: Tensor | None = None,
    impl: str = "",
    **named: Any,
) -> SparseMla:
    """Attend to lists of rows. Our kernel makes these lists from the block table."""
    return _attend(launch, DecodeCall.of_pages(*args, **named), flash_mla_plan)


def sparse_mla_gathered(launch: Any, *args: Any, impl: str = "", **named: Any) -> SparseMlaGathered:
    call = GatheredCall(*args, **named)
    q, kv = call.q, call.kv
    if q.shape[0] == 0:
        out, lse = empty_results(q)
        return SparseMlaGathered(out, torch.empty_like(lse), lse)
    lists = Listed(call.indices, call.lens, kv.shape[0], 1)
    make_lists = opaque_op.kernel_or_reference(list_slots, launch, q.device)
    prepared = make_lists(lists, None, call.attn_sink, KEY_BLOCK)
    rows, slots = _at_least_one_row(kv)[:, None], prepared.slots[:, None]
    rest = (call.softmax_scale, WIDTH, prepared.sink, prepared.lens)
    out, max_logits, lse = prefill(_dense(q), rows, slots, *rest)
    lse = no_key(lse)
    return SparseMlaGathered(out, torch.where(lse == -torch.inf, -torch.inf, max_logits), lse)


def sparse_mla_prefill(launch: Any, *args: Any, impl: str = "", **named: Any) -> SparseMla:
    """Make a bf16 copy of the rows that the tokens may see, and attend to the copy."""
    call = PrefillCall(*args, **named)
    q, seen = call.q, call.seen
    if q.shape[0] == 0:
        return SparseMla(*empty_results(q))
    for name, source in (("swa_cache", seen.swa), ("extra_cache", seen.extra or seen.swa)):
        layout = MainLayout(source.block_size)
        Checks("sparse_mla_prefill").page_start(name, source.cache, layout)
    workspace = "sparse_mla.bf16_workspace"
    gather = opaque_op.kernel_or_reference(gather_rows, launch, q.device, workspace)
    gathered = gather(seen, call.attn_sink, KEY_BLOCK)
    rows, slots = _at_least_one_row(gathered.kv)[:, None], gathered.slots[:, None]
    rest = (call.softmax_scale, WIDTH, gathered.sink, gathered.lens)
    out, _, lse = prefill(_dense(q), rows, slots, *rest)
    return _finish(launch, out, lse)


def mla_decode(
    launch: Any,
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None,
    plan: Tensor | None,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
    *,
    softmax_scale: float,
    block_size: int,
    **settings: Any,
) -> MlaAttention:
    """Pass each token to FlashMLA as a request of its own. FlashMLA makes its plan in the call."""
    if q.shape[0] == 0:
        out = q.new_empty((*q.shape[:2], WIDTH))
        return MlaAttention(out, q.new_empty(q.shape[:2], dtype=torch.float32))
    num_blocks = kv_cache.shape[0]
    if num_blocks == 0:  # FlashMLA reads masked keys too
        kv_cache = kv_cache.new_zeros((1, *kv_cache.shape[1:]))
    compact = opaque_op.kernel_or_reference(compact_pages, launch, q.device)
    pages, lens = compact(block_table, req_indices, seq_lens, num_blocks, block_size)
    rows = kv_cache[:, :, None]
    out, lse, _, _ = dense_decode(
        _dense(q)[:, None], rows, WIDTH, lens, pages, softmax_scale, False, None, None
    )
    out, lse, kernels = out.squeeze(1), lse.squeeze(2), opaque_op.kernel_module(out.device)
    if kernels is None:
        lse = no_key(lse)
        return MlaAttention(torch.where((lse == -torch.inf)[..., None], 0.0, out), lse)
    kernels.finish_heads(launch, out, lse, None, None, clears=True)
    return MlaAttention(out, lse)


def mla_sparse(
    launch: Any,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    *,
    softmax_scale: float,
    block_size: int,
    layout: str,
    **settings: Any,
) -> MlaAttention:
    """Attend to FP8 rows with FlashMLA's sparse decode, which makes its plan in the call, and to
    plain rows with FlashMLA's sparse prefill."""
    if q.shape[0] == 0:
        out = q.new_empty((*q.shape[:2], WIDTH))
        return MlaAttention(out, q.new_empty(q.shape[:2], dtype=torch.float32))
    is_fp8 = layout == MlaDsFp8Layout.tag
    lists = Listed(indices, lens, kv_cache.shape[0], block_size)
    make_lists = opaque_op.kernel_or_reference(list_slots, launch, q.device)
    prepared = make_lists(lists, None, None, KEYS if is_fp8 else KEY_BLOCK)
    if kv_cache.shape[0] == 0:  # FlashMLA reads skipped rows too
        kv_cache = kv_cache.new_zeros((1, *kv_cache.shape[1:]))
    q, slots = _dense(q), prepared.slots[:, None]
    if is_fp8:
        # no lengths (FlashMLA refuses them with these rows), sink, plan or second cache
        none = (None,) * 7
        rows = kv_cache[:, :, None]
        out, lse, _, _ = decode(q[:, None], rows, slots, *none, WIDTH, softmax_scale)
        out, lse = out.squeeze(1), lse.squeeze(2)
    else:
        rows = kv_cache.view(-1, 1, kv_cache.shape[2])
        out, _, lse = prefill(q, rows, slots, softmax_scale, WIDTH, None, prepared.lens)
    return MlaAttention(*_finish(launch, out, lse))


def _dense(q: Tensor) -> Tensor:
    """Return contiguous queries whose address is a multiple of 16 bytes, as FlashMLA requires."""
    q = q.contiguous()
    return q if q.storage_offset() * q.itemsize % CACHE_ALIGNMENT == 0 else q.clone()


def _at_least_one_row(kv: Tensor) -> Tensor:
    """Return contiguous rows: at least one row, because FlashMLA reads skipped rows too."""
    return kv.new_zeros((1, WIDTH)) if kv.shape[0] == 0 else kv.contiguous()


def plan_for(
    num_tokens: int, num_heads: int, swa_width: int, extra_width: int, device: torch.device
) -> FlashMlaPlan:
    """Make FlashMLA's plan for full lists, by calling FlashMLA with lists of absent keys."""
    q = torch.zeros(num_tokens, num_heads, WIDTH, dtype=torch.bfloat16, device=device)
    page = MainLayout(KEYS).allocate(1, device)

    def absent(width: int) -> tuple[Tensor, Tensor, None]:
        shape = (num_tokens, 1, width + -width % KEYS)
        slots = torch.full(shape, ABSENT, dtype=torch.int32, device=device)
        return kernel_view(page, KEYS), slots, None

    extra = absent(extra_width) if extra_width else (None, None, None)
    settings = (None, None, None, None, *extra, WIDTH, WIDTH**-0.5)
    _, _, schedule, num_splits = decode(q[:, None], *absent(swa_width)[:2], *settings)
    plan = torch.cat([schedule.reshape(-1), num_splits.reshape(-1)])
    return FlashMlaPlan(plan, num_tokens, num_heads, swa_width, extra_width)


def kernel_view(cache: Tensor, block_size: int) -> Tensor:
    """Return a cache as [num_blocks, block_size, 1, 584], through views that compilers support."""
    layout = MainLayout(block_size)
    if cache.shape[0] == 0:  # FlashMLA reads skipped rows too
        cache = layout.allocate(1, cache.device)
    rows = cache.narrow(1, 0, block_size * layout.row_bytes)
    return rows.view(cache.shape[0], block_size, 1, layout.row_bytes)


def _attend(launch: Any, call: DecodeCall, plan: Tensor | None) -> SparseMla:
    q, num_tokens = call.q, call.q.shape[0]
    if num_tokens == 0:
        return SparseMla(*empty_results(q))
    make_lists = opaque_op.kernel_or_reference(list_slots, launch, q.device)
    prepared = make_lists(call.window, call.extra, call.attn_sink, KEYS)
    lens, extra_lens = prepared.lens, prepared.extra_lens
    schedule = num_splits = extra = extra_slots = None
    if call.extra_cache is not None and prepared.extra_slots is not None:
        extra = kernel_view(call.extra_cache, call.extra_block_size)
        extra_slots = prepared.extra_slots[:, None]
    if plan is not None:
        if plan.dim() == 1:
            lens = extra_lens = None
            size = plan.shape[0] - num_tokens - 1
        else:
            size = (plan.shape[0] - num_tokens - 1) * METADATA_COLUMNS
        flat = plan.reshape(-1)
        if flat.storage_offset() % METADATA_COLUMNS:  # FlashMLA loads whole rows
            flat = flat.clone()
        schedule = flat.narrow(0, 0, size).view(-1, METADATA_COLUMNS)
        num_splits = flat.narrow(0, size, num_tokens + 1)
    out, lse, _, _ = decode(
        _dense(q)[:, None], kernel_view(call.swa_cache, call.swa_block_size),
        prepared.slots[:, None], lens, prepared.sink, schedule, num_splits,
        extra, extra_slots, extra_lens, WIDTH, call.softmax_scale,
    )  # fmt: skip
    return _finish(launch, out.squeeze(1), lse.squeeze(2), call.positions, call.cos_sin_cache)


def _finish(launch: Any, out: Tensor, lse: Tensor, *rotation: Tensor | None) -> SparseMla:
    """Set the lse of heads without keys to -inf. If ``rotation`` has positions and angles, apply
    inverse RoPE."""
    positions, cos_sin_cache = rotation or (None, None)
    kernels = opaque_op.kernel_module(out.device)
    rotates = cos_sin_cache is None or int(cos_sin_cache.shape[1]) == WIDTH - MainLayout.code_dim
    if kernels is None or not rotates:
        return apply_inverse_rope(SparseMla(out, no_key(lse)), positions, cos_sin_cache)
    kernels.finish_heads(launch, out, lse, positions, cos_sin_cache)
    return SparseMla(out, lse)
