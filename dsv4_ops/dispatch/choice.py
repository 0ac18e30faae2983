"""Which implementation a call runs: the one that ``impl=`` names, or the fastest here.

Nothing else decides: launchers run what they are given. An explicit ``impl`` runs or raises; it
never becomes another. ``impl="auto"`` takes our kernels, unless an installed library was faster on
an H200 at these sizes (``is_faster``), and the reference for what our kernels do not take
(``dispatch/limits.py``). With dynamic shapes it takes no library: asking a symbol would guard it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import AUTO, REFERENCE, TRITON, OpSpec
from dsv4_ops.dispatch import libraries, limits
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES, SCALED_MM
from dsv4_ops.dispatch.limits import (
    CODES_CAPABILITY,
    FLASH_MLA_HEADS as FLASH_MLA_HEADS,
    Values,
    limit,
    scaled_mm_limit,
)
from dsv4_ops.dispatch.probes import probe

IMPLS = (AUTO, TRITON, FLASH_MLA, DEEP_GEMM, REFERENCE)

DEVICES = ("cuda",)
"""Types of the devices that kernels and libraries run on."""

_NAMES = {FLASH_MLA: "FlashMLA", DEEP_GEMM: "DeepGEMM"}

SCALED_MM_TOKENS = {"fp8_linear": 128}
"""Tokens from which on ``impl="auto"`` takes torch's block-wise product of activations in FP8. Not
of groups, each of which is a call: 196 us where our kernel takes 81 (1024 tokens of ``o_a``, codes
given, eager)."""

SCALED_MM_FROM = {
    op: f"{least} tokens with activations in FP8, if their number is no symbol"
    for op, least in SCALED_MM_TOKENS.items()
}
"""The same in words."""
FASTER_LIBRARY = ("indexer_logits", DEEP_GEMM)
"""The op and the library that ``impl="auto"`` takes, within the sizes of ``is_faster``."""

MEASURED = (
    "64 heads, from 32 tokens and 2048 columns on, 2^20 to 2^23 logits "
    "(32.2 us at 32 x 32768 where ours takes 36.7)"
)
"""Those sizes in words. Measured on an H200 by ``python -m benchmarks.choice`` on 2026-11-22 with
torch 2.11.0+cu130 and vLLM 0.22.1's DeepGEMM, in CUDA graphs over rotating inputs."""


def is_faster(op: str, library: str, values: Values) -> bool:
    """Whether ``library`` was faster than our kernels on an H200 for such a call."""
    if (op, library) != FASTER_LIBRARY:
        return False
    (tokens, heads, _), columns = values["q"].shape, values["num_rows"]
    large_enough = tokens >= 32 and columns >= 2048
    return bool(heads == 64 and large_enough and 2**20 <= tokens * columns <= 2**23)


def subject(values: Values) -> Tensor:
    """The tensor whose device and rows decide: queries, what a layer multiplies, or the first."""
    tensors = (each for each in values.values() if isinstance(each, Tensor))
    found: Tensor = values.get("q", values.get("x"))
    return next(tensors) if found is None else found


class Choice(NamedTuple):
    """What an op runs with, and why; see ``dsv4_ops.dispatch.providers.choice_of``."""

    impl: str
    reason: str


def check_impl(
    op: str, providers: Sequence[str], impl: str, device: torch.device, values: Values
) -> None:
    """``impl`` is one of the op's, and takes such a call on such a device; whether the library is
    there is asked when the op runs or is compiled."""
    allowed = (AUTO, *providers)
    if not isinstance(impl, str):
        raise argument_error(
            op,
            "impl",
            must="be a str",
            got=type(impl).__name__,
            do=f"Pass {_either(allowed)}",
            kind=TypeError,
        )
    if impl not in allowed:
        raise argument_error(
            op, "impl", must=f"be {_either(allowed)}", got=repr(impl), do="Pass one of these"
        )
    check_device(op, impl, device)
    check_limit(op, providers, impl, values)


def check_limit(
    op: str, providers: Sequence[str], impl: str, values: Values, asked_by: str = ""
) -> None:
    """What was asked for takes such a call, whoever asked: the op checks it again where it runs, as
    the sizes of an exported program are not known before, and layers, ``asked_by``, before anything
    is written. ``Sizes`` can stand in for tensors."""
    found = limit(op, impl, values, asking=True)
    if found is not None:
        others = [each for each in (AUTO, *providers) if each != impl]
        raise argument_error(
            asked_by or op,
            "impl",
            must=f"be {_either(others)} {found.what}",
            got=repr(impl),
            do=found.advice,
            kind=NotImplementedError,
        )


def impl_for(providers: Sequence[str], impl: str) -> str:
    """What an op runs with where ``impl`` is meant for several ops: the others decide
    themselves."""
    return impl if impl in providers else AUTO


def check_device(op: str, impl: str, device: torch.device) -> None:
    """What was asked for runs on such devices."""
    if impl not in (AUTO, REFERENCE) and device.type not in DEVICES:
        raise argument_error(
            op,
            "impl",
            must=f"be {_either((AUTO, REFERENCE))} on {device.type}",
            got=repr(impl),
            do="Move the tensors to a CUDA device",
            kind=RuntimeError,
        )


def check_codes(op: str, device: torch.device) -> None:
    """Kernels of caches that hold e4m3 codes are compiled for such devices."""
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < CODES_CAPABILITY:
            least, has = (".".join(map(str, each)) for each in (CODES_CAPABILITY, found))
            raise argument_error(
                op,
                "device",
                must=f"have compute capability {least} or later for caches of FP8 keys",
                got=has,
                do="Pass kv='bf16' to patch",
                kind=RuntimeError,
            )


