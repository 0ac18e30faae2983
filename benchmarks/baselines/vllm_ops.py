"""More files of vLLM 0.22.1 that a bundle may have: Triton kernels around attention, and the
extension with the query norm. ``benchmarks/README.md`` says how to add them."""

from __future__ import annotations

import importlib
import importlib.util
import lzma
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import vllm_metadata

KERNELS = "models/deepseek_v4/common/ops"
"""Folder of the Triton files, in a bundle's ``vllm_py`` and in a wheel's ``vllm``."""

EXTENSION = "_C.abi3.so"

_SCALE_BYTES = 16  # alignment of a column of scales in DeepGEMM
_libraries: list[Any] = []  # keeps the objects alive: an op lives as long as its library
_loaded: set[Path] = set()


def triton_file(folder: Path, name: str) -> Any:
    """Load a file of Triton kernels as a module; raise FileNotFoundError if the bundle lacks it."""
    path = folder / "vllm_py" / KERNELS / f"{name}.py"
    if not path.is_file():
        raise FileNotFoundError(f"no vllm_py/{KERNELS}/{name}.py in {folder.name}")
    vllm_metadata.library(folder).install_vllm_stubs()
    _fill_stubs()
    full = f"vllm.{KERNELS.replace('/', '.')}.{name}"
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def extension(folder: Path) -> Any:
    """Unpack vLLM's own extension and load its ops; raise FileNotFoundError if it is absent."""
    path = folder / EXTENSION
    packed = folder / f"{EXTENSION}.xz"
    if not path.is_file() and not packed.is_file():
        raise FileNotFoundError(f"no {EXTENSION} in {folder.name}")
    found = path if path.is_file() else packed
    if found.resolve() not in _loaded:
        vllm_metadata.library(folder).preload("libcudart.so.13")
        _load_library(found)
        _loaded.add(found.resolve())
    return torch.ops._C


def _load_library(path: Path) -> None:
    if path.suffix != ".xz":
        torch.ops.load_library(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder, EXTENSION)
        unpacked.write_bytes(lzma.decompress(path.read_bytes()))
        torch.ops.load_library(unpacked)  # the library stays mapped after the file is deleted


def _fill_stubs() -> None:
    """Add the functions that the files need to the bundle's stub modules."""
    ops: Any = importlib.import_module("vllm.utils.torch_utils")
    ops.direct_register_custom_op = _register
    scales: Any = importlib.import_module("vllm.utils.deep_gemm")
    scales.get_tma_aligned_size = _aligned


def _aligned(size: int, element_size: int) -> int:
    multiple = _SCALE_BYTES // element_size
    return -(-size // multiple) * multiple


def _register(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str] = (),
    fake_impl: Callable[..., Any] | None = None,
) -> None:
    """Define an op of vLLM that calls ``op_func``, unless an earlier bundle has defined the op."""
    if hasattr(torch.ops.vllm, op_name):
        return
    library = torch.library.Library("vllm", "FRAGMENT")
    _libraries.append(library)
    schema = torch.library.infer_schema(op_func, mutates_args=mutates_args)
    library.define(op_name + schema)
    library.impl(op_name, op_func, "CompositeExplicitAutograd")
