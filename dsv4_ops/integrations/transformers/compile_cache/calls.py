"""Serialise the call of a part for a process that compiles it, without the numbers in its tensors.

The other process gets fake tensors, which need no memory. It gets the same modules, functions and
constants, and the same tensors share memory. A function that another function made, such as the
forward of a patched module, is sent as its code and the values of its closure.

A call that contains classes or functions of other packages than torch, Triton, transformers and
this one is not sent: these could read variables that have other values in the other process.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.torch_compat import FakeTensor, FakeTensorMode
from dsv4_ops.integrations.transformers.compile_cache.precompiled import belongs_to
from dsv4_ops.integrations.transformers.modules.replacement import is_library_function

_SENT = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_OURS = "dsv4_ops"
_PACKAGES = ("torch", "triton", "transformers", _OURS)
_UNREAD = ("_is_hf_initialized", "_is_buffer", "persistent", "_dynamo_static_input_type")
"""Attributes of tensors that no trace of a part reads."""


def packed(value: Any) -> bytes:
    """Return bytes for ``unpacked``.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the value contains a distributed tensor, an
            object that cannot be pickled, or a class or function of another package.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that ``packed`` wrote, with fake tensors. Load only bytes of this program:
    loading them runs their code."""
    return _Unpickler(io.BytesIO(data)).load()


def has_replaced_functions() -> bool:
    """Whether other code replaced functions of torch, which another process then lacks."""
    return any(
        isinstance(value, FunctionType) and name[0] != "_" and not is_library_function(value)
        for owner in (torch, torch.nn.functional, Tensor)
        for name, value in vars(owner).items()
    )


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
        held = {} if isinstance(value, FakeTensor) else vars(value)
        attributes = {name: held[name] for name in held if name not in _UNREAD}
        return id(value), kind, value.requires_grad, form, of_storage, attributes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType):  # pickle would look it up by its name
            return _bound, (value.__func__, value.__self__)
        if isinstance(value, type):
            _check(value.__module__, value)
            is_module = issubclass(value, nn.Module) and not belongs_to(value.__module__, _OURS)
            forward = vars(value).get("forward") if is_module else None
            if forward is not None and not is_library_function(forward):
                raise pickle.PicklingError(f"{value} has a forward of another package")
        if isinstance(value, FunctionType):
            module = value.__globals__["__name__"]  # functools.wraps assigns __module__
            _check(module, value)
            if "<" in value.__qualname__:
                if vars(sys.modules[module]) is not value.__globals__:
                    raise pickle.PicklingError(f"{value} has the variables of no module")
                cells = tuple(each.cell_contents for each in value.__closure__ or ())
                kept = {name: vars(value)[name] for name in vars(value) if name != "__wrapped__"}
                names = value.__module__, value.__qualname__
                defaults = value.__defaults__, value.__kwdefaults__
                code = marshal.dumps(value.__code__)
                return _function, (code, module, names, defaults, cells, kept)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._mode = FakeTensorMode()
        self._tensors: dict[int, Tensor] = {}
        self._storages: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        number, kind, requires_grad, (dtype, device, shape, stride), of_storage, attributes = pid
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
        made.__dict__.update(attributes)
        self._tensors[number] = made.requires_grad_(requires_grad)
        return self._tensors[number]


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)


def _function(
    code: bytes,
    module: str,
    names: tuple[str, str],
    defaults: tuple[Any, Any],
    cells: tuple[Any, ...],
    attributes: dict[str, Any],
) -> FunctionType:
    variables, (_, name) = vars(importlib.import_module(module)), names
    closure = tuple(map(CellType, cells))
    made = FunctionType(marshal.loads(code), variables, name.rpartition(".")[2], None, closure)
    made.__module__, made.__qualname__ = names
    made.__defaults__, made.__kwdefaults__ = defaults
    made.__dict__.update(attributes)
    return made


def _check(module: str, value: Any) -> None:
    if not belongs_to(module, *_PACKAGES):
        raise pickle.PicklingError(f"{value} is of another package")
