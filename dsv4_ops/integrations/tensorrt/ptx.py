"""PTX of our Triton kernels, with the parameters that TensorRT passes and no others."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from dsv4_ops.core.errors import argument_error

_SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""Fields of Triton's metadata with the sizes of two buffers, whose addresses are the last two
parameters of a kernel."""


class Kernel(NamedTuple):
    """A kernel of an AOT plugin.

    Args:
        name: Name of the entry.
        ptx: Source, whose parameters are the inputs, the integers and the outputs.
        threads: Threads per block.
        shared: Bytes of dynamic shared memory.
    """

    name: str
    ptx: str
    threads: int
    shared: int


def kernel_of(op: str, compiled: Any) -> Kernel:
    """Convert a kernel that Triton compiled to the form that TensorRT launches.

    Raises:
        NotImplementedError: the kernel needs scratch memory, which a plugin cannot provide.
    """
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    for size in _SCRATCH:
        if getattr(metadata, size, 0):
            raise argument_error(
                op,
                "kernel",
                must="need no scratch",
                got=f"{getattr(metadata, size)} bytes of {size.removesuffix('_size')}",
                do="Leave the op in a PyTorch segment",
                kind=NotImplementedError,
            )
    return Kernel(metadata.name, strip_scratch(op, ptx), metadata.num_warps * 32, metadata.shared)


def strip_scratch(op: str, ptx: str) -> str:
    """Return ``ptx`` without its last two parameters.

    Raises:
        NotImplementedError: the code reads one of these parameters.
    """
    entry = re.search(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", ptx, re.S)
    parameters = entry[2].split(",\n") if entry else []
    names = [parameter.split()[-1] for parameter in parameters]
    if entry is None or any(len(re.findall(rf"\b{name}\b", ptx)) > 1 for name in names[-2:]):
        raise argument_error(
            op,
            "kernel",
            must="leave its last two parameters unread",
            got="PTX that reads them",
            do="Leave the op in a PyTorch segment",
            kind=NotImplementedError,
        )
    return ptx[: entry.start(2)] + ",\n".join(parameters[:-2]) + ptx[entry.end(2) :]
