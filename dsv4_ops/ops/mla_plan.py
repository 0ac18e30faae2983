"""The plan of a step's sparse attention: who works on which keys, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.core.tiles import PROGRAMS
from dsv4_ops.meta import mla_plan as meta
from dsv4_ops.reference import mla_plan as reference

_sparse_mla_plan = define_op(
    OpSpec(
        stem="mla_plan",
        schema="sparse_mla_plan(Tensor swa_lens, Tensor? extra_lens, *, int num_heads, "
        "int num_programs) -> Tensor",
        meta=meta.sparse_mla_plan,
        reference=reference.sparse_mla_plan,
        lowering={"cpu": "decompose", "cuda": "triton"},
        dynamic=("num_tokens",),
        source="what FlashMLA's get_mla_metadata is for; the plan itself is ours",
        providers=("triton", "reference"),
        gradient=INTEGERS,
    )
)


def sparse_mla_plan(
    swa_lens: Tensor,
    extra_lens: Tensor | None = None,
    *,
    num_heads: int,
    num_programs: int = PROGRAMS,
) -> Tensor:
    """Cut the keys of every token into pieces of about the same size, for decode batches whose
    tokens see very different numbers of keys.

    Without a plan ``sparse_mla_decode`` cuts every token into the same number of splits, and a long
    context in a batch of short ones is what all wait for. Only ``sparse_mla_decode_paged`` over FP8
    caches on Hopper, of 32 tokens times tiles of 64 heads or more, up to 256 tokens, and of lists
    of 4 blocks of 64 keys or more, then cuts by lens itself, in every layer again. One plan serves
    all layers with the same lens; give it to ``sparse_mla_decode`` or ``sparse_mla_decode_paged``
    as ``plan``, or have it made with a step (``dsv4_ops.attention.build_attention_step``).

    Args:
        swa_lens: Rows of the window that every token sees, [num_tokens], int32; below 0 counts as
            0.
        extra_lens: Rows of the compressed cache that every token sees, [num_tokens], int32; None
            for layers that have only a window.
        num_heads: Heads of the queries that the plan is for. At least 1.
        num_programs: Programs that run at a time, the SMs of the device. At least 1.

    Returns:
        int32 [num_tokens + programs, 4], where programs is num_programs divided by the tiles of 64
        heads, at least 1. A row is a piece: its token, which piece of the token it is, how many
        the token has, and where in a buffer the partial results of the token begin, 0 of one piece.
        The first pieces of tokens that have several come first, then their further ones, tokens of
        one piece, and rows of -1. Those of one piece are in the order of how many fourteenths of
        the longest piece they have, the longest first; tokens that are equal in that, and all of
        several pieces, are in their own. Every token has at least one piece, also without keys.

        Of some sizes of pieces from the mean on, the plan has the one that would take the least
        time: as long as a piece, or as all pieces with the starts of their programs take on so many
        programs. There are no more further pieces than programs without a first one, or than a
        quarter of the programs: a token in two makes another round of programs.

        A piece is a share of its token's keys, not a range, so a plan made of other lens gives the
        same attention, only less evenly spread.

    Mutates: nothing.

    Raises:
        ValueError: lens of different lengths or devices, numbers below 1, or more than 16383
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
    if extra_lens is not None:
        checks.tensor("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.at_least(1, num_heads=num_heads, num_programs=num_programs)
    checks.request_limit("num_tokens")
    plan: Tensor = _sparse_mla_plan(
        swa_lens, extra_lens, num_heads=num_heads, num_programs=num_programs
    )
    return plan
