"""Masks that Triton 3.9's interpreter takes; imported first by what runs under TRITON_INTERPRET=1.

``scalar & block`` of conditions is an int1 for Triton, on a GPU and in its interpreter; but the
interpreter keeps its values as int32 or int64, and since 3.9 refuses such a mask. Older ones read
it as what it is: this does the same.
"""

import functools
from typing import Any

import numpy as np
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_PLACE_OF_MASK = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}


def _with_conditions(method: Any, place: int) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **rest: Any) -> Any:
        mask = TensorHandle(args[place].data.astype(np.bool_), args[place].dtype)
        return method(self, *args[:place], mask, *args[place + 1 :], **rest)

    return call


if knobs.runtime.interpret:
    for _name, _place in _PLACE_OF_MASK.items():
        _method = getattr(InterpreterBuilder, _name)
        setattr(InterpreterBuilder, _name, _with_conditions(_method, _place))
