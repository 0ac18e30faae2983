"""Sparse MLA: decode, gathered rows, prefill, and their schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import plain_int
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.tiles import METADATA_COLUMNS, PLAN_COLUMNS, PROGRAMS
from dsv4_ops.core.types import FlashMlaPlan, SparseMla, SparseMlaGathered
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.meta import sparse_mla as meta


def check_decode(
    op: str,
    q: Tensor,
    softmax_scale: float,
    providers: tuple[str, ...],
    impl: str,
    *,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
) -> Checks:
    """Check the layout, the queries and ``impl`` of a decode; return the call's ``Checks``."""
    checks = check_queries(op, q, layout)
    check_splits(checks, num_splits, batch_invariant)
    arguments = {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    check_impl(op, providers, impl, q.device, {"q": q, **arguments})
    checks.above(0, softmax_scale=softmax_scale)
    return checks


def check_queries(op: str, q: Tensor, layout: str) -> Checks:
    checks = Checks(op)
    checks.one_of("layout", layout, MainLayout.tag, "plain")
    if layout == MainLayout.tag:
        checks.tensor("q", q, torch.bfloat16, "num_tokens", "num_heads", MainLayout.head_dim)
    else:
        checks.tensor("q", q, (torch.bfloat16, torch.float32), "num_tokens", "num_heads", "width")
    return checks


def check_splits(checks: Checks, num_splits: int, batch_invariant: bool) -> None:
    """Check the settings that decide how keys are split."""
    checks.at_least(0, num_splits=num_splits)
    checks.flag("batch_invariant", batch_invariant)


def check_plans(
    checks: Checks,
    plan: Tensor | None,
    flash_mla_plan: Tensor | FlashMlaPlan | None,
    num_splits: int,
    batch_invariant: bool,
    impl: str,
    widths: tuple[int, int],
) -> Tensor | None:
    """Check our kernels' plan and FlashMLA's plan; return FlashMLA's plan as a tensor.

    With a plan, other splitting settings are refused. ``impl`` must be able to use the plan."""
    if plan is not None:
        if impl == "flash_mla":
            raise checks.error(
                "plan",
                must="be None for impl 'flash_mla'",
                got="a tensor",
                do="Pass flash_mla_plan, or none",
            )
        checks.tensor("plan", plan, torch.int32, "num_work_tiles", PLAN_COLUMNS)
        checks.rows_for_tokens("plan", plan)
        if flash_mla_plan is not None:
            raise checks.error(
                "flash_mla_plan", must="be None with a plan", got="both", do="Pass one of the two"
            )
    schedule = _check_flash_mla_plan(checks, flash_mla_plan, impl, widths)
    if plan is not None or schedule is not None:
        checks.without("num_splits", num_splits, 0, "a plan")
        checks.without("batch_invariant", batch_invariant, False, "a plan")
    return schedule


def _check_flash_mla_plan(
    checks: Checks, plan: Tensor | FlashMlaPlan | None, impl: str, widths: tuple[int, int]
) -> Tensor | None:
    """Check that a plan was made for calls of these sizes; return the plan's tensor.

    With a plan made for other sizes, FlashMLA would read past the lists."""
    name = "flash_mla_plan"
    if plan is None:
        return None
    if impl not in ("auto", "flash_mla"):
        raise checks.error(
            name,
            must=f"be None for impl {impl!r}",
            got="a plan",
            do="Pass impl='flash_mla', or leave it out",
        )
    if not isinstance(plan, FlashMlaPlan):
        checks.tensor(name, plan, torch.int32, "num_rows", METADATA_COLUMNS)
        rows_of_splits = checks.sizes["num_tokens"] + 1
        if plan.shape[0] <= rows_of_splits:
            raise checks.error(
                name,
                must=f"have more than {plain_int(rows_of_splits)} rows for as many tokens",
                got=plain_int(plan.shape[0]),
                do="Make it with flash_mla_metadata of the lens of this call",
            )
        return plan
    checks.tensor(f"{name}.schedule", plan.schedule, torch.int32, "size")
    sizes = {size: checks.sizes[size] for size in ("num_tokens", "num_heads")}
    sizes |= {"swa_width": widths[0], "extra_width": widths[1]}
    for each, size in sizes.items():
        if getattr(plan, each) != size:
            raise checks.error(
                name,
                must=f"be made for {each} = {plain_int(size)}",
                got=f"one for {plain_int(getattr(plan, each))}",
                do="Make one of flash_mla_plan for every size of batch",
            )
    return plan.schedule


def check_cache(
    checks: Checks, source: str, q: Tensor, cache: Tensor, block_size: int, layout: str
) -> None:
    """Check the window cache or the compressed cache."""
    size_name, blocks = f"{source}_block_size", f"num_{source}_blocks"
    checks.at_least(1, **{size_name: block_size})
    if layout == MainLayout.tag:
        dims = (blocks, f"{source}_page_bytes")
        checks.pages(f"{source}_cache", cache, MainLayout(block_size), dims, size_name)
        return
    checks.rows(f"{source}_cache", cache, block_size, (blocks, size_name, "width"), size_name)
    checks.tensor(f"{source}_cache", cache, q.dtype, blocks, size_name, "width")


def check_lists(checks: Checks, source: str, indices: Tensor, lens: Tensor) -> None:
    """Check the slots in the window cache or the compressed cache, and the number of slots per
    token."""
    checks.tensor(f"{source}_indices", indices, torch.int32, "num_tokens", f"{source}_width")
    checks.tensor(f"{source}_lens", lens, torch.int32, "num_tokens")
    checks.at_least(1, **{f"{source}_width": indices.shape[1]})


def check_inverse_rope(
    checks: Checks, q: Tensor, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> None:
    """Check the positions and angles of inverse RoPE, if there are any."""
    if positions is not None and cos_sin_cache is not None:
        checks.rotation(positions, cos_sin_cache)
        checks.even("cos_sin_cache", cos_sin_cache, "width", q.shape[2])
    checks.all_or_none(positions=positions, cos_sin_cache=cos_sin_cache)


_sparse_mla_plan = define_op(
    "sparse_mla",
    "sparse_mla_plan(Tensor swa_lens, Tensor? extra_lens, *, int num_heads, "
    "int num_programs) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="what FlashMLA's get_mla_metadata is for; the plan itself is ours",
    gradient=INTEGERS,
)


def sparse_mla_plan(
    swa_lens: Tensor,
    extra_lens: Tensor | None = None,
    *,
    num_heads: int,
    num_programs: int = PROGRAMS,
) -> Tensor:
    """Split the keys of a ragged decode batch into work tiles of similar size.

    Without a plan, ``sparse_mla_decode`` gives every token the same number of splits, so the whole
    batch waits for its longest context. ``sparse_mla_decode_paged`` can schedule by lengths itself,
    but must do so again in every layer. The decode does so for FP8 caches on Hopper if num_splits
    is 0, there are at most 256 tokens, the number of tokens times the number of tiles of 64 heads
    is at least 32, and window and block table together have columns for at least 4 blocks of 64
    keys. One plan serves all layers with the same lengths. Pass the plan as ``plan`` to
    ``sparse_mla_decode`` or ``sparse_mla_decode_paged``, or let
    ``dsv4_ops.attention.build_attention_step`` make it.

    Args:
        swa_lens: Number of window rows that each token sees, [num_tokens], int32; negative values
            count as 0.
        extra_lens: Number of compressed rows that each token sees, [num_tokens], int32; None for
            layers that have only a window.
        num_heads: Heads of the queries that the plan is for. At least 1.
        num_programs: Programs that run at once: the SMs of the device. At least 1.

    Returns:
        int32 [num_tokens + programs, 4], where programs is num_programs divided by the number of
        tiles of 64 heads, at least 1. A row is a work tile: token, split index, number of splits of
        the token, and the offset of the token's partial results in a buffer, 0 for a token with one
        split. The order is: the first splits of tokens with several splits, the other splits of
        these tokens, tokens with one split, rows of -1. Tokens with one split are sorted by length,
        longest first; lengths are compared in units of 1/14 of the split size, rounded down. Tokens
        with equal lengths, and tokens with several splits, keep their order. Every token has at
        least one split, even without keys.

        The plan takes the split size with the least expected time; the smallest candidate is the
        mean number of keys per program. The expected time is the time of the combines plus the
        larger of two times: the time of one full split, and the time of all splits and program
        starts divided by the number of programs. If splits would save less time than a combine
        takes, no token is split. There are at most as many extra splits (all but a token's first)
        as programs without a first split, or a quarter of the programs if that is more, to avoid
        another wave of programs.

        A split is a fraction of its token's keys, not a range of rows, so a plan made from other
        lengths gives the same attention, but balances the work less well.

    Mutates: nothing.

    Raises:
        ValueError: lengths of different shapes or devices, numbers below 1, or more than 16383
            tokens.
        TypeError: a dtype other than int32.

    Compile: on CUDA our Triton kernel with one program runs, both in graphs and in AOTInductor
        packages; on the CPU prefix sums, which are aten calls, and the search of ``token_map``;
        dynamic in num_tokens; CUDA graphs and export: yes.

    Source: replaces FlashMLA's ``get_mla_metadata``.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([64, 0, 640], dtype=torch.int32)
        >>> dsv4_ops.sparse_mla_plan(lens, num_heads=64, num_programs=4)[:5].tolist()
        [[2, 0, 2, 0], [2, 1, 2, 0], [0, 0, 1, 0], [1, 0, 1, 0], [-1, -1, -1, -1]]
    """
    checks = Checks("sparse_mla_plan")
    checks.tensor("swa_lens", swa_lens, torch.int32, "num_tokens")
    checks.optional("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.at_least(1, num_heads=num_heads, num_programs=num_programs)
    checks.request_limit("num_tokens")
    return _sparse_mla_plan(swa_lens, extra_lens, num_heads=num_heads, num_programs=num_programs)


_flash_mla_metadata = define_op(
    "sparse_mla",
    "flash_mla_metadata(Tensor swa_lens, Tensor? extra_lens, *, int swa_width, "
    "int extra_width, int num_sm_parts) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="the planner in FlashMLA's sparse_decode_fwd, for one query per row",
    gradient=INTEGERS,
)


def flash_mla_metadata(
    swa_lens: Tensor,
    extra_lens: Tensor | None = None,
    *,
    swa_width: int,
    extra_width: int = 0,
    num_sm_parts: int,
) -> Tensor:
    """Divide the keys of a sparse decode among SMs, as FlashMLA does.

    The keys of a token form blocks of 64: first the blocks of its window, at least one, then the
    blocks of its selected rows. FlashMLA runs ``num_sm_parts`` parts, which take the tokens in
    order. Each part takes an equal share of the total cost; a token costs its number of blocks plus
    5. A token that a part does not finish is split.

    In a step, one tensor serves all layers with the same lengths and widths: pass it as
    ``flash_mla_plan`` to ``sparse_mla_decode`` or ``sparse_mla_decode_paged`` with the impl
    "flash_mla". FlashMLA then makes no plan in the call.

    Args:
        swa_lens: Number of window rows that each token sees, [num_tokens], int32, clamped to
            0..swa_width.
        extra_lens: Number of compressed rows that each token sees, [num_tokens], int32, clamped to
            0..extra_width; None for layers with a window only.
        swa_width: Columns of ``swa_indices``. At least 1.
        extra_width: Columns of ``extra_indices``, or max_blocks * extra_block_size of a block
            table; 0 without ``extra_lens``. On a CPU, memory grows with num_tokens times the sum of
            both widths.
        num_sm_parts: Number of parts, from ``dsv4_ops.dispatch.providers.flash_mla_num_sm_parts``.
            At least 1.

    Returns:
        int32 [num_sm_parts + num_tokens + 1, 8], dense. The first num_sm_parts rows are FlashMLA's
        tile_scheduler_metadata: first token of the part, last token, first block of the first
        token, end block of the last token (exclusive), number of earlier parts that share the first
        token, whether the first and whether the last token is split, and 0. A part without work
        begins at num_tokens. The num_tokens + 1 numbers after these rows are FlashMLA's num_splits:
        for each token, the number of splits of all earlier tokens, then the total. The remaining
        numbers are 0. A decode derives num_sm_parts from the tensor's rows and its own number of
        tokens, so FlashMLA refuses the tensor in a decode of another number of tokens.

        If a call has other lengths than the plan, FlashMLA silently skips keys or reads past the
        lists.

    Mutates: nothing.

    Raises:
        ValueError: lengths of different shapes or devices, numbers out of range, or an
            ``extra_width`` without ``extra_lens``.
        TypeError: a dtype other than int32, or a number that is not an int.

    Compile: on CUDA one Triton kernel inside the graph; on the CPU prefix sums and gathers; dynamic
        in num_tokens; CUDA graphs and export: yes. No host synchronisation: a captured graph uses
        the lengths of each replay.

    Source: the ``FlashMLASchedMeta`` that FlashMLA's ``flash_mla_with_kvcache`` makes on Hopper
        from ``indices``, ``topk_length`` and ``extra_topk_length``; only the semantics are the
        same.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([64, 640], dtype=torch.int32)  # 1, 10 blocks, counted as 6, 15
        >>> made = dsv4_ops.flash_mla_metadata(lens, swa_width=640, num_sm_parts=2)
        >>> made[0].tolist(), made[1].tolist()  # part 0: token 0, and 5 of token 1's blocks
        ([0, 1, 0, 5, 0, 0, 1, 0], [1, 1, 5, 10, 1, 1, 1, 0])
        >>> made[2:].flatten()[:3].tolist()  # num_splits
        [0, 1, 3]
    """
    checks = Checks("flash_mla_metadata")
    checks.tensor("swa_lens", swa_lens, torch.int32, "num_tokens")
    checks.optional("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.at_least(0 if extra_lens is None else 1, extra_width=extra_width)
    if extra_lens is None and extra_width != 0:
        raise checks.error(
            "extra_width",
            must="be 0 without extra_lens",
            got=plain_int(extra_width),
            do="Pass both or neither",
        )
    checks.at_least(1, swa_width=swa_width, num_sm_parts=num_sm_parts)
    sizes = {"swa_width": swa_width, "extra_width": extra_width, "num_sm_parts": num_sm_parts}
    return _flash_mla_metadata(swa_lens, extra_lens, **sizes)


_SETTINGS = (
    "float softmax_scale, int swa_block_size, int extra_block_size, str layout, int num_splits, "
    'bool batch_invariant, str impl="auto"'
)
_OPTIONS = (
    "Tensor? attn_sink, Tensor? plan, Tensor? positions, Tensor? cos_sin_cache, "
    "Tensor? flash_mla_plan=None"
)
_SWA = "Tensor q, Tensor swa_cache, Tensor swa_indices, Tensor swa_lens"
_SOURCE = "FlashMLA flash_mla_with_kvcache as vLLM 0.33 calls it; lse of no key is -inf here"

_Settings = dict[str, Any]
_LOWERING = {"cpu": "decompose", "cuda": "choices"}
DECODE_PROVIDERS = ("triton", "flash_mla", "reference")

_sparse_mla_decode = define_op(
    "sparse_mla",
    f"sparse_mla_decode({_SWA}, Tensor? extra_cache, Tensor? extra_indices, "
    f"Tensor? extra_lens, {_OPTIONS}, *, {_SETTINGS}) "
    "-> (Tensor out, Tensor lse)",
    meta=meta.sparse_mla,
    lowering=_LOWERING,
    dynamic=("num_tokens", "num_blocks", "swa_width", "extra_width", "num_positions"),
    source=_SOURCE,
    providers=DECODE_PROVIDERS,
    hopper_call="_hopper_split_keys",
)
_sparse_mla_decode_paged = define_op(
    "sparse_mla",
    f"sparse_mla_decode_paged({_SWA}, Tensor extra_cache, Tensor extra_lens, "
    f"Tensor req_indices, Tensor extra_block_table, {_OPTIONS}, *, {_SETTINGS}) "
    "-> (Tensor out, Tensor lse)",
    meta=meta.sparse_mla,
    lowering=_LOWERING,
    dynamic=("num_tokens", "num_blocks", "swa_width", "num_reqs", "max_blocks", "num_positions"),
    source=_SOURCE,
    providers=DECODE_PROVIDERS,
    hopper_call="_hopper_split_keys",
)
_sparse_mla_gathered = define_op(
    "sparse_mla",
    "sparse_mla_gathered(Tensor q, Tensor kv, Tensor indices, Tensor lens, "
    'Tensor? attn_sink, *, float softmax_scale, str impl="auto") '
    "-> (Tensor out, Tensor max_logits, Tensor lse)",
    lowering=_LOWERING,
    dynamic=("num_tokens", "num_rows", "topk"),
    source="FlashMLA flash_mla_sparse_fwd; lse in natural logarithms",
    providers=DECODE_PROVIDERS,
    hopper_call="_hopper_gathered_keys",
)


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lens: Tensor | None = None,
    attn_sink: Tensor | None = None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    flash_mla_plan: Tensor | FlashMlaPlan | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int = 1,
    layout: str = MainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> SparseMla:
    """Attend to the window and to selected rows of the compressed cache.

    Each row is both key and value.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides. For the
            layout "plain", queries have the width and dtype of the caches.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``, or from ``PlainLayout.allocate``.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32, from
            ``swa_indices_and_lens``. Slots that do not exist are skipped.
        swa_lens: Number of valid leading entries of ``swa_indices``, [num_tokens], int32.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None, like
            the next two arguments, for a layer with only a window.
        extra_indices: Slots of the selected rows, [num_tokens, extra_width], int32, from
            ``indexer_select`` with ``slots`` or from ``global_topk_indices_and_lens``.
        extra_lens: Number of valid leading entries of ``extra_indices``, [num_tokens], int32.
        attn_sink: Sink logit, added to the denominator, [num_heads], float32, or None. inf makes
            the output 0; -inf has no effect.
        plan: Work tiles, [num_work_tiles, 4], int32, from ``sparse_mla_plan`` for the same number
            of tokens and heads. With None, the call chooses the splits. The lengths that the plan
            was made from affect only the speed. A tensor that is not such a plan gives undefined
            results, but no access out of bounds. Must be None for the impl "flash_mla".
        positions: Absolute position of every query, [num_tokens], int64, to apply inverse RoPE to
            the output. If ``positions`` and ``cos_sin_cache`` are None, the output stays rotated.
            Rows at positions below 0 or past the end of the table are not changed.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most the width of q.
        flash_mla_plan: FlashMLA's plan: the result of ``flash_mla_metadata`` for exactly this
            call's lengths, [num_rows, 8], int32, which FlashMLA does not check; or a
            ``FlashMlaPlan`` for the sizes of this call, from
            ``dsv4_ops.dispatch.providers.flash_mla_plan``. Only FlashMLA reads this plan, and
            ``plan`` must then be None.
        softmax_scale: Scale of q . k, 512**-0.5 in DeepSeek-V4. Above 0.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Number of splits of a token's keys; 0 derives it from the batch or the plan. At
            least 0, and 0 with a plan. Our kernels store the partial results of several splits as
            float16 with one scale per 64 heads: values below 2^-14 of the amax of these heads lose
            bits.
        batch_invariant: Whether only the widths decide the splits if num_splits is 0. A token's
            result then has the same bits regardless of the other tokens in the batch. ``plan`` must
            then be None.
        impl: Implementation: "triton" (our kernels), "flash_mla", or "reference" (the definition);
            "auto" runs our kernels, because FlashMLA was at most 1.1 % faster at any measured size.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 if the token has no key. With
            ``positions``, ``out`` is rounded, rotated back in float32, and rounded again. The bits
            are those of an eager ``inverse_rope_group`` with one group, applied to the output
            without ``positions``.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf if the token has no key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            a ``FlashMlaPlan`` of other sizes, or several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call: FlashMLA takes 64 or 128 heads, up
            to 8192 tokens and the layout "v4_fp8", and chooses the splits itself.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: on CUDA our Triton kernels run, one for the splits and one that combines them. On
        Hopper with FP8 caches, the kernel for the splits is in Gluon: graphs call an op that
        launches both kernels, and packages contain the Gluon kernel's binary. Float32 queries, rows
        that do not have 512 values, a rope_dim other than 64 and other devices get the reference
        (gathers and products); Inductor may then keep the output in float32 until after the
        rotation. FlashMLA runs as a call of FlashMLA's op, also in packages, which then need
        FlashMLA; absent slots become -1 before the call, and inverse RoPE runs after the call.
        Without ``flash_mla_plan``, FlashMLA plans in every call. Dynamic in num_tokens, the blocks
        of the caches, both widths and num_positions; with dynamic sizes "auto" uses our kernels.
        CUDA graphs and export: yes.

    Source: FlashMLA ``flash_mla_with_kvcache`` with ``indices`` and ``extra_indices_in_kvcache``.
        The lse of a token without keys is -inf here, +inf in FlashMLA.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=1)
        >>> cache[0, 1] = 2.0
        >>> q = torch.zeros(1, 1, 4)
        >>> indices, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([1]).int()
        >>> sink = torch.zeros(1)
        >>> out, lse = dsv4_ops.sparse_mla_decode(
        ...     q, cache, indices, lens, attn_sink=sink,
        ...     softmax_scale=0.5, swa_block_size=2, layout="plain",
        ... )
        >>> out[0, 0, 0].item(), lse.item()
        (1.0, 0.0)
        >>> quarter = torch.tensor([[0.0, 1.0]])  # of a turn, for the last pair
        >>> dsv4_ops.sparse_mla_decode(
        ...     q, cache, indices, lens, positions=torch.tensor([0]), cos_sin_cache=quarter,
        ...     softmax_scale=0.5, swa_block_size=2, layout="plain",
        ... ).out
        tensor([[[ 2.,  2.,  2., -2.]]])
    """
    splitting: _Settings = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    arguments: _Settings = {"layout": layout, **splitting}
    checks = check_decode(
        "sparse_mla_decode", q, softmax_scale, DECODE_PROVIDERS, impl, **arguments
    )
    checks.at_least(1, extra_block_size=extra_block_size)
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    check_lists(checks, "swa", swa_indices, swa_lens)
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
        check_lists(checks, "extra", extra_indices, extra_lens)
    extra = {"extra_cache": extra_cache, "extra_indices": extra_indices, "extra_lens": extra_lens}
    checks.all_or_none(**extra)
    checks.optional("attn_sink", attn_sink, torch.float32, "num_heads")
    extra_width = 0 if extra_indices is None else extra_indices.shape[1]
    widths = (swa_indices.shape[1], extra_width)
    schedule = check_plans(checks, plan, flash_mla_plan, num_splits, batch_invariant, impl, widths)
    check_inverse_rope(checks, q, positions, cos_sin_cache)
    window = (swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache, schedule)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **arguments}
    return SparseMla(*_sparse_mla_decode(q, *window, *extra.values(), *rest, **settings))


def sparse_mla_decode_paged(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor,
    extra_lens: Tensor,
    req_indices: Tensor,
    extra_block_table: Tensor,
    attn_sink: Tensor | None = None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    flash_mla_plan: Tensor | FlashMlaPlan | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str = MainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> SparseMla:
    """Attend to the window and to all compressed rows that a token may see.

    This is ``sparse_mla_decode`` for a C128 layer, which selects no rows: the kernel walks the
    block table. Arguments are as for ``sparse_mla_decode`` unless described here.

    Args:
        q: Queries, as for ``sparse_mla_decode``.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32.
        swa_lens: Number of valid leading entries of ``swa_indices``, [num_tokens], int32.
        extra_cache: Compressed cache, [num_extra_blocks, page_bytes], uint8.
        extra_lens: Number of compressed rows of the request that each token sees, [num_tokens],
            int32: (position + 1) // 128. Rows past the block table or on absent blocks are skipped.
        req_indices: Request of every token, [num_tokens], int32; a token of an absent request sees
            no compressed row.
        extra_block_table: Physical block of every (request, logical block), [num_reqs, max_blocks],
            int32.
        attn_sink: Sink logit, added to the denominator, [num_heads], float32, or None.
        plan: As for ``sparse_mla_decode``.
        positions: Absolute position of every query, [num_tokens], int64, to apply inverse RoPE to
            the output. None leaves the output rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; None if
            ``positions`` is None.
        flash_mla_plan: As for ``sparse_mla_decode``.
        softmax_scale: Scale of q . k.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``: 2 for C128. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Number of splits of a token's keys; 0 derives it from the batch.
        batch_invariant: As for ``sparse_mla_decode``.
        impl: As for ``sparse_mla_decode``.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 if the token has no key. With
            ``positions``, ``out`` is rotated back as for ``sparse_mla_decode``.
        lse: As for ``sparse_mla_decode``, [num_tokens, num_heads], float32.

    Mutates: nothing.

    Raises:
        ValueError, TypeError, NotImplementedError, ImportError, RuntimeError: as
            ``sparse_mla_decode``.

    Compile: as ``sparse_mla_decode``; dynamic in num_tokens, num_reqs, max_blocks, swa_width,
        num_positions and the blocks of the caches; CUDA graphs and export: yes. The reference
        gathers every row of the block table for every token, and FlashMLA gets a list of all these
        rows.

    Source: FlashMLA ``flash_mla_with_kvcache`` over the indices that vLLM 0.33 writes for C128.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=2)
        >>> cache[1, 0] = 2.0
        >>> q, none = torch.zeros(1, 1, 4), torch.tensor([0]).int()
        >>> out, lse = dsv4_ops.sparse_mla_decode_paged(
        ...     q, cache, none[:, None], none, cache, torch.tensor([1]).int(), none,
        ...     torch.tensor([[1, 0]]).int(), softmax_scale=0.5, swa_block_size=2,
        ...     extra_block_size=2, layout="plain",
        ... )
        >>> out[0, 0, 0].item(), lse.item()
        (2.0, 0.0)
    """
    splitting: _Settings = {"num_splits": num_splits, "batch_invariant": batch_invariant}
    arguments: _Settings = {"layout": layout, **splitting}
    checks = check_decode(
        "sparse_mla_decode_paged", q, softmax_scale, DECODE_PROVIDERS, impl, **arguments
    )
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    check_lists(checks, "swa", swa_indices, swa_lens)
    check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
    checks.tensor("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("extra_block_table", extra_block_table, torch.int32, "num_reqs", "max_blocks")
    checks.optional("attn_sink", attn_sink, torch.float32, "num_heads")
    widths = (swa_indices.shape[1], extra_block_table.shape[1] * extra_block_size)
    schedule = check_plans(checks, plan, flash_mla_plan, num_splits, batch_invariant, impl, widths)
    check_inverse_rope(checks, q, positions, cos_sin_cache)
    window = (swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache, schedule)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    extra = (extra_cache, extra_lens, req_indices, extra_block_table)
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **arguments}
    return SparseMla(*_sparse_mla_decode_paged(q, *window, *extra, *rest, **settings))


def sparse_mla_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None = None,
    *,
    softmax_scale: float,
    impl: str = "auto",
) -> SparseMlaGathered:
    """Attend to rows of an unpaged tensor, like FlashMLA's sparse prefill.

    Args:
        q: Queries, [num_tokens, num_heads, width], bfloat16 or float32.
        kv: Rows, each of which is key and value, [num_rows, width], the dtype of q.
        indices: Rows of ``kv``, [num_tokens, topk], int32; rows that do not exist are skipped.
        lens: Number of valid leading entries of ``indices``, [num_tokens], int32.
        attn_sink: Sink logit, added to the denominator, [num_heads], float32, or None.
        softmax_scale: Scale of q . k.
        impl: Implementation: "triton" (our kernel, for Hopper, bfloat16 and rows of 512 values),
            "flash_mla", or "reference" (the definition). "auto" runs our kernel if it supports the
            call, else the reference.

    Returns:
        out: [num_tokens, num_heads, width], the dtype of q; 0 if the token has no key.
        max_logits: Largest logit, [num_tokens, num_heads], float32; -inf if the token has no key.
        lse: Natural logarithm of the sum of exp(logit), without the sink, [num_tokens, num_heads],
            float32; -inf if the token has no key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call: FlashMLA takes 64 or 128 heads and
            bfloat16 rows of 512 values; our kernel takes such rows on Hopper.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: a call of our kernel (AOTInductor packages contain its binary) or of FlashMLA's op, or
        gathers and products; dynamic in num_tokens, num_rows and topk; CUDA graphs and export: yes.

    Source: FlashMLA ``flash_mla_sparse_fwd``.

    Example:
        >>> import torch, dsv4_ops
        >>> kv, q = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(1, 1, 2)
        >>> indices, lens = torch.tensor([[1, 0]]).int(), torch.tensor([2]).int()
        >>> dsv4_ops.sparse_mla_gathered(q, kv, indices, lens, softmax_scale=1.0).out
        tensor([[[0.5000, 1.0000]]])
    """
    checks = Checks("sparse_mla_gathered")
    checks.above(0, softmax_scale=softmax_scale)
    checks.tensor("q", q, (torch.bfloat16, torch.float32), "num_tokens", "num_heads", "width")
    checks.tensor("kv", kv, q.dtype, "num_rows", "width")
    checks.tensor("indices", indices, torch.int32, "num_tokens", "topk")
    checks.tensor("lens", lens, torch.int32, "num_tokens")
    checks.at_least(1, topk=indices.shape[1])
    checks.optional("attn_sink", attn_sink, torch.float32, "num_heads")
    check_impl(checks.op, DECODE_PROVIDERS, impl, q.device, {"q": q})
    rows = (q, kv, indices, lens, attn_sink)
    return SparseMlaGathered(*_sparse_mla_gathered(*rows, softmax_scale=softmax_scale, impl=impl))


PREFILL_PROVIDERS = ("triton", "flash_mla", "reference")

_sparse_mla_prefill = define_op(
    "sparse_mla",
    "sparse_mla_prefill(Tensor q, Tensor swa_cache, Tensor positions, Tensor req_indices, "
    "Tensor swa_block_table, Tensor? extra_cache, Tensor? extra_block_table, "
    "Tensor? topk_indices, Tensor? attn_sink, *, float softmax_scale, int window_size, "
    "int compress_ratio, int swa_block_size, int extra_block_size, str layout, "
    'str impl="auto") '
    "-> (Tensor out, Tensor lse)",
    meta=meta.sparse_mla,
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
    source="vLLM 0.33's prefill: gather, combine and flash_mla_sparse_fwd, as one op",
    providers=PREFILL_PROVIDERS,
    hopper_call="_hopper_prefill_keys",
)


def sparse_mla_prefill(
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None = None,
    extra_block_table: Tensor | None = None,
    topk_indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    *,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int = 1,
    swa_block_size: int,
    extra_block_size: int = 1,
    layout: str = MainLayout.tag,
    impl: str = "auto",
) -> SparseMla:
    """Attend to the window and to compressed rows of the paged caches.

    Unless FlashMLA runs or a copy of the rows is faster, the op needs no copy, no index matrix and
    no chunks.

    The window of a token is its own position and the ``window_size - 1`` positions before it. The
    compressed rows of a token are those that ``topk_indices`` selects (C4), or, without
    ``topk_indices``, all rows that the token may see (C128). The op takes any batch. Each program
    computes the attention of one token and 64 heads. On Hopper, "auto" splits the keys over more
    programs if there are few tokens. On other devices, use ``sparse_mla_decode`` for few tokens,
    because it always splits the keys.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides. For the
            layout "plain", queries have the width and dtype of the caches.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``, or from ``PlainLayout.allocate``. The rows of this batch must
            be in the cache already.
        positions: Position of every token in its request, [num_tokens], int64; -1 for padding.
        req_indices: Request of every token, [num_tokens], int32; -1 for padding.
        swa_block_table: Physical block of every (request, logical block) of the window cache,
            [num_reqs, max_swa_blocks], int32. Blocks before the window may be missing.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None, like
            the next two arguments, for a layer with only a window.
        extra_block_table: Physical block of every (request, logical block) of ``extra_cache``,
            [num_reqs, max_extra_blocks], int32.
        topk_indices: Rows of the request that each token attends to, [num_tokens, topk], int32,
            from ``indexer_select``. Rows that do not exist, or that the token may not see yet, are
            skipped. None means all rows.
        attn_sink: Sink logit, added to the denominator, [num_heads], float32, or None.
        softmax_scale: Scale of q . k. Above 0.
        window_size: Keys of the window, including the token's own key. At least 1.
        compress_ratio: Positions per compressed row; a token sees (position + 1) // compress_ratio
            rows. At least 1.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        impl: Implementation: "triton" (our kernel, which reads the blocks), "flash_mla" (gathers
            the rows to bfloat16 and runs FlashMLA over the copy), or "reference" (the definition).
            "auto" runs our kernels. On Hopper, "auto" chooses by the sizes: our kernel runs over a
            bfloat16 copy where this is faster than reading the blocks, and splits the keys if there
            are few tokens. The choice may change the bits of the result. "Faster" refers to GPU
            time: outside of a CUDA graph, the five launches of a copy also take 0.5 to 0.9 ms of
            host time. A copy needs memory for all rows in the block tables, at most 2**20 rows, and
            4 bytes for each key of every token; without ``topk_indices``, a token has as many keys
            as a row of the block table holds.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 for tokens without a key, such as
            padding. The output is rotated like the values; call ``inverse_rope_group`` afterwards.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf if the token has no key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            or several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call: FlashMLA takes 64 or 128 heads, the
            layout "v4_fp8", and block tables with columns for up to 2^20 rows (a workspace of 1
            GiB); our kernel takes rows of 512 bfloat16 values.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: on CUDA our Triton kernel runs, both in graphs and in AOTInductor packages. On Hopper,
        with FP8 caches, graphs call an op that launches our Gluon kernels, packages contain the
        binaries of these kernels, and both graphs and packages decide by the sizes of each call
        whether to copy rows. Float32 queries, rows of another width than 512 and other devices get
        the reference: gathers and matrix products. FlashMLA runs as a call of FlashMLA's op, also
        in AOTInductor packages, which then need FlashMLA. For FlashMLA, our kernels gather the rows
        that the batch's tokens may see into a workspace, whose size depends on the block tables'
        shapes, and list the gathered rows. Dynamic in num_tokens, num_reqs, the blocks of both
        tables and the blocks of the caches; CUDA graphs and export: yes.

    Source: the attention of vLLM 0.33's prefill chunks, which gathers rows to bf16, combines top-k
        and window indices, and calls FlashMLA's ``flash_mla_sparse_fwd``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> cache = PlainLayout(block_size=2, width=4, dtype=torch.float32).allocate(num_blocks=2)
        >>> cache[1, 0], cache[1, 1] = 2.0, 4.0
        >>> q, positions = torch.zeros(2, 1, 4), torch.tensor([0, 1])
        >>> requests, table = torch.zeros(2).int(), torch.tensor([[1]]).int()
        >>> out, lse = dsv4_ops.sparse_mla_prefill(
        ...     q, cache, positions, requests, table,
        ...     softmax_scale=0.5, window_size=2, swa_block_size=2, layout="plain",
        ... )
        >>> out[:, 0, 0].tolist()
        [2.0, 3.0]
    """
    checks = check_queries("sparse_mla_prefill", q, layout)
    checks.above(0, softmax_scale=softmax_scale)
    blocks = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    sizes = {"window_size": window_size, "compress_ratio": compress_ratio, **blocks}
    checks.at_least(1, **sizes)
    check_cache(checks, "swa", q, swa_cache, swa_block_size, layout)
    checks.tokens(positions, req_indices)
    checks.tensor("swa_block_table", swa_block_table, torch.int32, "num_reqs", "max_swa_blocks")
    if extra_cache is not None and extra_block_table is not None:
        check_cache(checks, "extra", q, extra_cache, extra_block_size, layout)
        dims = ("num_reqs", "max_extra_blocks")
        checks.tensor("extra_block_table", extra_block_table, torch.int32, *dims)
    checks.all_or_none(extra_cache=extra_cache, extra_block_table=extra_block_table)
    if topk_indices is not None:
        checks.comes_with("topk_indices", "extra_cache", extra_cache)
        checks.tensor("topk_indices", topk_indices, torch.int32, "num_tokens", "topk")
        checks.at_least(1, topk=topk_indices.shape[1])
    checks.optional("attn_sink", attn_sink, torch.float32, "num_heads")
    tables = {"swa_block_table": swa_block_table, "extra_block_table": extra_block_table}
    arguments = {"q": q, "layout": layout, **tables, **blocks}
    check_impl("sparse_mla_prefill", PREFILL_PROVIDERS, impl, q.device, arguments)
    window = (swa_cache, positions, req_indices, swa_block_table)
    extra = (extra_cache, extra_block_table, topk_indices)
    settings = {"softmax_scale": softmax_scale, "layout": layout, "impl": impl, **sizes}
    return SparseMla(*_sparse_mla_prefill(q, *window, *extra, attn_sink, **settings))
