"""Speculative decoding: verify the drafted tokens of a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.ints import is_float
from dsv4_ops.core.types import VerifiedDraft
from dsv4_ops.dispatch.define import define_op

_verify_draft = define_op(
    "draft",
    "verify_draft(Tensor logits, Tensor draft_ids, Tensor? draft_probs, "
    "Tensor? uniforms, *, float temperature) -> (Tensor, Tensor)",
    dynamic=("num_reqs",),
    source="Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding",
)


def verify_draft(
    logits: Tensor,
    draft_ids: Tensor,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
    *,
    temperature: float = 0.0,
) -> VerifiedDraft:
    """Accept the drafted tokens that agree with the model, and add one token.

    Row i of a request's logits is the model's prediction for draft i; the last row is the
    prediction after all drafts. Greedy decoding accepts drafts while they are the most likely
    tokens. Sampling accepts a draft with probability min(1, p / q), where p = softmax(logits /
    temperature) and q = draft_probs. The first rejected draft is replaced by a sample of the
    normalised (p - q)+. The resulting tokens have the same distribution as tokens sampled from p.

    Args:
        logits: [num_reqs, num_drafts + 1, vocab_size], float32 or bfloat16, any strides. NaN counts
            as -inf, and inf as the largest finite number. Among equal logits, the first is the most
            likely.
        draft_ids: [num_reqs, num_drafts], int64. An invalid id, such as -1 for a request with fewer
            drafts, is rejected, and its replacement is sampled from p.
        draft_probs: Probabilities that the drafts were sampled from, [num_reqs, num_drafts,
            vocab_size], float32. None means that drafts were not sampled: q is 1 at each draft.
            NaN, inf and negative values count as 0.
        uniforms: Random numbers in [0, 1), [num_reqs, num_drafts + 1], float32: one for each draft,
            and the last for the added token. 24 bits of each number are used; NaN counts as 0.
        temperature: 0 decodes greedily; draft_probs and uniforms must then be None. Above 0, tokens
            are sampled, and uniforms are required.

    Returns:
        ``VerifiedDraft(tokens, num_accepted)``. ``tokens``, int64 [num_reqs, num_drafts + 1], holds
        the accepted drafts, the added token, then -1. ``num_accepted``, int32 [num_reqs], is from 0
        to num_drafts. The added token is -1 if all logits are NaN or -inf. Sampling weights are
        rounded to multiples of 2^-38 of their sum.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, no vocabulary, or a temperature that is
            negative, not finite, or inconsistent with the other arguments.
        TypeError: a dtype other than those above, or a temperature that is not a number.

    Compile: decomposes to aten; dynamic in num_reqs; CUDA graphs and export: yes; ``num_accepted``
        stays on the device. On CPU the prefix sum calls aten.cumsum.

    Source: Leviathan et al. 2023, arXiv 2211.17192.

    Example:
        >>> import torch, dsv4_ops
        >>> logits = torch.eye(4)[torch.tensor([[2, 0, 3]])]
        >>> dsv4_ops.verify_draft(logits, torch.tensor([[2, 1]]))
        VerifiedDraft(tokens=tensor([[ 2,  0, -1]]), num_accepted=tensor([1], dtype=torch.int32))
    """
    checks = Checks("verify_draft")
    dtypes, shape = (torch.float32, torch.bfloat16), ("num_reqs", "num_drafts + 1", "vocab_size")
    checks.tensor("logits", logits, dtypes, *shape)
    if logits.shape[2] == 0:
        raise checks.error(
            "logits",
            must="have a token in its vocabulary",
            got=list(logits.shape),
            do="Pass the logits of at least one",
        )
    checks.tensor("draft_ids", draft_ids, torch.int64, "num_reqs", "num_drafts")
    if draft_probs is not None:
        shape = ("num_reqs", "num_drafts", "vocab_size")
        checks.tensor("draft_probs", draft_probs, torch.float32, *shape)
    checks.optional("uniforms", uniforms, torch.float32, "num_reqs", "num_drafts + 1")
    _check_temperature(checks, temperature, draft_probs, uniforms)
    return VerifiedDraft(
        *_verify_draft(logits, draft_ids, draft_probs, uniforms, temperature=temperature)
    )


def _check_temperature(
    checks: Checks, temperature: float, draft_probs: Tensor | None, uniforms: Tensor | None
) -> None:
    is_float(checks.op, "temperature", temperature)
    if not 0 <= temperature < math.inf:  # Dynamo cannot trace math.isfinite of a symbol
        raise checks.error(
            "temperature",
            must="be finite and at least 0",
            got=temperature,
            do="Pass 0 to decode greedily",
        )
    if temperature > 0 and uniforms is None:
        raise checks.error(
            "uniforms",
            must=f"be a tensor with temperature = {temperature}",
            got=None,
            do="Pass torch.rand(num_reqs, num_drafts + 1), or temperature=0.0",
        )
    for name, value in (("draft_probs", draft_probs), ("uniforms", uniforms)):
        if temperature == 0 and value is not None:
            raise checks.error(
                name,
                must="be None with temperature = 0",
                got="a tensor",
                do="Leave it out, or pass a temperature above 0",
            )
