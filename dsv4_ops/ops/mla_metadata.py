"""FlashMLA's tile scheduler metadata, as a tensor that a step makes once."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.ints import known
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import OpSpec, define_op
from dsv4_ops.meta import mla_metadata as meta
from dsv4_ops.reference import mla_metadata as reference

_flash_mla_metadata = define_op(
    OpSpec(
        stem="mla_metadata",
        schema="flash_mla_metadata(Tensor swa_lens, Tensor? extra_lens, *, int swa_width, "
        "int extra_width, int num_sm_parts) -> Tensor",
        meta=meta.flash_mla_metadata,
        reference=reference.flash_mla_metadata,
        lowering={"cpu": "decompose", "cuda": "decompose"},
        dynamic=("num_tokens",),
        source="the planner in FlashMLA's sparse_decode_fwd, for one query per row",
        gradient=INTEGERS,
    )
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

    The keys of a token are cut into blocks of 64: those of its window, at least one, and behind
    them those of its selected rows. Tokens are dealt out in their order. A part takes as many
    blocks as all tokens have divided by the parts, where every token counts 5 blocks more, and
    splits the token that it does not finish.

    One tensor serves all layers of a kind in a step: pass it as ``plan`` to ``sparse_mla_decode``
    or ``sparse_mla_decode_paged`` with the impl "flash_mla". FlashMLA then plans nothing in the
    call.

    Args:
        swa_lens: Rows of the window that every token sees, [num_tokens], int32; below 0 counts as
            0, above ``swa_width`` as that.
        extra_lens: Rows of the compressed cache that every token sees, [num_tokens], int32, within
            ``extra_width`` likewise; None for layers with a window only.
        swa_width: Columns of ``swa_indices``. At least 1.
        extra_width: Columns of ``extra_indices``, or max_blocks * extra_block_size of a block
            table; 0 without ``extra_lens``. Memory grows with num_tokens times both widths / 64.
        num_sm_parts: Parts: ``dsv4_ops.providers.flash_mla_num_sm_parts``. At least 1.

    Returns:
        int32 [num_sm_parts + num_tokens + 1, 8], dense. The first num_sm_parts rows are
        FlashMLA's tile_scheduler_metadata: first token of a part, its last one, the block of the
        first one at which it begins, the block of the last one before which it ends, how many
        parts before it share its first token, whether the first and whether the last token is
        split, and 0. A part without work begins at num_tokens. The numbers behind them begin with
        FlashMLA's num_splits: partial results of all tokens before each, and in all, num_tokens + 1
        of them; the others are 0. FlashMLA so refuses it in a call of another number of tokens.

        With lens other than those it was made of FlashMLA leaves out keys, or reads behind lists,
        without a word.

    Mutates: nothing.

    Raises:
        ValueError: lens of different lengths or devices, numbers out of range, or an
            ``extra_width`` without ``extra_lens``.
        TypeError: a dtype other than int32, or a number that is no int.

    Compile: decomposes to prefix sums and gathers; dynamic in num_tokens; CUDA graphs and export:
        yes. No host synchronisation: a captured graph makes the metadata of the lens that it finds.

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
    if extra_lens is not None:
        checks.tensor("extra_lens", extra_lens, torch.int32, "num_tokens")
    checks.at_least(0 if extra_lens is None else 1, extra_width=extra_width)
    if extra_lens is None and extra_width != 0:
        rule, advice = "be 0 without extra_lens", "Pass both or neither"
        raise refusal(ValueError, checks.op, "extra_width", rule, known(extra_width), advice)
    checks.at_least(1, swa_width=swa_width, num_sm_parts=num_sm_parts)
    sizes = {"swa_width": swa_width, "extra_width": extra_width, "num_sm_parts": num_sm_parts}
    made: Tensor = _flash_mla_metadata(swa_lens, extra_lens, **sizes)
    return made
