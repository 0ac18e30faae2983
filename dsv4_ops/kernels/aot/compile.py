"""A kernel as a binary for one architecture, compiled for what is known of its arguments; needs no
GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import ASTSource

from dsv4_ops.kernels.common.triton_compat import FUSION, GluonASTSource, GPUTarget

_MULTIPLE = 16
"""Bytes of an address, or a number, that what Triton is told of them is a multiple of."""

_TYPES = {
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Argument(NamedTuple):
    """What the compiler is told of an argument.

    Args:
        type: Its type in a signature.
        multiple: Whether it is a multiple of 16, an address of 16 bytes.
    """

    type: str
    multiple: bool = False

    @classmethod
    def tensor(cls, dtype: torch.dtype, aligned: bool = True) -> Argument:
        """An address."""
        return cls(_TYPES[dtype], aligned)

    @classmethod
    def number(cls, value: float) -> Argument:
        """A number that stays what it is, but is no constant: Triton's own launches tell the
        compiler as much of one. Inductor passes what is no integer as a float64."""
        if isinstance(value, float):
            return cls("fp64")
        return cls("i64" if value >= 2**31 else "i32", value % _MULTIPLE == 0)


def compiled(
    kernel: Any, arguments: Sequence[Argument | int], options: dict[str, Any], capability: int
) -> Any:
    """The kernel as Triton compiles it.

    Args:
        kernel: In Triton or Gluon.
        arguments: In its order; of a constant the value.
        options: The constants that have names, and options such as ``num_warps``.
        capability: Such as 90.

    Returns:
        Triton's ``CompiledKernel``. Constants are not among its parameters.
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
