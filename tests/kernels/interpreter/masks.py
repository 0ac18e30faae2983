"""Triton's interpreter mended; imported first by what runs under TRITON_INTERPRET=1.

Masks: ``scalar & block`` of conditions is an int1 for Triton, on a GPU and in its interpreter; but
the interpreter keeps its values as int32 or int64, and since 3.9 refuses such a mask. Older ones
read it as what it is: this does the same.

Time: a launch patches ``triton.language``, and so does each call of a device function again, by
looking at every member of the module, which is half of a kernel's time. Here a launch alone does.
"""

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
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


if knobs.runtime.interpret:
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _unless_patched(interpreter._patch_lang)
    for _name, _place in _PLACE_OF_MASK.items():
        _method = getattr(InterpreterBuilder, _name)
        setattr(InterpreterBuilder, _name, _with_conditions(_method, _place))
