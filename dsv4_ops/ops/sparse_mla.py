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
    """Check layout and queries of ``op``; return the checks and what it runs with."""
    checks = check_queries(op, q, layout)
    check_splits(checks, num_splits, batch_invariant)
    taken = {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    check_impl(op, providers, impl, q.device, {"q": q, **taken})
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
    """Check the plan that our kernels go by and the one that FlashMLA does; return the latter as
    the op takes it.

    With a plan nothing else decides, and it has to be one that ``impl`` goes by."""
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
    """Check that a plan was made for such a call; return its numbers.

    FlashMLA would read past the lists of another."""
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
    """One of the two caches."""
    size_name, blocks = f"{source}_block_size", f"num_{source}_blocks"
    checks.at_least(1, **{size_name: block_size})
    if layout == MainLayout.tag:
        dims = (blocks, f"{source}_page_bytes")
        checks.pages(f"{source}_cache", cache, MainLayout(block_size), dims, size_name)
        return
    checks.rows(f"{source}_cache", cache, block_size, (blocks, size_name, "width"), size_name)
    checks.tensor(f"{source}_cache", cache, q.dtype, blocks, size_name, "width")


def check_lists(checks: Checks, source: str, indices: Tensor, lens: Tensor) -> None:
    """Slots of one of the two caches and how many count."""
    checks.tensor(f"{source}_indices", indices, torch.int32, "num_tokens", f"{source}_width")
    checks.tensor(f"{source}_lens", lens, torch.int32, "num_tokens")
    checks.at_least(1, **{f"{source}_width": indices.shape[1]})


def check_turn(
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
    """Split the keys of a ragged decode batch into work tiles of equal size.

    Without a plan ``sparse_mla_decode`` gives every token the same number of splits, and the whole
    batch waits for its longest context. ``sparse_mla_decode_paged`` schedules by lengths without a
    plan, in every layer again, only over FP8 caches on Hopper, from 32 tokens times tiles of 64
    heads up to 256 tokens, and with lists of at least 4 blocks of 64 keys. One plan serves all
    layers with the same lengths; give it to ``sparse_mla_decode`` or ``sparse_mla_decode_paged`` as
    ``plan``, or have it made with a step (``dsv4_ops.attention.build_attention_step``).

    Args:
        swa_lens: Rows of the window that every token sees, [num_tokens], int32; below 0 counts as
            0.
        extra_lens: Rows of the compressed cache that every token sees, [num_tokens], int32; None
            for layers that have only a window.
        num_heads: Heads of the queries that the plan is for. At least 1.
        num_programs: Programs that run at a time, the SMs of the device. At least 1.

    Returns:
        int32 [num_tokens + programs, 4], where programs is num_programs divided by the tiles of 64
        heads, at least 1. A row is a work tile: its token, the index of the split, the number of
        splits of the token, and where in a buffer the partial results of the token begin, 0 for a
        token of one split. First come the first splits of tokens that have several, then their
        extra splits, tokens of one split, and rows of -1. Tokens of one split are sorted by how
        many fourteenths of the longest split they have, the longest first; ties, and tokens of
        several splits, keep their order. Every token has at least one split, even without keys.

        The size of a split is the one, among some sizes from the mean on, that is expected to take
        the least time: that of one split, or of all splits and the starts of their programs shared
        among the programs. There are at most as many extra splits as programs without a first
        split, or a quarter of the programs: beyond one wave an extra split costs another round.

        A split is a share of its token's keys, not a range, so a plan made from other lengths gives
        the same attention, only less evenly spread.

    Mutates: nothing.

    Raises:
        ValueError: lengths of different shapes or devices, numbers below 1, or more than 16383
            tokens.
        TypeError: a dtype other than int32.

    Compile: on CUDA our Triton kernel, of one program, in the graph and in AOTInductor packages; on
        the CPU prefix sums, which are aten calls, and the search of ``token_map``; dynamic in
        num_tokens; CUDA graphs and export: yes.

    Source: takes the place of FlashMLA's ``get_mla_metadata``.

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
    """Share the keys of a sparse decode among SMs as FlashMLA does.

    The keys of a token are split into blocks of 64: those of its window, at least one, and behind
    them those of its selected rows. Tokens are dealt out in their order. A part takes as many
    blocks as all tokens have divided by the parts, where every token counts 5 blocks more, and
    splits the token that it does not finish.

    One tensor serves all layers of a kind in a step: pass it as ``flash_mla_plan`` to
    ``sparse_mla_decode`` or ``sparse_mla_decode_paged`` with the impl "flash_mla". FlashMLA then
    plans nothing in the call.

    Args:
        swa_lens: Rows of the window that every token sees, [num_tokens], int32; below 0 counts as
            0, above ``swa_width`` as that.
        extra_lens: Rows of the compressed cache that every token sees, [num_tokens], int32, within
            ``extra_width`` likewise; None for layers with a window only.
        swa_width: Columns of ``swa_indices``. At least 1.
        extra_width: Columns of ``extra_indices``, or max_blocks * extra_block_size of a block
            table; 0 without ``extra_lens``. On a CPU memory grows with num_tokens times both widths
            / 64.
        num_sm_parts: Parts: ``dsv4_ops.dispatch.providers.flash_mla_num_sm_parts``. At least 1.

    Returns:
        int32 [num_sm_parts + num_tokens + 1, 8], dense. The first num_sm_parts rows are
        FlashMLA's tile_scheduler_metadata: first token of a part, its last one, the block of the
        first one at which it begins, the block of the last one before which it ends, how many
        parts before it share its first token, whether the first and whether the last token is
        split, and 0. A part without work begins at num_tokens. The numbers behind them begin with
        FlashMLA's num_splits: partial results of all tokens before each, and in all, num_tokens + 1
        of them; the others are 0. FlashMLA so refuses it in a call of another number of tokens.

        With lengths other than those it was made of FlashMLA leaves out keys, or reads behind
        lists, without a word.

    Mutates: nothing.

    Raises:
        ValueError: lengths of different shapes or devices, numbers out of range, or an
            ``extra_width`` without ``extra_lens``.
        TypeError: a dtype other than int32, or a number that is no int.

    Compile: on CUDA one Triton kernel inside the graph, on the CPU prefix sums and gathers; dynamic
        in num_tokens; CUDA graphs and export: yes. No host synchronisation: a captured graph makes
        the metadata of the lengths that it finds.

    Source: what FlashMLA's ``flash_mla_with_kvcache``, given ``indices``, ``topk_length`` and
        ``extra_topk_length``, leaves in its ``FlashMLASchedMeta`` on Hopper; semantics only.

    Example:
        >>> import torch, dsv4_ops
        >>> lens = torch.tensor([64, 640], dtype=torch.int32)  # 1 and 10 blocks, 6 and 15 counted
        >>> made = dsv4_ops.flash_mla_metadata(lens, swa_width=640, num_sm_parts=2)
        >>> made[0].tolist(), made[1].tolist()  # 11 counted each, and 5: blocks 0 to 4 of token 1
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

    Keys are values.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides; for the
            layout "plain" of any width and dtype that the caches have.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``; or of ``PlainLayout``.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32, as
            ``swa_indices_and_lens`` gives them. Slots that do not exist are skipped.
        swa_lens: How many leading entries of ``swa_indices`` count, [num_tokens], int32.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None for
            a layer with only a window, and then neither of the next two.
        extra_indices: Slots of the selected rows, [num_tokens, extra_width], int32, as
            ``indexer_select`` with ``slots`` and ``global_topk_indices_and_lens`` give them.
        extra_lens: How many leading entries of ``extra_indices`` count, [num_tokens], int32.
        attn_sink: Logit that is added to the denominator, [num_heads], float32; None for none. inf
            makes the output 0, -inf has no effect.
        plan: How to share the keys of all tokens among programs, [num_work_tiles, 4], int32, from
            ``sparse_mla_plan`` for as many tokens and heads; None to have the call decide. Which
            lengths it was made of changes only the speed. What another tensor in its place gives is
            undefined, but in bounds. FlashMLA reads no such plan.
        positions: Absolute position of every query, [num_tokens], int64, to have the rotation of
            the output undone where it is computed; None to leave it, and then no ``cos_sin_cache``.
            Rows of a position below 0 or past the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most the width of q.
        flash_mla_plan: What FlashMLA alone reads: its own plan for the lengths of this call and no
            other, from ``flash_mla_metadata`` of them, [num_rows, 8], int32, which it does not
            check; or a ``FlashMlaPlan`` for the sizes of this call, from
            ``dsv4_ops.dispatch.providers.flash_mla_plan``. Not with a ``plan``.
        softmax_scale: What q . k is multiplied by, 512**-0.5 in DeepSeek-V4. Above 0.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Splits of the keys of every token; 0 has the batch, or the plan, decide. At
            least 0, and 0 with a plan. Our kernels hold the result of a split as float16 times one
            scale for 64 heads: values below 2^-14 of their amax lose bits, unless there is one
            split.
        batch_invariant: With num_splits 0, split by the widths alone: a token's result has the same
            bits whatever other tokens are in the batch. Not with a plan.
        impl: What runs: "triton" our kernels, "flash_mla" FlashMLA, "reference" the definition;
            "auto" ours, unless FlashMLA is there and was faster at these sizes on an H200.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key. With ``positions``
            what an eager ``inverse_rope_group`` in one group makes of the output without, bit for
            bit: rounded, rotated back in float32, and rounded again.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            a ``FlashMlaPlan`` of other sizes, or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads,
            up to 8192 tokens and the layout "v4_fp8", and decides itself what it splits.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: on CUDA our Triton kernels, one for the splits and one that combines them; on Hopper
        with FP8 caches the first is in Gluon: graphs call an op that launches both, packages hold
        its binary; float32 queries, rows not of 512 values, angles of another rope_dim than 64 and
        other devices get the reference: gathers and products, and Inductor may keep the output in
        float32 until it is rotated. FlashMLA is a call of its own op, in packages too, which then
        need that library; slots that do not exist become -1 before it, and a rotation is undone
        behind it. It plans in every call without one of its plans. Dynamic in num_tokens, the
        blocks of the caches, both widths and num_positions; with dynamic sizes "auto" uses our
        kernels; CUDA graphs and export: yes.

    Source: FlashMLA ``flash_mla_with_kvcache`` with ``indices`` and ``extra_indices_in_kvcache``.
        The lse of a token without keys is -inf here, +inf there.

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
    taken: _Settings = {"layout": layout, **splitting}
    checks = check_decode("sparse_mla_decode", q, softmax_scale, DECODE_PROVIDERS, impl, **taken)
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
    check_turn(checks, q, positions, cos_sin_cache)
    window = (q, swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache, schedule)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **taken}
    return SparseMla(*_sparse_mla_decode(*window, *extra.values(), *rest, **settings))


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
    """Attend to the window and to the first compressed rows of a request.

    This is ``sparse_mla_decode`` of a C128 layer, which selects nothing: the kernel walks the block
    table.

    Args:
        q: Queries, as for ``sparse_mla_decode``, as is all that is not described here.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8.
        swa_indices: Slots of the window's rows, [num_tokens, swa_width], int32.
        swa_lens: How many leading entries of ``swa_indices`` count, [num_tokens], int32.
        extra_cache: Compressed cache, [num_extra_blocks, page_bytes], uint8.
        extra_lens: How many rows of its request a token sees, [num_tokens], int32:
            (position + 1) // 128. Rows past the block table and on blocks that do not exist are
            skipped.
        req_indices: Request of every token, [num_tokens], int32; one that does not exist sees no
            compressed row.
        extra_block_table: Physical block of every (request, logical block), [num_reqs, max_blocks],
            int32.
        attn_sink: Logit that is added to the denominator, [num_heads], float32; None for none.
        plan: As for ``sparse_mla_decode``.
        positions: Absolute position of every query, [num_tokens], int64, to have the rotation of
            the output undone; None to leave it.
        cos_sin_cache: Angles of the positions, [num_positions, rope_dim], float32; or None too.
        flash_mla_plan: As for ``sparse_mla_decode``.
        softmax_scale: What q . k is multiplied by.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``: 2 for C128. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        num_splits: Splits of the keys of every token; 0 has the batch decide.
        batch_invariant: With num_splits 0, split by the widths alone.
        impl: As for ``sparse_mla_decode``.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key. With ``positions``
            rotated back, as that of ``sparse_mla_decode``.
        lse: As for ``sparse_mla_decode``, [num_tokens, num_heads], float32.

    Mutates: nothing.

    Raises:
        ValueError, TypeError, NotImplementedError, ImportError, RuntimeError: as
            ``sparse_mla_decode``.

    Compile: as ``sparse_mla_decode``; dynamic in num_tokens, num_reqs, max_blocks, swa_width,
        num_positions and the blocks of the caches; CUDA graphs and export: yes. The reference
        gathers every row of the block table for every token, and FlashMLA gets a list of them.

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
    taken: _Settings = {"layout": layout, **splitting}
    checks = check_decode(
        "sparse_mla_decode_paged", q, softmax_scale, DECODE_PROVIDERS, impl, **taken
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
    check_turn(checks, q, positions, cos_sin_cache)
    window = (q, swa_cache, swa_indices, swa_lens)
    rest = (attn_sink, plan, positions, cos_sin_cache, schedule)
    sizes = {"swa_block_size": swa_block_size, "extra_block_size": extra_block_size}
    extra = (extra_cache, extra_lens, req_indices, extra_block_table)
    settings = {"softmax_scale": softmax_scale, "impl": impl, **sizes, **taken}
    return SparseMla(*_sparse_mla_decode_paged(*window, *extra, *rest, **settings))


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
    """Attend to rows of an unpaged tensor: the form of FlashMLA's sparse prefill.

    Args:
        q: Queries, [num_tokens, num_heads, width], bfloat16 or float32.
        kv: Keys, which are the values, [num_rows, width], the dtype of q.
        indices: Rows of ``kv``, [num_tokens, topk], int32; rows that do not exist are skipped.
        lens: How many leading entries of ``indices`` count, [num_tokens], int32.
        attn_sink: Logit that is added to the denominator, [num_heads], float32; None for none.
        softmax_scale: What q . k is multiplied by.
        impl: What runs: "triton" our kernel, which is for Hopper, bfloat16 and rows of 512 values;
            "flash_mla" FlashMLA, "reference" the definition. "auto" takes our kernel, and where it
            does not run the definition.

    Returns:
        out: [num_tokens, num_heads, width], the dtype of q; 0 without any key.
        max_logits: Largest logit, [num_tokens, num_heads], float32; -inf without any key.
        lse: Natural logarithm of the sum of exp(logit), without the sink, [num_tokens, num_heads],
            float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads
            and bfloat16 rows of 512 values, our kernel such rows on Hopper.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: a call of our kernel, whose binary AOTInductor packages hold, of FlashMLA's op, or
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

    Without a gathered copy, an index matrix or chunks, unless a copy is faster or FlashMLA runs.

    The window of a token is its own position and the ``window_size - 1`` before it. Compressed
    rows are those that ``topk_indices`` selects (C4), or without it all that the token may see
    (C128). It takes any batch. A program attends for one token and 64 heads, and on Hopper "auto"
    splits the keys of few tokens over more of them; elsewhere few tokens are
    ``sparse_mla_decode``'s, which always does.

    Args:
        q: Queries with RoPE applied, [num_tokens, num_heads, 512], bfloat16, any strides; for the
            layout "plain" of any width and dtype that the caches have.
        swa_cache: Cache of the window, [num_swa_blocks, page_bytes], uint8, from
            ``MainLayout.allocate``; or of ``PlainLayout``. Holds the rows of this batch already.
        positions: Position of every token in its request, [num_tokens], int64; -1 for padding.
        req_indices: Request of every token, [num_tokens], int32; -1 for padding.
        swa_block_table: Physical block of every (request, logical block) of the window cache,
            [num_reqs, max_swa_blocks], int32. Blocks before the window may be missing.
        extra_cache: Compressed cache of the same layout, [num_extra_blocks, page_bytes]; None for
            a layer with only a window, and then neither of the next two.
        extra_block_table: Physical block of every (request, logical block) of it, [num_reqs,
            max_extra_blocks], int32.
        topk_indices: Rows of its request that a token attends to, [num_tokens, topk], int32, as
            ``indexer_select`` gives them. Rows that do not exist, or that the token may not see
            yet, are skipped. None for all rows.
        attn_sink: Logit that is added to the denominator, [num_heads], float32; None for none.
        softmax_scale: What q . k is multiplied by. Above 0.
        window_size: Keys of the window, the token's own included. At least 1.
        compress_ratio: Positions per compressed row; a token sees (position + 1) // compress_ratio
            rows. At least 1.
        swa_block_size: Rows per block of ``swa_cache``. At least 1.
        extra_block_size: Rows per block of ``extra_cache``. At least 1.
        layout: Tag of both caches' layout, "v4_fp8" or "plain".
        impl: What runs: "triton" our kernel that reads the blocks, "flash_mla" a gather of the rows
            to bfloat16 and FlashMLA over it, "reference" the definition. "auto" takes ours; on
            Hopper, where it is faster at these sizes, over such a copy too, or with the keys of few
            tokens in splits. What runs may change bits, and "auto" goes by the number of tokens,
            and by time on the GPU: a copy's five launches take the host 0.5 to 0.9 ms where nothing
            captures them. A copy has memory for all rows that the block tables name, of which there
            may be 2**20, and for the keys of every token, 4 bytes each: without ``topk_indices`` as
            many as a row of the table names.

    Returns:
        out: [num_tokens, num_heads, 512], the dtype of q; 0 without any key, so for padding.
            Rotated as the values are: only ``sparse_mla_decode`` can undo that itself, here
            ``inverse_rope_group`` does it behind.
        lse: Natural logarithm of the sum of exp(logit) over the keys, without the sink,
            [num_tokens, num_heads], float32; -inf without any key.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, caches that are not of the layout, a number out of range,
            or several devices.
        TypeError: a dtype other than the ones above.
        NotImplementedError: an ``impl`` that does not take the call: FlashMLA has 64 or 128 heads,
            the layout "v4_fp8", and a workspace of up to 2^20 rows (1 GiB), which are all that the
            block tables have columns for; our kernel has rows of 512 bfloat16 values.
        ImportError, RuntimeError: an ``impl`` that does not run here, and why.

    Compile: on CUDA our Triton kernel in the graph and in AOTInductor packages; on Hopper, with FP8
        caches, graphs call an op that launches those in Gluon, packages hold their binaries, and
        both decide by the sizes of each call whether rows are copied; float32 queries, rows of
        another width than 512 and other devices get the reference: gathers and matrix products.
        FlashMLA is a call of its own op, in AOTInductor packages too, which then need that library;
        kernels of ours gather the rows that tokens of the batch may see, into a workspace whose
        size the block tables' shapes decide, and list them. Dynamic in num_tokens, num_reqs, the
        blocks of both tables and the blocks of the caches; CUDA graphs and export: yes.

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
    taken = {"q": q, "layout": layout, **tables, **blocks}
    check_impl("sparse_mla_prefill", PREFILL_PROVIDERS, impl, q.device, taken)
    window = (q, swa_cache, positions, req_indices, swa_block_table)
    extra = (extra_cache, extra_block_table, topk_indices)
    settings = {"softmax_scale": softmax_scale, "layout": layout, "impl": impl, **sizes}
    return SparseMla(*_sparse_mla_prefill(*window, *extra, attn_sink, **settings))
