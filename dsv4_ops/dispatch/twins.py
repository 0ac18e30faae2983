"""Functional twins: ops that return what another op writes, made from that op's spec."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from dsv4_ops.core.registry import OPS, OpSpec
from dsv4_ops.core.torch_compat import OpOverload
from dsv4_ops.dispatch.define import define_op

P = ParamSpec("P")
R = TypeVar("R")


def define_twin(
    function: Callable[P, object], result: type[R], *, check: Callable[..., object], example: str
) -> Callable[P, R]:
    """Define ``<name>_functional``, which writes to copies and returns them.

    Args:
        function: Public function of an op that is defined and writes to arguments.
        result: Type of the result: a tensor, or a ``NamedTuple`` of what the op returns and then
            of the copies, in the order of its arguments.
        check: Check of a call; takes the name of the public function and its arguments.
        example: Example of the docstring.

    Returns:
        The public function of the twin.
    """
    spec = OPS[function.__name__]
    name, op = f"{spec.name}_functional", _define(spec)
    defaults, is_tensor = dict(function.__kwdefaults__ or {}), result is Tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **kwargs}
        check(name, *args, **given)
        found = op(*args, **given)
        return found if is_tensor else result(*found)

    # with the globals of the module that holds it, where doctest and pickle look for it
    twin = types.FunctionType(call.__code__, function.__globals__, name, None, call.__closure__)
    functools.update_wrapper(twin, function)
    twin.__name__ = twin.__qualname__ = name
    twin.__annotations__ = {**function.__annotations__, "return": result.__name__}
    signature = inspect.signature(function).replace(return_annotation=result.__name__)
    twin.__signature__ = signature  # type: ignore[attr-defined]
    twin.__doc__ = _docstring(function, _written(spec), None if is_tensor else result, example)
    return cast("Callable[P, R]", twin)


def on_copies(spec: OpSpec, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, an execution of ``spec``, on copies of what it writes; returns them too."""
    written = _written(spec)

    @functools.wraps(spec.reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = spec.arguments(args, kwargs)
        for name in written:
            values[name] = values[name].clone(memory_format=torch.contiguous_format)
        return _with_copies(call(**values), [values[name] for name in written])

    return run


def _define(spec: OpSpec) -> OpOverload:
    name, _, rest = spec.schema.partition("(")
    arguments, _, results = re.sub(r"Tensor\(\w!\)", "Tensor", rest).rpartition(" -> ")
    tensors = ["Tensor"] * (results.count("Tensor") + len(spec.mutated))
    results = "Tensor" if len(tensors) == 1 else f"({', '.join(tensors)})"
    return define_op(
        spec.stem,
        f"{name}_functional({arguments} -> {results}",
        meta=_fake(spec),
        reference=on_copies(spec, spec.reference),
        dynamic=spec.dynamic,
        source=spec.source,
        gradient=spec.gradient,
        twin_of=name,
    )


def _fake(spec: OpSpec) -> Callable[..., Any]:
    wanted, written = inspect.signature(spec.meta).parameters, _written(spec)

    @functools.wraps(spec.meta)
    def fake(**values: Any) -> Any:
        found = spec.meta(**{name: values[name] for name in wanted})
        return _with_copies(found, [values[name].new_empty(values[name].shape) for name in written])

    names = dict.fromkeys((*wanted, *written))
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    fake.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return fake


def _written(spec: OpSpec) -> list[str]:
    return [spec.parameters[place] for place in spec.mutated]


def _with_copies(found: Any, copies: list[Tensor]) -> Any:
    """What an op returned, if anything, and the copies."""
    returned = () if found is None else found if isinstance(found, tuple) else (found,)
    every = (*returned, *copies)
    return every if len(every) > 1 else every[0]


def _docstring(
    function: Callable[..., Any], written: list[str], result: type | None, example: str
) -> str:
    """That of ``function``, with the sections replaced that differ."""
    text, name = inspect.getdoc(function) or "", function.__name__
    sections = {
        title: f"{title}:{body.rstrip()}"
        for title, body in re.findall(r"^(\w+):(.*?)(?=^\w+:|\Z)", text, re.M | re.S)
    }
    copies = "Dense copies of " + " and ".join(f"``{each}``" for each in written) + ", written to."
    if result is not None:
        fields = ", ".join(result._fields)  # type: ignore[attr-defined]
        copies = f"``{result.__name__}({fields})``, new tensors. {copies}"
    sections |= {
        "Returns": f"Returns:\n    {copies}",
        "Mutates": "Mutates: nothing.",
        "Compile": f"Compile: copies, then ``{name}``; dynamic in the same sizes;\n    CUDA graphs "
        "and export: yes.",
        "Example": "Example:\n" + textwrap.indent(inspect.cleandoc(example), "    "),
    }
    first = f"Run ``{name}`` on copies of what it writes."
    return "\n\n".join([first, "For tests and for reading.", *sections.values()])
