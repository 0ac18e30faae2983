"""Registers, spills and shared memory of every kernel, from its cubin; needs no GPU.

Each launcher is called with meta tensors of typical sizes and a ``launch`` that takes the arguments
down instead of launching; what Triton would specialise on is then compiled for the architecture
asked for, and read with the ptxas that Triton brings.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.registry import OPS

_TYPES = {
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_USAGE = re.compile(
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


@dataclass(frozen=True)
class KernelReport:
    """What one kernel needs.

    Args:
        op: Op whose launcher launches it.
        kernel: Name of the kernel.
        warps: Warps per program.
        registers: Registers per thread.
        spills: Bytes stored to and loaded from spilled registers, per thread.
        shared: Bytes of shared memory per program.
    """

    op: str
    kernel: str
    warps: int
    registers: int
    spills: int
    shared: int


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _insert(width: int, cache: Tensor, **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    k, slots = _tensor(128, width, dtype=torch.bfloat16), _tensor(128, dtype=torch.int64)
    return (k, cache, slots), settings


def _gather(*first: Tensor, **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*first, _tensor(4), _tensor(4), _tensor(4, 160)), settings


def examples() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of a typical call of every op that has a kernel; "op, variant" for further ones."""
    main = MainLayout(64).allocate(1024, "meta")
    indexer = IndexerLayout(64).allocate(1024, "meta")
    plain = _tensor(1024, 64, 512, dtype=torch.bfloat16)
    out = _tensor(4, 8192, 512, dtype=torch.bfloat16)
    fp8 = {"block_size": 64, "layout": MainLayout.tag}
    pages_of_2 = MainLayout(2).allocate(1024, "meta")
    rows = {"num_rows": 8192, "offset": 0}
    keys = {"block_size": 64, "layout": IndexerLayout.tag}
    return {
        "quantize_and_insert_k_cache": _insert(512, main, **fp8),
        "quantize_and_insert_k_cache, C128": _insert(512, pages_of_2, **{**fp8, "block_size": 2}),
        "dequantize_and_gather_k_cache": _gather(out, main, offset=0, **fp8),
        "gather_k_cache": _gather(main, **rows, **fp8),
        "gather_k_cache, plain": _gather(plain, **rows, block_size=64, layout="plain"),
        "insert_k_cache": _insert(512, plain),
        "quantize_and_insert_indexer_k": _insert(128, indexer, **keys),
        "gather_indexer_k": ((indexer, _tensor(5), _tensor(4, 160)), {"num_rows": 8192, **keys}),
    }


def recorded(op: str, args: tuple[Any, ...], settings: dict[str, Any]) -> list[_Launch]:
    """The launches that the launcher of ``op`` makes."""
    launches: list[_Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: launches.append(_Launch(self.kernel, args, kwargs))

    launcher = getattr(importlib.import_module(f"dsv4_ops.kernels.{OPS[op].stem}"), op)
    launcher(Recorder, *args, **settings)
    return launches


def compiled(launch: _Launch, capability: int) -> Any:
    """The kernel as Triton compiles it for these arguments."""
    names, options = launch.kernel.arg_names, dict(launch.kwargs)
    values = dict(zip(names, launch.args, strict=False))
    constants = {name: options.pop(name) for name in names if name in options}
    signature, attributes = {}, {}
    for place, name in enumerate(names):
        value = values.get(name)
        is_tensor = isinstance(value, Tensor)
        if name in constants or (not is_tensor and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        wide = not is_tensor and value >= 2**31
        signature[name] = _TYPES[value.dtype] if is_tensor else "i64" if wide else "i32"
        if is_tensor or value % 16 == 0:
            attributes[place,] = [["tt.divisibility", 16]]
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launch.kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def report(capability: int = 90) -> list[KernelReport]:
    """Compile every kernel for a compute capability (90: H100 and H200) and read what it needs."""
    reports = []
    for name, (args, settings) in examples().items():
        for launch in recorded(name.partition(",")[0], args, settings):
            kernel = compiled(launch, capability)
            spills, registers = _usage(kernel, capability)
            reports.append(
                KernelReport(
                    op=name,
                    kernel=launch.kernel.__name__,
                    warps=launch.kwargs["num_warps"],
                    registers=registers,
                    spills=spills,
                    shared=kernel.metadata.shared,
                )
            )
    return reports


def _usage(kernel: Any, capability: int) -> tuple[int, int]:
    """Spilled bytes and registers per thread."""
    backends = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        done = subprocess.run(
            [backends / "ptxas", "-v", f"--gpu-name={architecture}", path, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    found = _USAGE.search(done.stderr)
    if found is None:
        raise RuntimeError(
            f"report: ptxas must state its usage, got {done.stderr!r}. Update triton."
        )
    return int(found[1]) + int(found[2]), int(found[3])


def table(reports: list[KernelReport]) -> str:
    """``reports`` in columns."""
    header = ("op", "kernel", "warps", "registers", "spill bytes", "shared bytes")
    rows = [
        (item.op, item.kernel, *map(str, (item.warps, item.registers, item.spills, item.shared)))
        for item in reports
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
    return "\n".join(lines)
