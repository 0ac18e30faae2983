"""Compile a kernel for one architecture and for properties of its arguments, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import ASTSource

from dsv4_ops.kernels.common.triton_compat import FUSION, GluonASTSource, GPUTarget

_MULTIPLE = 16
"""Triton specialises a kernel for addresses and numbers that are multiples of this number."""

_TYPES = {
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Argument(NamedTuple):
    """Properties of an argument that a compiled kernel relies on.

    Args:
        type: The argument's type in Triton's signature.
        multiple: Whether the number, or the address in bytes, is a multiple of 16.
    """

    type: str
    multiple: bool = False

    @classmethod
    def tensor(cls, dtype: torch.dtype, aligned: bool = True) -> Argument:
        """Return the properties of a tensor; ``aligned``: whether its address is a multiple of
        16 bytes."""
        return cls(_TYPES[dtype], aligned)

    @classmethod
    def number(cls, value: float) -> Argument:
        """Return the properties of a number that stays a parameter of the kernel. An integer gets
        the type that Triton's launches give it; a float gets float64, as Inductor passes it."""
        if isinstance(value, float):
            return cls("fp64")
        return cls("i64" if value >= 2**31 else "i32", value % _MULTIPLE == 0)


def compiled(
    kernel: Any, arguments: Sequence[Argument | int], options: dict[str, Any], capability: int
) -> Any:
    """Compile a kernel.

    Args:
        kernel: A Triton or Gluon kernel.
        arguments: The kernel's positional arguments; a constant is passed as its value.
        options: Constants by name, and options such as ``num_warps``.
        capability: Compute capability, such as 90.

    Returns:
        Triton's ``CompiledKernel``. Constants are not parameters of the compiled kernel.
    """
    names, options = kernel.arg_names, {**FUSION, **options}
    constants = {name: options.pop(name) for name in names if name in options}
    signature, attributes = {}, {}
    for index, (name, argument) in enumerate(zip(names, arguments, strict=False)):
        if not isinstance(argument, Argument):
            constants[name] = argument
            continue
        signature[name] = argument.type
        if argument.multiple:
            attributes[index,] = [["tt.divisibility", _MULTIPLE]]
    signature = {name: signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
