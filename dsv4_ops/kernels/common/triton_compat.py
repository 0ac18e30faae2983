"""Names of Triton and Gluon that differ between the releases 3.6 to 3.9.

Each entry says which releases have it. ``tests/kernels/test_compat.py`` checks that the installed
release has all entries.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from base64 import b32encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy

__all__ = [
    "EMULATE",
    "FUSION",
    "INTERPRETED",
    "GPUTarget",
    "GluonASTSource",
    "Scalar",
    "aggregate",
    "async_load",
    "cache_folder",
    "compiled_folders",
    "forget_ptxas",
    "is_compiled",
    "name_alike",
    "ptxas",
    "reinterpret",
    "takes_options_in_graphs",
    "version",
]

FUSION = {"enable_fp_fusion": True}
"""Option of every kernel: ``a * b + c`` may become one FMA. This is the default up to Triton 3.9,
which warns that 3.10 changes the default. Our published times were measured with this option, and
the bits of results depend on it."""

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, under TRITON_INTERPRET=1 (3.6 to 3.9)."""

EMULATE = tl.constexpr(INTERPRETED)
"""``INTERPRETED`` as a constant for kernels. If set, kernels compute with integers what the
interpreter gets wrong, such as the e4m3 cast."""

# 3.6 and 3.7 have only async_copy_global_to_shared; 3.8 has both names; in 3.9 the old name raises
async_load = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)


@builtin  # type: ignore[untyped-decorator]  # Gluon has no types
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Read shared memory as another dtype, shape and layout.

    The descriptor's method is ``_reinterpret`` in 3.6 to 3.8, ``reinterpret`` since 3.9.
    """
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


Scalar = tl.tensor | tl.constexpr
"""Type of an aggregate's field that holds a number, a pointer or a tensor. Triton passes None and 1
as constants."""


def aggregate(cls: Any) -> Any:
    """Make a class of named values, which kernels create and pass as one argument. Each field is
    annotated with its type.

    Triton has ``gluon.aggregate`` since 3.8. In 3.6 and 3.7, ``_aggregate`` adds no list of the
    fields, and no constructor that takes the fields in order or by name. This function adds the
    list and the constructor. In these releases, the order of fields does not change the names of
    compiled kernels.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    names = tuple(cls.__annotations__)

    def init(self: Any, *args: Any, **fields: Any) -> None:
        fields |= zip(names, args, strict=False)
        if len(args) > len(names) or set(fields) != set(names):
            raise TypeError(f"{cls.__name__} takes {', '.join(names)}, got {', '.join(fields)}")
        for name in names:
            value = fields[name]
            is_value = isinstance(value, tl.core.base_value)
            setattr(self, name, value if is_value else tl.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # so that no kernel hashes it
    cls.__init__ = init
    made = tl.core._aggregate(cls)
    made.__aggregate_fields__ = names
    return made


def version() -> tuple[int, int]:
    """Return the installed Triton's version, such as (3, 9)."""
    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def ptxas(capability: int) -> str:
    """Return the path of the ptxas that Triton uses for a compute capability, such as 90.

    ``get_ptxas(arch)``: 3.6 to 3.9. Since 3.9, a wheel has several ptxas, for older and newer GPUs.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(capability).path)


def forget_ptxas() -> None:
    """Make Triton read the version of ptxas again; names of Triton's cache files depend on the
    version.

    ``get_ptxas_version``, which caches the version: 3.6 to 3.9.
    """
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()


def cache_folder() -> str:
    """Return the folder of compiled kernels. ``knobs.cache.dir``: 3.6 to 3.9."""
    return str(knobs.cache.dir)


_NAMING = threading.Lock()


def name_alike(kernel: Any) -> Any:
    """Give a kernel the cache key that it has in other processes, and return the kernel. The name
    of a file in Triton's cache depends on the cache key.

    Up to Triton 3.8, a kernel's cache key lacks the constants of called functions that have no
    cache key yet. So the cache key would depend on the kernels that ran before. This function
    computes the cache keys of called functions first, as 3.9 does.
    ``DependenciesFinder._update_hash``: 3.6 to 3.9.
    """
    if version() >= (3, 9) or getattr(kernel, "hash", "") is not None:
        return kernel
    from triton.runtime.jit import DependenciesFinder

    with _NAMING:
        before = DependenciesFinder._update_hash

        def update(self: Any, function: Any) -> None:
            _ = function.cache_key
            before(self, function)

        DependenciesFinder._update_hash = update
        try:
            _ = kernel.cache_key
        finally:
            DependenciesFinder._update_hash = before
    return kernel


def is_compiled(source: Any, target: GPUTarget, options: Any) -> bool:
    """Return whether Triton's cache folder has the binary of a kernel.

    ``triton.compiler.compile`` begins with these steps: 3.6 to 3.9.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    options = backend.parse_options(options.__dict__ | source.parse_options())
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    name = f"{source.name[:150]}.json"
    files = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(name)
    return name in (files or {})


def compiled_folders(functions: Iterable[Any]) -> list[Path]:
    """Return the folders in Triton's cache that hold this process's binaries of ``functions``, and
    all folders that hold launchers.

    Triton 3.6 to 3.9 have ``JITFunction.device_caches``, and name the folders in this way.
    """
    roots = {Path(knobs.cache.dir), Path(knobs.cache.get_triton_dir("cache"))}
    names = set()
    for function in functions:
        if isinstance(function, triton.JITFunction):
            for kernels, *_ in getattr(function, "device_caches", {}).values():
                names |= {_name(each.hash) for each in kernels.values()}
    folders = {root / name for root in roots for name in names if (root / name).is_dir()}
    folders |= {path.parent for root in roots for path in root.glob("*/*.so")}
    return sorted(folders)


def _name(kernel_hash: str) -> str:
    return b32encode(bytes.fromhex(kernel_hash)).decode().rstrip("=")


@functools.cache
def takes_options_in_graphs() -> bool:
    """Return whether a traced launch may pass options of the backend as keyword arguments.

    True since torch 2.14. Older torch refuses such options, but comes with Triton 3.7 or older,
    which fuses by default.
    """
    from torch._higher_order_ops.triton_kernel_wrap import TritonKernelWrapperMutation

    return "launch_kwargs" in inspect.signature(TritonKernelWrapperMutation.__call__).parameters
