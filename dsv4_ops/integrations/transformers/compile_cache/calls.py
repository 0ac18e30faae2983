"""Send the call of a part to another process of this program, without the numbers in its tensors.

The other process gets fake tensors, which need no memory. It gets the same modules, functions and
constants, and the same tensors share memory. A function that another function made, such as the
forward of a patched module, is sent as its code and the values of its closure.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.torch_compat import FakeTensor, FakeTensorMode

_SENT = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def packed(value: Any) -> bytes:
    """Return bytes for ``unpacked``.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the value contains a distributed tensor or
            an object that cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that ``packed`` wrote, with fake tensors. Load only bytes of this program:
    loading them runs their code."""
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if type(value) not in _SENT or value.layout is not torch.strided:
            raise pickle.PicklingError(f"a tensor of {type(value).__name__}, {value.layout}")
        storage = value.untyped_storage()
        of_storage = storage._cdata, int(storage.nbytes()), int(value.storage_offset())
        kind = nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        form = value.dtype, value.device, tuple(value.shape), value.stride()
        return id(value), kind, value.requires_grad, form, of_storage

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType):  # pickle would look it up by its name
            return _bound, (value.__func__, value.__self__)
        if isinstance(value, FunctionType) and "<" in value.__qualname__:
            cells = tuple(each.cell_contents for each in value.__closure__ or ())
            code = marshal.dumps(value.__code__)
            more = value.__qualname__, value.__defaults__, value.__kwdefaults__
            return _function, (code, value.__module__, more, cells)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._mode = FakeTensorMode()
        self._tensors: dict[int, Tensor] = {}
        self._storages: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        number, kind, requires_grad, (dtype, device, shape, stride), of_storage = pid
        if number in self._tensors:
            return self._tensors[number]
        storage, nbytes, offset = of_storage
        with self._mode, torch.no_grad():
            if storage not in self._storages:
                self._storages[storage] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            held = self._storages[storage].untyped_storage()
            made = torch.empty(0, dtype=dtype, device=device).set_(held, offset, shape, stride)
            if kind is nn.Parameter:
                made = nn.Parameter(made, requires_grad)
        self._tensors[number] = made.requires_grad_(requires_grad)
        return self._tensors[number]


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


def _function(code: bytes, module: str, more: Any, cells: tuple[Any, ...]) -> FunctionType:
    name, defaults, kwdefaults = more
    names = vars(importlib.import_module(module))
    closure = tuple(map(CellType, cells))
    made = FunctionType(marshal.loads(code), names, name.rpartition(".")[2], defaults, closure)
    made.__qualname__, made.__module__, made.__kwdefaults__ = name, module, kwdefaults
    return made
