"""Say which implementation runs a call, and help to plan calls of FlashMLA and DeepGEMM.

FlashMLA is the module ``flash_mla``, vLLM's build, or the library in the environment variable
DSV4_OPS_FLASH_MLA (``/path/to/_flashmla_C.abi3.so``). DeepGEMM is the module ``deep_gemm``, vLLM's
copy, or the folder in DSV4_OPS_DEEP_GEMM. ``python -m dsv4_ops doctor`` says where it found a
library, or why the library does not run. Libraries are loaded at their first use.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.ints import at_least
from dsv4_ops.core.registry import OPS
from dsv4_ops.core.types import FlashMlaPlan
from dsv4_ops.dispatch import layers
from dsv4_ops.dispatch.choice import (
    Choice,
    choose,
    require,
)
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES, VARIABLES
from dsv4_ops.dispatch.limits import FLASH_MLA_HEADS, FLASH_MLA_TOKENS

__all__ = [
    "LIBRARIES",
    "VARIABLES",
    "Choice",
    "FlashMlaPlan",
    "choice_of",
    "deep_gemm_num_sms",
    "flash_mla_num_sm_parts",
    "flash_mla_plan",
]

_OP = "flash_mla_plan"


def flash_mla_plan(
    num_tokens: int,
    *,
    num_heads: int,
    swa_width: int,
    extra_width: int = 0,
    device: torch.device | str = "cuda",
) -> FlashMlaPlan:
    """Make a plan of FlashMLA that fits all decodes of the same sizes.

    The plan divides the keys among FlashMLA's programs. Without a plan, FlashMLA plans in every
    call, which takes 15 to 62 us on an H200.

    FlashMLA's own plans (``dsv4_ops.flash_mla_metadata``) hold for one set of lengths, and silently
    give wrong results for others. This plan assumes full index lists instead, so it holds for all
    lengths. A call of other sizes raises. If lists are much shorter than their width, this plan
    costs time, because FlashMLA reads every entry.

    Make the plan once per batch size, outside of compiled code, and pass it to
    ``sparse_mla_decode`` in all layers and steps. For ``sparse_mla_decode_paged``, ``extra_width``
    is max_blocks * extra_block_size.

    Args:
        num_tokens: Number of tokens, 1 to 8192.
        num_heads: Number of query heads, 64 or 128.
        swa_width: Columns of ``swa_indices``. At least 1.
        extra_width: Columns of ``extra_indices``; 0 for layers with a window only.
        device: The GPU of the decode.

    Returns:
        ``FlashMlaPlan`` with ``schedule``, an opaque int32 [size], and the sizes of the plan.

    Raises:
        ValueError, TypeError: a number is out of range.
        ImportError, RuntimeError: FlashMLA does not run here; the error says why.
    """
    at_least(_OP, 1, num_tokens=num_tokens, swa_width=swa_width)
    at_least(_OP, 0, extra_width=extra_width)
    if num_tokens > FLASH_MLA_TOKENS:
        raise argument_error(
            _OP,
            "num_tokens",
            must=f"be at most {FLASH_MLA_TOKENS}",
            got=num_tokens,
            do="Split the batch",
        )
    _check_heads(_OP, num_heads)
    require(_OP, FLASH_MLA)
    adapter = layers.adapter(FLASH_MLA)
    made: FlashMlaPlan = adapter.plan_for(
        num_tokens, num_heads, swa_width, extra_width, torch.device(device)
    )
    return made


def flash_mla_num_sm_parts(num_heads: int, device: torch.device | str = "cuda") -> int:
    """Return the number of SM parts that FlashMLA divides a decode into on Hopper.

    ``flash_mla_metadata`` needs this number. The number is for calls with one query per token.

    The function loads the library: call it once, outside of compiled code.

    Args:
        num_heads: Number of query heads, 64 or 128.
        device: The GPU of the decode.

    Raises:
        ValueError: another number of heads.
        ImportError, RuntimeError: FlashMLA does not run here; the error says why.
    """
    op = "flash_mla_num_sm_parts"
    _check_heads(op, num_heads)
    require(op, FLASH_MLA)
    adapter = layers.adapter(FLASH_MLA)
    found: int = adapter.num_sm_parts(torch.device(device), num_heads)
    return found


def _check_heads(op: str, num_heads: int) -> None:
    if num_heads not in FLASH_MLA_HEADS:
        raise argument_error(
            op, "num_heads", must="be 64 or 128", got=num_heads, do="FlashMLA takes no other"
        )


def deep_gemm_num_sms() -> int:
    """Return the number of SMs that DeepGEMM's logits kernel uses.

    ``paged_mqa_logits_metadata`` needs this number for its schedule.

    The function loads the library: call it once, outside of compiled code.

    Raises:
        ImportError, RuntimeError: DeepGEMM does not run here; the error says why.
    """
    require("deep_gemm_num_sms", DEEP_GEMM)
    adapter = layers.adapter(DEEP_GEMM)
    found: int = adapter.num_sms()
    return found


def choice_of(op: str, *args: Any, **kwargs: Any) -> Choice:
    """Return the implementation that a call of ``op`` would run, and why; run nothing.

    Args:
        op: Name of an op.
        *args: Arguments of the op's public function.
        **kwargs: Keyword arguments of that function.

    Returns:
        ``Choice(impl, reason)``.

    Raises:
        ValueError: there is no such op.
        TypeError: the public function does not take these arguments.
        ImportError, RuntimeError: ``impl`` does not run here; the error says why.
        NotImplementedError: ``impl`` does not support the call.

    Example:
        >>> import torch
        >>> from dsv4_ops.dispatch.providers import choice_of
        >>> kv, q = torch.zeros(2, 512), torch.zeros(1, 64, 512)
        >>> lists = torch.zeros(1, 1).int(), torch.ones(1).int()
        >>> choice_of("sparse_mla_gathered", q, kv, *lists, softmax_scale=1.0)
        Choice(impl='reference', reason='no kernel runs on cpu')
    """
    if op not in OPS:
        raise argument_error(
            "choice_of",
            "op",
            must="be the name of an op",
            got=repr(op),
            do="See `python -m dsv4_ops list`",
        )
    spec = OPS[op]
    bound = inspect.signature(spec.implementation("ops")).bind(*args, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    if isinstance(values.get("flash_mla_plan"), FlashMlaPlan):
        values["flash_mla_plan"] = values["flash_mla_plan"].schedule
    return choose(spec, spec.arguments((), values))
