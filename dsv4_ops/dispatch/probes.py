"""Say which optional libraries are usable, and why others are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

import torch

from dsv4_ops.core.errors import install_extra
from dsv4_ops.dispatch import libraries


@dataclass(frozen=True)
class Provider:
    """An optional library on this machine.

    Args:
        name: Module name.
        extra: Extra of this package that installs it; empty for libraries that torch or vLLM
            installs.
        usable: Whether the library is installed, and this machine has the GPU that it needs.
        reason: Why it is usable or not, in one sentence.
        version: Installed version; None if unknown or not installed.
    """

    name: str
    extra: str
    usable: bool
    reason: str
    version: str | None


@dataclass(frozen=True)
class _Library:
    extra: str
    distributions: tuple[str, ...]
    capability: tuple[int, int] | None = None
    """Minimum compute capability of a library's CUDA device; None if the library needs no GPU."""


_ANY_GPU = (0, 0)
_LIBRARIES = {
    "triton": _Library("", ("triton", "pytorch-triton"), (8, 0)),
    "flash_mla": _Library("", ("flash_mla",), (9, 0)),
    "deep_gemm": _Library("", ("deep_gemm",), (9, 0)),
    "torch_tensorrt": _Library("tensorrt", ("torch-tensorrt",), _ANY_GPU),
    "transformers": _Library("transformers", ("transformers",)),
    "hypothesis": _Library("test", ("hypothesis",)),
}

NAMES = tuple(_LIBRARIES)
"""All optional libraries of this package."""


def probe(name: str, *, load: bool = False) -> Provider:
    """Say whether library ``name`` is usable; never raise for a name in ``NAMES``.

    Args:
        name: One of ``NAMES``.
        load: Whether to import the library, which takes time and detects broken installations.

    Returns:
        ``Provider``: whether the library is usable, and why.

    Raises:
        ValueError: ``name`` is unknown.
    """
    if name not in _LIBRARIES:
        raise ValueError(
            f"probe: name must be one of {', '.join(NAMES)}, got {name!r}. Correct the name."
        )
    library = _LIBRARIES[name]
    version = _version(library)
    missing, where = _missing(name, library)
    obstacle = _no_device(library) or (_broken(name) if load else "")
    if obstacle and where:
        obstacle = f"{obstacle} (found{where})"
    obstacle = missing or obstacle
    reason = obstacle or (f"imported{where}" if load else f"found{where}; not imported")
    return Provider(name, library.extra, not obstacle, reason, version)


def probe_all(*, load: bool = False) -> tuple[Provider, ...]:
    """Return ``probe`` of every library in ``NAMES``."""
    return tuple(probe(name, load=load) for name in NAMES)


def no_gpu_reason() -> str:
    """Say why torch sees no CUDA device; empty if it sees one."""
    try:
        if torch.cuda.is_available():
            return ""
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is a build without CUDA"
        torch.empty(0, device="cuda")
    except Exception as error:
        return str(error).strip().partition(". ")[0].partition("\n")[0] or repr(error)
    return "torch sees no CUDA device"


def _version(library: _Library) -> str | None:
    return next(filter(None, map(distribution_version, library.distributions)), None)


def distribution_version(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except Exception:
        return None


def _missing(name: str, library: _Library) -> tuple[str, str]:
    """Return why a library is missing, and where it was found; either may be empty."""
    try:
        if name in libraries.LIBRARIES:
            found = libraries.find(name)
            return (found, "") if isinstance(found, str) else ("", f": {found.where}")
        if importlib.util.find_spec(name) is not None:
            return "", ""
    except Exception as error:
        return f"looking for it failed: {_first_line(error)}", ""
    advice = f"; {install_extra(library.extra)}" if library.extra else ""
    return "not installed" + advice, ""


def _no_device(library: _Library) -> str:
    if library.capability is None:
        return ""
    reason = no_gpu_reason()
    if reason:
        return f"needs a CUDA device: {reason}"
    try:
        capability = torch.cuda.get_device_capability()
    except Exception as error:
        return f"asking for the compute capability failed: {_first_line(error)}"
    if capability >= library.capability:
        return ""
    needed, actual = (".".join(map(str, pair)) for pair in (library.capability, capability))
    return f"needs compute capability {needed} or later; this GPU has {actual}"


def _broken(name: str) -> str:
    try:
        libraries.load(name) if name in libraries.LIBRARIES else importlib.import_module(name)
    except Exception as error:  # torch_tensorrt raises plain Exception
        return f"import failed: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
