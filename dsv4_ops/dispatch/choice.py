"""Select the implementation of a call: the one that ``impl=`` names, or the fastest.

Only this module selects; launchers run what was selected. An explicit ``impl`` runs or raises;
nothing replaces it. ``impl="auto"`` selects an installed library at the sizes at which the library
was faster on an H200 (``is_faster``). Otherwise "auto" selects our kernels, or the reference if our
kernels do not support the call (``dispatch/limits.py``). With dynamic shapes, "auto" selects no
library, because reading a symbolic size would add a guard.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.registry import AUTO, REFERENCE, TRITON, OpSpec
from dsv4_ops.core.target import HOPPER, capability_of
from dsv4_ops.dispatch import libraries, limits
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES, SCALED_MM
from dsv4_ops.dispatch.limits import (
    FLASH_MLA_HEADS as FLASH_MLA_HEADS,
    Values,
    limit,
    scaled_mm_limit,
)
from dsv4_ops.dispatch.probes import probe

IMPLS = (AUTO, TRITON, FLASH_MLA, DEEP_GEMM, REFERENCE)

DEVICES = ("cuda",)
"""Device types that kernels and libraries run on."""

_NAMES = {FLASH_MLA: "FlashMLA", DEEP_GEMM: "DeepGEMM"}

SCALED_MM_TOKENS = {"fp8_linear": 128}
"""Minimum number of tokens at which ``impl="auto"`` selects torch's block-scaled FP8 matmul.

The grouped linear is not listed, because torch's matmul needs a call for each group: ``o_a`` with
1024 tokens (quantised input, eager) takes 196 us, and 81 us with our kernel."""

SCALED_MM_FROM = {
    op: f"at least {least} tokens of FP8 activations, if their number is not symbolic"
    for op, least in SCALED_MM_TOKENS.items()
}
"""``SCALED_MM_TOKENS`` in words."""
FASTER_LIBRARY = ("indexer_logits", DEEP_GEMM)
"""The op and the library that ``impl="auto"`` selects at the sizes of ``is_faster``."""

MEASURED = (
    "64 heads, at least 32 tokens and 2048 columns, and 2^20 to 2^23 logits "
    "(32 x 32768: 32.2 us, our kernel 36.7)"
)
"""The sizes of ``is_faster`` in words. ``python -m benchmarks.choice`` measured the times on an
H200 on 2026-11-22, with torch 2.11.0+cu130 and the DeepGEMM of vLLM 0.22.1, in CUDA graphs over
rotating inputs."""

NOT_SELECTED = {
    ("mla_decode", FLASH_MLA): "it was up to 9 % faster from 32 x 128k and 128 x 32k rows on, and "
    "slower otherwise",
    (
        "mla_sparse",
        FLASH_MLA,
    ): "on an H100 its kernels were up to 15 % faster from 32 tokens of 128 "
    "heads on; calls of them were not timed",
    ("indexer_select", DEEP_GEMM): "it was faster at no size with the top 512; larger selections "
    "were not timed",
}
"""Why "auto" never selects a library for an op, if not because the library was not faster."""


def is_faster(op: str, library: str, values: Values) -> bool:
    """Whether ``library`` is faster than our kernels for this call, as measured on an H200."""
    if (op, library) != FASTER_LIBRARY:
        return False
    (tokens, heads, _), columns = values["q"].shape, values["num_rows"]
    large_enough = tokens >= 32 and columns >= 2048
    return bool(heads == 64 and large_enough and 2**20 <= tokens * columns <= 2**23)


def subject(values: Values) -> Tensor:
    """Return the tensor whose device and sizes decide the selection: ``q``, ``x``, or the first
    tensor."""
    tensors = (each for each in values.values() if isinstance(each, Tensor))
    named: Tensor | None = values.get("q", values.get("x"))
    return next(tensors) if named is None else named


class Choice(NamedTuple):
    """An implementation, and why it runs; see ``dsv4_ops.dispatch.providers.choice_of``."""

    impl: str
    reason: str


def check_impl(
    op: str, providers: Sequence[str], impl: str, device: torch.device, values: Values
) -> None:
    """Raise if the op has no such ``impl``, or if ``impl`` does not support this call or device.

    Whether the library is installed is checked later: when the op runs or is compiled.
    """
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
    """Raise if ``impl`` does not support this call.

    An op calls this function when the op runs, because the sizes of an exported program are unknown
    before. Layers call this function before they write anything, and pass their name as
    ``asked_by``. ``values`` may hold ``Sizes`` instead of tensors.
    """
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
    """Return ``impl`` if this op has it, else "auto". A layer has one ``impl`` for several ops."""
    return impl if impl in providers else AUTO


def check_device(op: str, impl: str, device: torch.device) -> None:
    """Raise if ``impl`` does not run on this type of device."""
    if impl not in (AUTO, REFERENCE) and device.type not in DEVICES:
        raise argument_error(
            op,
            "impl",
            must=f"be {_either((AUTO, REFERENCE))} on {device.type}",
            got=repr(impl),
            do="Move the tensors to a CUDA device",
            kind=RuntimeError,
        )


@functools.cache
def scaled_mm_obstacle() -> str:
    """Say why torch's block-scaled matmul does not run here; empty if it runs."""
    if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return "This torch has no _scaled_mm_v2"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return "It needs a Hopper GPU, compute capability 9.0"
    return ""


