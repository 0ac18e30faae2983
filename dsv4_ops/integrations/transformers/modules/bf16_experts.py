"""On GPUs, run experts in bf16 with our op, which reads weights once per block of rows.

Hugging Face's forward still runs in training, for hundreds of rows per expert, after
``set_experts_implementation``, and for weights that are split or have another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import AUTO, REFERENCE
from dsv4_ops.core.torch_compat import statically_known_true
from dsv4_ops.integrations.transformers.modules.replacement import (
    QUANTIZED_EXPERTS,
    Forward,
    Maker,
    class_of,
    is_part,
    own_forward,
    quantized_weights,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.integrations.transformers.recipe import Recipe
from dsv4_ops.ops.experts import experts

RUN_ON = ("cuda",)
"""Devices where our op runs. On other devices, Hugging Face's GEMMs run."""

NO_LIMIT = torch.finfo(torch.float32).max
"""SwiGLU limit for models without a limit."""

MOST_ROWS = 256
"""Maximum mean number of rows per expert. With more rows, Hugging Face's GEMMs are faster than our
op on an H100."""

_DEFAULT = "grouped_mm"
SILU = ("SiLUActivation", "SiLU")


class Bf16Experts(Rewrite):
    """Let experts in bf16 run our op where our op is faster.

    Args:
        recipe: The recipe that ``patch`` got.
        impl: ``patch``'s argument ``impl``.
    """

    def __init__(self, recipe: Recipe, impl: str) -> None:
        # the op computes SwiGLU in float32 only; impl="reference" keeps Hugging Face's forward
        self.runs = impl != REFERENCE and recipe.swiglu_float32

    def applies(self, module: Any) -> bool:
        """Whether a module is Hugging Face's experts with unquantised weights."""
        return self.runs and is_part(module, "Experts") and not quantized_weights(module)

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Yield the forward that selects the op or Hugging Face's GEMMs."""
        if own_forward(module) is None:
            yield "forward", _with_op


def _with_op(before: Forward) -> Forward:
    def forward(
        self: Any,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
    ) -> Tensor:
        if not runs_op(self, x, expert_ids.shape[-1]) or (
            torch.is_grad_enabled() and weights.requires_grad
        ):
            out: Tensor = before(self, x, expert_ids, weights)
            return out if shared is None else out + shared
        limit = limit_of(self)
        routed = (x, weights.float(), expert_ids.to(torch.int32))
        up, down = (getattr(self, name).detach() for name in QUANTIZED_EXPERTS)
        return experts(*routed, up, None, down, None, shared, swiglu_limit=limit, impl=AUTO)

    return forward


def runs_op(module: Any, x: Tensor, top_k: int) -> bool:
    """Whether experts run our op for these hidden states, with ``top_k`` experts per token."""
    weights = [getattr(module, name, None) for name in QUANTIZED_EXPERTS]
    has_gradient = torch.is_grad_enabled()
    rows = x.numel() // x.shape[-1] * top_k
    return (
        x.device.type in RUN_ON
        and getattr(module.config, "_experts_implementation", None) == _DEFAULT
        and class_of(module.act_fn) in SILU
        and not statically_known_true(rows > MOST_ROWS * module.num_experts)
        and all(
            isinstance(each, Tensor)
            and each.dtype == torch.bfloat16
            and not hasattr(type(each), "__tensor_flatten__")
            and not (has_gradient and each.requires_grad)
            for each in (x, *weights)
        )
    )


def limit_of(module: Any) -> float:
    """Return a module's SwiGLU limit."""
    limit = getattr(module, "limit", None)
    return NO_LIMIT if limit is None else float(limit)
