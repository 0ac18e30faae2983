"""Find FlashMLA and DeepGEMM on this machine, and load them once, at their first use."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config as compiler_config

from dsv4_ops.core.torch_compat import find_schema

FLASH_MLA, DEEP_GEMM = "flash_mla", "deep_gemm"
LIBRARIES = (FLASH_MLA, DEEP_GEMM)
SCALED_MM = "scaled_mm"
"""torch's own block-scaled matmul, which is part of torch and need not be found or loaded."""

VARIABLES = {FLASH_MLA: "DSV4_OPS_FLASH_MLA", DEEP_GEMM: "DSV4_OPS_DEEP_GEMM"}
"""Environment variable with the path of each library. If it is set, no other path is tried."""

FLASH_MLA_OPS = "_flashmla_C"
"""Namespace of the ops that vLLM's build of FlashMLA registers."""

_BUILD = "_flashmla_C*.so"
_DECODE = f"{FLASH_MLA_OPS}::sparse_decode_fwd"


@dataclass(frozen=True)
class Found:
    """A library on this machine.

    Args:
        where: Where the library is; completes "found ...".
        load: Loads the library, and returns the module or ops that the adapters call. Raises if
            the library cannot be loaded.
    """

    where: str
    load: Callable[[], Any]


def find(name: str) -> Found | str:
    """Find the library ``name``, or say why there is none; import nothing."""
    variable = VARIABLES[name]
    given = os.environ.get(variable)
    find_one = _find_flash_mla if name == FLASH_MLA else _find_deep_gemm
    found = find_one(given)
    if found is not None:
        return found
    if given:
        wanted = "a library" if name == FLASH_MLA else "a folder with deep_gemm"
        return f"{variable} names no such thing as {wanted}: {given}"
    return f"not installed: install vLLM, which has a build, or name a path in {variable}"


@functools.cache
def find_name(name: str) -> str:
    """Return the result of ``find`` in words; "none" if there is no library."""
    found = find(name)
    return "none" if isinstance(found, str) else found.where


_TAG = "dsv4_ops_libraries="
"""Prefix of the part of Inductor's cache keys that names the libraries."""


def tag_libraries() -> None:
    """Add the installed libraries to the keys of torch's caches.

    A trace may select a library, but the graph that the caches look up does not name the library.
    The package calls this function at its own import, and before it loads a library that was not
    installed at that time.
    """
    found = {name: find_name(name) for name in LIBRARIES}
    state = ",".join(f"{name}:{place}" for name, place in found.items() if place != "none")
    present = compiler_config.cache_key_tag.split(";")
    kept = [each for each in present if each and not each.startswith(_TAG)]
    # without a library, the keys stay as they are
    wanted = [*kept, _TAG + state] if state else kept
    if present != wanted:
        compiler_config.cache_key_tag = ";".join(wanted)


@functools.cache
def load(name: str) -> Any:
    """Load the library ``name``.

    Raises:
        ImportError: the library is not installed. Other errors of the import are not converted.
    """
    found = find(name)
    if isinstance(found, str):
        raise ImportError(found)
    if find_name(name) == "none":
        find_name.cache_clear()
        tag_libraries()
    return found.load()


def _find_flash_mla(given: str | None) -> Found | None:
    if find_schema(_DECODE):
        return Found(f"ops {FLASH_MLA_OPS}, which this process has loaded", _flash_mla_ops)
    if given:
        path = Path(given)
        return _build(path) if path.is_file() else None
    if _spec(FLASH_MLA) is not None:
        return Found("module flash_mla", lambda: importlib.import_module(FLASH_MLA))
    for folder in _vllm_folders():
        for path in sorted(folder.glob(_BUILD)):
            return _build(path)
    return None


def _build(path: Path) -> Found:
    return Found(str(path), lambda: _load_build(path))


def _load_build(path: Path) -> Any:
    torch.ops.load_library(str(path))
    if not find_schema(_DECODE):
        raise ImportError(f"{path} registers no op {_DECODE}")
    return _flash_mla_ops()


def _flash_mla_ops() -> Any:
    return getattr(torch.ops, FLASH_MLA_OPS)


def _find_deep_gemm(given: str | None) -> Found | None:
    if DEEP_GEMM in sys.modules:
        return Found("module deep_gemm, which is imported", lambda: sys.modules[DEEP_GEMM])
    if given:
        inside = (Path(given), Path(given) / DEEP_GEMM, Path(given) / "third_party" / DEEP_GEMM)
        folders = [folder for folder in inside if folder.name == DEEP_GEMM]
    elif _spec(DEEP_GEMM) is not None:
        return Found("module deep_gemm", _import_deep_gemm)
    else:
        folders = [folder / "third_party" / DEEP_GEMM for folder in _vllm_folders()]
    for folder in folders:
        if (folder / "__init__.py").is_file():
            return Found(str(folder), functools.partial(_import_deep_gemm, folder))
    return None


def _import_deep_gemm(folder: Path | None = None) -> Any:
    """Import ``deep_gemm``: from ``folder`` and without parent packages, or as Python finds it."""
    _preload("libnvrtc.so.13", "libnvrtc.so.12")  # importing torch does not load libnvrtc
    if folder is None:
        return importlib.import_module(DEEP_GEMM)
    spec = importlib.util.spec_from_file_location(
        DEEP_GEMM, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[DEEP_GEMM] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[DEEP_GEMM]
        raise
    return module


def _preload(*sonames: str) -> None:
    """Load the first shared library of ``sonames`` that exists, on the system or in NVIDIA's
    packages."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    for soname in sonames:
        inside = [str(path) for folder in folders for path in folder.glob(f"*/lib/{soname}")]
        for path in (*inside, soname):
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError:  # try the next one
                continue
            return


def _vllm_folders() -> list[Path]:
    """Return the folders where vLLM is installed, without importing vLLM."""
    spec = _spec("vllm")
    locations = [] if spec is None else getattr(spec, "submodule_search_locations", None)
    return [Path(folder) for folder in locations or ()]


def _spec(name: str) -> Any:
    """Return the spec of a module; None if Python finds none."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