def choose(spec: OpSpec, values: Values) -> Choice:
    """Select the implementation of a call.

    Raises:
        ImportError, RuntimeError: ``impl`` names a library that cannot be loaded, or does not run
            on this device.
        NotImplementedError: ``impl`` does not support this call.
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
    """Select our kernel, or the reference if our kernel does not support the call.

    ``why`` says why no library runs the call.
    """
    impl = ours(spec)
    if impl == TRITON and limits.no_triton():
        return Choice(REFERENCE, "triton is not installed")
    found = limit(spec.name, impl, values)
    if found is not None:
        return Choice(REFERENCE, f"{found.advice}: the call is {found.what}")
    return Choice(impl, why)


def ours(spec: OpSpec) -> str:
    """Return the implementation of an op on a GPU if no library runs the op."""
    return TRITON if TRITON in spec.providers else REFERENCE


def obstacle(op: str, library: str, values: Values) -> str:
    """Say why ``impl="auto"`` does not select ``library``; empty if "auto" selects it."""
    if values.get("plan") is not None:
        return "the plan is ours"
    if not _is_sized(values):
        return "sizes are symbolic, and reading them would add guards"
    found = limit(op, library, values)
    if found is not None:
        return f"{found.advice}: the call is {found.what}"
    if not is_faster(op, library, values):
        never = NOT_SELECTED.get((op, library))
        return never or f"{library} was not faster at these sizes on an H200"
    return unusable(library) or _other_device(subject(values).device)


def _scaled_mm_faster_obstacle(op: str, values: Values) -> str:
    """Say why "auto" does not select torch's block-scaled matmul; empty if "auto" selects it."""
    if op not in SCALED_MM_TOKENS:
        return "our kernel multiplies all groups at once"
    num_tokens = values["x"].shape[0]
    if not isinstance(num_tokens, int) or num_tokens < SCALED_MM_TOKENS[op]:
        return "it was not faster for so few tokens"
    found = scaled_mm_limit(values)
    return found.what if found is not None else scaled_mm_obstacle()


def _is_sized(values: Values) -> bool:
    """Whether the sizes that the selection reads are ints, not symbols."""
    return all(
        isinstance(size, int) for size in (subject(values).shape[0], values.get("num_rows", 0))
    )


def _other_device(device: torch.device) -> str:
    return "" if capability_of(device) == HOPPER else "nothing was measured on this GPU"


@functools.cache
def unusable(library: str) -> str:
    """Load ``library``, and say why it does not run here; empty if it runs."""
    found = probe(library, load=True)
    return "" if found.usable else found.reason


def require(op: str, library: str) -> None:
    """Load ``library``; raise if it does not run here."""
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
    """Return the libraries that the compiled code of a call may need.

    If the compiled code comes from a cache, this process has traced nothing and loaded no library.
    So the fake of the op, which sees every compiled call first, asks for the libraries.
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
