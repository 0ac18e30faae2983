"""Fixes of Triton's interpreter, for every process that ``forked.py`` and ``mapped.py`` start.

Masks: ``scalar & block`` of conditions has Triton's type int1, but the interpreter stores its
values as int32 or int64, and since 3.9 refuses such a mask. Older interpreters read it as
conditions, and so does this file.

Scalars: Triton 3.6 stores a scalar as an array of one value, which NumPy 2.4 refuses as an index.

Time: a launch patches every member of ``triton.language``, and so does each call of a device
function, which takes half of a kernel's time. Here only launches patch. Half of the other time goes
to repeated work: shapes of types and tensors, a table of all dtypes for every cast, and a second
sum of integers for an assertion that only debugging uses.
"""

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_PLACE_OF_MASK = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}


def _with_conditions(method: Any, place: int) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **rest: Any) -> Any:
        mask = TensorHandle(args[place].data.astype(np.bool_), args[place].dtype)
        return method(self, *args[:place], mask, *args[place + 1 :], **rest)

    return call


def _unless_patched(patch: Any) -> Any:
    @functools.wraps(patch)
    def call(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        languages = [each for each in (tl, tl.core) if id(each) in seen]
        if not languages or any(tl.core.is_builtin(each.load) for each in languages):
            return patch(function)
        return interpreter._LangPatchScope()  # nothing to undo

    return call


def _scalar_index(patch: Any) -> Any:
    def call(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return call


def _known_dtype(find: Any) -> Any:
    known: dict[str, Any] = {}

    def call(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return call


def _quick_bf16(convert: Any) -> Any:
    """Convert bfloat16 to float32 by a shift: a bfloat16 is the upper half of a float32."""

    def call(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) != (tl.bfloat16, tl.float32):
            return convert(values, given, wanted, rounding)
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)

    return call


def _asserted(check: Any) -> Any:
    def call(self: Any, *args: Any) -> None:
        if self.builder.options.debug:  # otherwise the check asserts nothing
            check(self, *args)

    return call


def _quick_block(make: Any) -> Any:
    """Let block types of one element and shape share their attributes."""
    known: dict[Any, dict[str, Any]] = {}

    def call(self: Any, element: Any, shape: Any) -> None:
        if type(element) is not tl.dtype:
            make(self, element, shape)
            return
        sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (element.name, *sizes)
        if key not in known:
            make(self, element, shape)
            self.made_of = key
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return call


def _quick_tensor(make: Any) -> Any:
    known: dict[Any, dict[str, Any]] = {}

    def call(self: Any, handle: Any, kind: Any) -> None:
        key = kind.name if type(kind) is tl.dtype else getattr(kind, "made_of", None)
        if key not in known:
            make(self, handle, kind)
            if key is not None:
                known[key] = vars(self).copy()
        else:
            vars(self).update(known[key], handle=handle)

    return call


def _replace(owner: Any, name: str, wrap: Any) -> None:
    if hasattr(owner, name):
        setattr(owner, name, wrap(getattr(owner, name)))


if knobs.runtime.interpret:
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _unless_patched(interpreter._patch_lang)
    for _name, _place in _PLACE_OF_MASK.items():
        _method = getattr(InterpreterBuilder, _name)
        setattr(InterpreterBuilder, _name, _with_conditions(_method, _place))
    _replace(interpreter, "_patch_lang_tensor", _scalar_index)
    _replace(interpreter, "_get_np_dtype", _known_dtype)
    _replace(interpreter, "_convert_float", _quick_bf16)
    _replace(TritonSemantic, "binary_op_sanitize_overflow_impl", _asserted)
    _replace(tl.block_type, "__init__", _quick_block)
    _replace(tl.tensor, "__init__", _quick_tensor)