@functools.cache
def scaled_mm_obstacle() -> str:
    """Why torch's product with block scales does not run here; empty if it does."""
    if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return "This torch has no _scaled_mm_v2"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "It needs a Hopper GPU, compute capability 9.0"
    return ""


def choose(spec: OpSpec, values: Values) -> Choice:
    """What a call runs with.

    Raises:
        ImportError, RuntimeError: a library was asked for that cannot be loaded, or does not run
            here.
        NotImplementedError: one that does not take the call.
    """
    impl, device = values.get("impl", AUTO), subject(values).device
    check_device(spec.name, impl, device)
    if impl != AUTO:
        check_limit(spec.name, spec.providers, impl, values)
        if impl in LIBRARIES:
            require(spec.name, impl)
        elif impl == TRITON and limits.no_triton():
            raise argument_error(
                spec.name,
                "impl",
                must=_RUNS_HERE,
                got=repr(impl),
                do="Install triton",
                kind=ImportError,
            )
        elif impl == SCALED_MM and (obstacle_here := scaled_mm_obstacle()):
            raise argument_error(
                spec.name,
                "impl",
                must=_RUNS_HERE,
                got=repr(impl),
                do=obstacle_here,
                kind=RuntimeError,
            )
        return Choice(impl, "asked for")
    if spec.providers == (REFERENCE,):
        return Choice(REFERENCE, "the op has no kernel")
    if device.type not in DEVICES:
        return Choice(REFERENCE, f"no kernel runs on {device.type}")
    if SCALED_MM in spec.providers and not _scaled_mm_faster_obstacle(spec.name, values):
        return Choice(SCALED_MM, f"faster from {SCALED_MM_TOKENS[spec.name]} tokens on")
    why = "no library runs this op"
    for library in spec.providers:
        if library in LIBRARIES:
            why = obstacle(spec.name, library, values)
            if not why:
                return Choice(library, "faster at these sizes on an H200")
    return own(spec, values, why)


_RUNS_HERE = "be one that runs here"


def own(spec: OpSpec, values: Values, why: str) -> Choice:
    """What a call on a GPU runs with where no library does, because of ``why``: our kernel, or the
    reference for what that does not take."""
    impl = ours(spec)
    if impl == TRITON and limits.no_triton():
        return Choice(REFERENCE, "triton is not installed")
    found = limit(spec.name, impl, values)
    if found is not None:
        return Choice(REFERENCE, f"{found.advice}: the call is {found.what}")
    return Choice(impl, why)


def ours(spec: OpSpec) -> str:
    """What runs an op on a GPU without any library."""
    return TRITON if TRITON in spec.providers else REFERENCE


def obstacle(op: str, library: str, values: Values) -> str:
    """Why ``impl="auto"`` does not take ``library``; empty if it does."""
    if values.get("plan") is not None:
        return "the plan is ours"
    if not _is_sized(values):
        return "sizes are symbols, and asking them would fix them"
    found = limit(op, library, values)
    if found is not None:
        return f"{found.advice}: the call is {found.what}"
    if not is_faster(op, library, values):
        return f"{library} was not faster at these sizes on an H200"
    return unusable(library) or _other_device(subject(values).device)


def _scaled_mm_faster_obstacle(op: str, values: Values) -> str:
    """Why ``impl="auto"`` does not take torch's block-wise product; empty if it does."""
    if op not in SCALED_MM_TOKENS:
        return "our kernel multiplies all groups at once"
    num_tokens = values["x"].shape[0]
    if not isinstance(num_tokens, int) or num_tokens < SCALED_MM_TOKENS[op]:
        return "it was not faster for so few tokens"
    found = scaled_mm_limit(values)
    return found.what if found is not None else scaled_mm_obstacle()


def _is_sized(values: Values) -> bool:
    """Whether the sizes that decide are no symbols."""
    return all(
        isinstance(size, int) for size in (subject(values).shape[0], values.get("num_rows", 0))
    )


def _other_device(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return "" if capability == (9, 0) else "nothing was measured on this GPU"


@functools.cache
def unusable(library: str) -> str:
    """Why ``library`` cannot run here; empty if it can. Loads it."""
    found = probe(library, load=True)
    return "" if found.usable else found.reason


def require(op: str, library: str) -> None:
    """``library`` runs here, and is loaded."""
    reason = unusable(library)
    if not reason:
        return
    found = libraries.find(library)
    raise argument_error(
        op,
        "impl",
        must=_RUNS_HERE,
        got=repr(library),
        do=f"{_NAMES[library]}: {reason.rstrip('.')}",
        kind=ImportError if isinstance(found, str) or "import failed" in reason else RuntimeError,
    )


def prepare(spec: OpSpec, values: Values) -> list[str]:
    """What must be known before compiled code is looked up in a cache: code that calls a library
    was made by a trace that loaded it, and the process that finds it in a cache has not. Libraries
    that such code may call, which are loaded.

    The fake of an op is the first to see a call that is compiled.
    """
    if torch.compiler.is_exporting() or subject(values).device.type not in DEVICES:
        return []
    impl = choose(spec, values).impl
    return [impl] if impl in LIBRARIES else []


def _either(words: Sequence[str]) -> str:
    quoted = [repr(word) for word in words]
    if len(quoted) == 1:
        return quoted[0]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
