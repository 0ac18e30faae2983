"""Tensors of an emulated Gluon kernel: numpy arrays with Triton's types, pointers into buffers with
checked accesses, and functions of ``gl`` over tensors. bf16 values are stored as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

Number = (int, float, np.number)
"""Types of values that are not tensors; ``isinstance`` with ``numbers.Number`` is slower."""

_STORAGE: dict[str, np.dtype[Any]] = {
    "int1": np.dtype(np.bool_), "int8": np.dtype(np.int8), "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16), "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64), "fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16),
    "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64),
}  # fmt: skip
_COMPUTED = {**_STORAGE, "bf16": _STORAGE["fp32"]}
_ADDRESS = _STORAGE["int64"]


class EmulationError(Exception):
    """The kernel has an error."""


def storage(dtype: Any) -> Any:
    """Return the numpy type of a value in memory."""
    return _STORAGE[dtype.name]


def _numbers(dtype: Any) -> Any:
    """Return the numpy type of computations with ``dtype``, or of an address."""
    return _COMPUTED.get(dtype.name, _ADDRESS)


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 values to nearest even; return bf16 bits as uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bf16 bits in uint16."""
    return np.ascontiguousarray(bits.astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


class Typed:
    """Attributes that kernels read from all tensors: a type, and some layout."""

    @property
    def type(self) -> Any:
        return self

    @property
    def layout(self) -> str:
        return "layout"


def _quotient(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Divide towards zero, as in C."""
    if not np.all(right):
        raise EmulationError("division by zero")
    rest = np.fmod(left, right)
    return (left - rest) // right


def _remainder(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if not np.all(right):
        raise EmulationError("division by zero")
    return np.fmod(left, right)


def _operators(operation: Any, dtype: Any = None) -> tuple[Any, Any]:
    """Return the operator's methods, for a tensor on its left and on its right."""
    return (
        lambda left, right: _binary(operation, left, right, dtype),
        lambda right, left: _binary(operation, left, right, dtype),
    )


class Value(Typed):
    """A tensor, or a scalar without dimensions. Pointers may access only ``buffers``."""

    def __init__(self, data: Any, dtype: Any, buffers: tuple[Any, ...] = ()) -> None:
        self.data = np.asarray(data)
        self.dtype = dtype
        self.buffers = buffers
        assert self.data.dtype == _numbers(dtype), (self.data.dtype, dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape} {self.data}"

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise EmulationError("a branch needs a scalar")
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __getitem__(self, places: Any) -> Value:
        places = places if isinstance(places, tuple) else (places,)
        assert all(place is None or place == slice(None) for place in places)
        assert sum(place is not None for place in places) == self.data.ndim
        return self.like(self.data[places])

    def like(self, data: Any) -> Value:
        return Value(data, self.dtype, self.buffers)

    def bits(self) -> np.ndarray:
        """Return the values as their bits in memory."""
        return rounded_to_bf16(self.data) if self.dtype == gl.bfloat16 else self.data

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if self.dtype.is_ptr() or dtype.is_ptr():
            assert bitcast, "pointers are cast by their bits"
            return Value(self.data, dtype, self.buffers)
        if bitcast:
            assert self.dtype.primitive_bitwidth == dtype.primitive_bitwidth
            bits = np.ascontiguousarray(self.bits()).reshape(self.data.shape)
            return from_bits(bits.view(storage(dtype)), dtype)
        if dtype.name == "bf16":
            return from_bits(rounded_to_bf16(self.data.astype(np.float32)), dtype)
        return Value(self.data.astype(_numbers(dtype)), dtype)

    def __add__(self, other: Any) -> Value:
        return _sum(np.add, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Value:
        return _sum(np.subtract, self, other)

    def __rsub__(self, other: Any) -> Value:
        return _binary(np.subtract, other, self)

    def __neg__(self) -> Value:
        return 0 - self  # as in Triton

    def __truediv__(self, other: Any) -> Value:
        return _binary(np.divide, *_floats(self, other))

    def __rtruediv__(self, other: Any) -> Value:
        return _binary(np.divide, *_floats(other, self))

    def __invert__(self) -> Value:
        return self.like(~self.data)

    __mul__, __rmul__ = _operators(np.multiply)
    __floordiv__, __rfloordiv__ = _operators(_quotient)
    __mod__, __rmod__ = _operators(_remainder)
    __and__, __rand__ = _operators(np.bitwise_and)
    __or__, __ror__ = _operators(np.bitwise_or)
    __xor__, __rxor__ = _operators(np.bitwise_xor)
    __lshift__, __rlshift__ = _operators(np.left_shift)
    __rshift__, __rrshift__ = _operators(np.right_shift)
    __lt__, __gt__ = _operators(np.less, gl.int1)
    __le__, __ge__ = _operators(np.less_equal, gl.int1)
    __eq__ = _operators(np.equal, gl.int1)[0]  # type: ignore[assignment] # returns a tensor
    __ne__ = _operators(np.not_equal, gl.int1)[0]  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment] # __eq__ makes tensors


def from_bits(bits: np.ndarray, dtype: Any) -> Value:
    return Value(widened(bits) if dtype.name == "bf16" else bits, dtype)


def tensor(value: Any) -> Value:
    """Convert a Python number to a tensor as Triton does."""
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return Value(np.bool_(value), gl.int1)
    if isinstance(value, int):
        dtype = gl.int32 if -(2**31) <= value < 2**31 else gl.int64
        return Value(np.asarray(value, _numbers(dtype)), dtype)
    return Value(np.float32(value), gl.float32)


def _kind(dtype: Any) -> int:
    return 2 if dtype.is_floating() else 1 if dtype != gl.int1 else 0


def _common(left: Any, right: Any) -> Any:
    """Return the result type of two operands; a Python number takes the tensor's type."""
    if isinstance(left, Value) and isinstance(right, Value) and left.dtype is right.dtype:
        return left.dtype
    types = [tensor(operand).dtype for operand in (left, right)]
    weak = [isinstance(operand, Number) for operand in (left, right)]
    if weak[0] != weak[1] and _kind(types[weak[1]]) <= _kind(types[weak[0]]):
        return types[weak[0]]
    if types[0] == types[1]:
        return types[0]
    floats = [dtype for dtype in types if dtype.is_floating()]
    if floats:
        widest = max(floats, key=lambda dtype: dtype.primitive_bitwidth)
        mixed = len(floats) == 2 and floats[0] != floats[1] and widest.primitive_bitwidth == 16
        return gl.float32 if mixed else widest
    # the wider type; of two types of one width, the unsigned type
    return max(types, key=lambda dtype: (dtype.primitive_bitwidth, dtype.is_int_unsigned()))


def as_type(operand: Any, dtype: Any) -> np.ndarray:
    """Return the data of a tensor or a number as ``dtype``."""
    if isinstance(operand, Number):
        return np.asarray(operand, _numbers(dtype))  # raises if the number does not fit
    if operand.dtype is dtype or operand.dtype == dtype:
        return operand.data
    return operand.to(dtype).data


def _aligned(*operands: np.ndarray) -> None:
    ranks = {operand.ndim for operand in operands} - {0}
    if len(ranks) > 1:
        raise EmulationError(f"shapes of several ranks: {[part.shape for part in operands]}")


def _binary(operation: Any, left: Any, right: Any, dtype: Any = None) -> Value:
    common = _common(left, right)
    operands = as_type(left, common), as_type(right, common)
    _aligned(*operands)
    result = operation(*operands)
    if dtype is None and common.name == "bf16":
        return from_bits(rounded_to_bf16(result), common)
    return Value(result, dtype or common)


def _floats(left: Any, right: Any) -> tuple[Any, Any]:
    if _common(left, right).is_floating():
        return left, right
    return tensor(left).to(gl.float32), tensor(right).to(gl.float32)


def _sum(operation: Any, left: Value, right: Any) -> Value:
    """Add two operands; a pointer plus a number of values is an address."""
    if isinstance(right, Value) and right.dtype.is_ptr():
        left, right = right, left
    if not left.dtype.is_ptr():
        return _binary(operation, left, right)
    steps = tensor(right)
    assert not steps.dtype.is_floating()
    _aligned(left.data, steps.data)
    size = left.dtype.element_ty.primitive_bitwidth // 8
    return left.like(operation(left.data, steps.data.astype(np.int64) * size))


def where(condition: Any, left: Any, right: Any) -> Value:
    condition = tensor(condition)
    assert condition.dtype == gl.int1
    chosen = (left, right) if condition.data.ndim else (left if condition else right,) * 2
    if isinstance(left, Value) and left.dtype.is_ptr():
        assert left.dtype == right.dtype
        buffers = tuple(dict.fromkeys(chosen[0].buffers + chosen[1].buffers))
        return Value(np.where(condition.data, left.data, right.data), left.dtype, buffers)
    if isinstance(left, Number) and isinstance(right, Number):
        left, right = tensor(left), tensor(right)
    common = _common(left, right)
    parts = as_type(left, common), as_type(right, common)
    _aligned(condition.data, *parts)
    return Value(np.where(condition.data, *parts), common)


def maximum(left: Any, right: Any) -> Value:
    return _binary(np.fmax, tensor(left) if isinstance(right, Number) else left, right)


def minimum(left: Any, right: Any) -> Value:
    return _binary(np.fmin, tensor(left) if isinstance(right, Number) else left, right)


def amax(values: Value, axis: int | None = None) -> Value:
    """Return the maximum without NaN."""
    with np.errstate(all="ignore"):
        return values.like(np.fmax.reduce(values.data, axis=axis))


def smallest(values: Value, axis: int | None = None) -> Value:
    with np.errstate(all="ignore"):
        return values.like(np.fmin.reduce(values.data, axis=axis))


def total(values: Value, axis: int | None = None) -> Value:
    with np.errstate(all="ignore"):
        summed = np.sum(values.data, axis=axis, dtype=values.data.dtype)
    return values.like(summed)


def elementwise(function: Any) -> Any:
    def apply(values: Value) -> Value:
        with np.errstate(all="ignore"):
            return values.like(function(values.data).astype(values.data.dtype))

    return apply


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    made = Value(as_type(value, dtype), dtype)
    return made.like(np.broadcast_to(made.data, tuple(shape)))


def arange(start: int, stop: int, layout: Any = None) -> Value:
    count = stop - start
    if count <= 0 or count & (count - 1):
        raise EmulationError(f"{count} values are no power of two")
    return Value(np.arange(start, stop, dtype=np.int32), gl.int32)


def reshape(values: Value, *shape: Any) -> Value:
    return values.like(values.data.reshape(_flat(shape)))


def permute(values: Value, *order: Any) -> Value:
    return values.like(values.data.transpose(_flat(order)))


def _flat(numbers: Any) -> tuple[int, ...]:
    return tuple(numbers[0]) if isinstance(numbers[0], list | tuple) else tuple(numbers)


def join(left: Value, right: Value) -> Value:
    assert left.dtype == right.dtype
    return left.like(np.stack([left.data, right.data], -1))


def split(values: Value) -> tuple[Value, Value]:
    assert values.shape[-1] == 2
    return values.like(values.data[..., 0]), values.like(values.data[..., 1])


def expand_dims(values: Value, axis: int) -> Value:
    return values.like(np.expand_dims(values.data, axis))


def convert_layout(values: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return values


def scanned(values: Value, axis: int, combine: Any) -> Value:
    """Return cumulative sums. ``combine`` must add; like all kernel functions, it is emulated."""
    assert int(combine(tensor(2), tensor(3))) == 5, "scans are emulated of sums only"
    return values.like(np.cumsum(values.data, axis=axis, dtype=values.data.dtype))
