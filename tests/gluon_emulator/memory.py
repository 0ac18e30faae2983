"""Memory that an emulated kernel accesses through pointers; every access is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from tests.gluon_emulator.values import EmulationError, Value, as_type, from_bits, storage, tensor

_NAMES = ("uint8", "int32", "int64", "float16", "bfloat16", "float32")
_TYPES = {getattr(torch, name): getattr(gl, name) for name in _NAMES}


class Buffer:
    """The bytes from the first to the last value of a tensor."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        pairs = zip(values.shape, values.stride(), strict=True)
        count = 1 + sum((size - 1) * step for size, step in pairs) if values.numel() else 0
        size, first = values.itemsize, values.storage_offset() * values.itemsize
        everything = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage())
        self.bytes = everything.numpy()[first : first + count * size]
        self.name, self.start = name, values.data_ptr()

    def words(self, addresses: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the buffer's words of ``dtype``, a mask of addresses inside, and indices."""
        size = dtype.primitive_bitwidth // 8
        offsets = addresses - self.start
        inside = (offsets >= 0) & (offsets <= len(self.bytes) - size)
        skipped = -self.start % size
        count = max(len(self.bytes) - skipped, 0) // size
        words = self.bytes[skipped : skipped + count * size].view(storage(dtype))
        return words, inside, (offsets - skipped) // size


def pointer_to(name: str, values: torch.Tensor) -> Value:
    """Return the address of a tensor's first value."""
    buffer = Buffer(name, values)
    return Value(np.int64(buffer.start), gl.pointer_type(_TYPES[values.dtype]), (buffer,))


def _wanted(pointer: Value, mask: Any) -> np.ndarray:
    """Return which pointers are accessed; check that these pointers are aligned."""
    wanted = tensor(True if mask is None else mask).data
    assert pointer.dtype.is_ptr()
    assert wanted.dtype == np.bool_
    wanted = np.array(np.broadcast_to(wanted, pointer.data.shape))
    if np.any(pointer.data[wanted] % (pointer.dtype.element_ty.primitive_bitwidth // 8)):
        raise EmulationError(f"misaligned access to {pointer.buffers[0].name}")
    return wanted


def _found(pointer: Value, wanted: np.ndarray) -> Any:
    """Yield every accessed buffer's words, the pointers into it, and the words' places."""
    for buffer in pointer.buffers:
        words, inside, place = buffer.words(pointer.data, pointer.dtype.element_ty)
        here = wanted & inside
        yield words, here, place[here]
        wanted = wanted & ~inside
    if wanted.any():
        address = int(pointer.data[wanted][0])
        places = (
            f"{address - buffer.start} of {len(buffer.bytes)} in {buffer.name}"
            for buffer in pointer.buffers
        )
        raise EmulationError(f"access out of bounds: byte {', or '.join(places)}")


def load(pointer: Value, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    dtype, wanted = pointer.dtype.element_ty, _wanted(pointer, mask)
    missing = poison(dtype) if other is None else Value(as_type(other, dtype), dtype).bits()
    result = np.array(np.broadcast_to(missing, wanted.shape))
    for words, here, place in _found(pointer, wanted):
        result[here] = words[place]
    return from_bits(result, dtype)


def store(pointer: Value, value: Any, mask: Any = None, **hints: Any) -> None:
    wanted = _wanted(pointer, mask)
    bits = np.broadcast_to(tensor(value).to(pointer.dtype.element_ty).bits(), wanted.shape)
    for words, here, place in _found(pointer, wanted):
        words[place] = bits[here]


def poison(dtype: Any) -> np.ndarray:
    """Return the contents of unwritten memory: NaN, or an implausible number."""
    if dtype.is_floating():
        return tensor(float("nan")).to(dtype).bits()
    return np.asarray(0x7BADBEEF).astype(storage(dtype))
