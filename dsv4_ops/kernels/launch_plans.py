"""Repeat the launches of an earlier call, without the Python code that chose them.

The form of a call is the dtypes, shapes, strides and alignment of its tensors, and the values of
its other arguments. A launcher chooses tiles, grids and temporary tensors only by the form. So the
first call of a form is recorded as straight-line code: calls of torch's ops, and launches of
compiled kernels. Later calls of that form, in other layers and steps, run this code on their own
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_ops.core.layout import CACHE_ALIGNMENT
from dsv4_ops.kernels.launcher import EAGER, Launcher

MOST_PLANS = 8192
"""Maximum number of recorded forms. One more form clears all plans."""

Plan = Callable[..., Any]
"""A function that repeats a recorded call with other tensors."""

Choose = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Callable[..., Any], Any, Any, bool]]

_PLAIN = {bool, int, float, str, torch.dtype, torch.device, type(None)}
_TENSORS = {Tensor, torch.nn.Parameter}
_CHANGING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class LaunchPlans:
    """The plans of this process, keyed by the forms of calls."""

    def __init__(self) -> None:
        self.plans: dict[Any, Plan | None] = {}

    def run(self, name: str, choose: Choose, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the plan of the call's form. If the form has no plan, run the call; if the form is
        new and a launcher of ours runs the call, also record a plan.

        Args:
            name: The op.
            choose: Returns the function that runs a call, the function's arguments, and whether the
                function is a launcher of ours.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = form(name, args, kwargs, tensors)
        plan = self.plans.get(key)
        if plan is not None:
            return plan(*tensors)
        function, args, kwargs, is_ours = choose(args, kwargs)
        if not is_ours:
            return function(*args, **kwargs)
        if key is None or key in self.plans:
            return function(EAGER, *args, **kwargs)
        recording = Recording(tensors)
        with recording:
            result = function(Launcher(recording.wrap), *args, **kwargs)
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = recording.plan(result)
        return result


def form(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Any:
    """Return the properties of a call that a launcher may read; None if an argument has a type that
    is not recorded."""
    parts: list[Any] = [name, *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _TENSORS:
            offset = value.data_ptr() % CACHE_ALIGNMENT
            parts += (value.dtype, value.device, value.shape, value.stride(), offset)
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind in (list, tuple) and all(type(each) in _PLAIN for each in value):
            parts.append(tuple(value))
        else:
            return None
    ids = [id(each) for each in tensors]
    if len(set(ids)) < len(ids):  # a plan of f(x, x) is wrong for f(x, y)
        parts.append(tuple(map(ids.index, ids)))
    return tuple(parts)


class Recording(TorchDispatchMode):
    """Records a call as lines of Python, in which every tensor has a name.

    Args:
        tensors: Arguments of the call.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.count = len(tensors)
        # keep the tensors alive, so that no new tensor gets the id of a freed tensor
        self.names = {id(each): (f"v{place}", each) for place, each in enumerate(tensors)}
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.obstacle = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(tag in func.tags for tag in _CHANGING):
            self.obstacle = f"{func} depends on values"
        name = f"r{len(self.lines)}"
        self._call(name, func, args, kwargs)
        for place, each in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if isinstance(each, Tensor) and id(each) not in self.names:
                place_name = f"{name}[{place}]" if isinstance(out, (list, tuple)) else name
                self.names[id(each)] = (place_name, each)
        return out

    def wrap(self, kernel: Any) -> Any:
        """Return an object that launches a kernel and records the launch."""
        return _Recorded(self, kernel)

    def launched(self, kernel: Any, grid: Any, args: Any, options: Any, compiled: Any) -> None:
        """Record a launch; ``compiled`` is what Triton returned for it."""
        if hasattr(compiled, "packed_metadata"):
            bound = kernel.signature.bind(
                *args, **{name: each for name, each in options.items() if name in kernel.arg_names}
            )
            bound.apply_defaults()
            runner = compiled[(*grid, 1, 1)[:3]]
            self._call("_", runner, tuple(bound.arguments.values()), {})
        else:  # Triton's interpreter
            self._call("_", EAGER(kernel)[grid], args, options)

    def plan(self, result: Any) -> Plan | None:
        """Return a function that repeats the call with other tensors; None if the call cannot be
        repeated."""
        end = f"    return {self._text(result)}"
        if self.obstacle:
            return None
        header = f"def plan({', '.join(f'v{place}' for place in range(self.count))}):"
        names = dict(self.constants)
        exec("\n".join([header, *self.lines, end]), names)
        made: Plan = names["plan"]
        return made

    def _call(self, name: str, function: Any, args: Sequence[Any], kwargs: Any) -> None:
        texts = [self._text(each) for each in args]
        texts += [f"{key}={self._text(each)}" for key, each in kwargs.items()]
        self.lines.append(f"    {name} = {self._constant(function)}({', '.join(texts)})")

    def _text(self, value: Any) -> str:
        """Return the expression of a value in the plan."""
        if isinstance(value, Tensor):
            if id(value) not in self.names:
                self.obstacle = "a tensor is neither an argument nor made by the call"
                return "None"
            return self.names[id(value)][0]
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            texts = ", ".join(map(self._text, value))
            if hasattr(value, "_fields"):
                return f"{self._constant(type(value))}({texts})"
            return f"({texts},)"
        if isinstance(value, list) and any(isinstance(each, Tensor) for each in value):
            return f"[{', '.join(map(self._text, value))}]"
        if any(isinstance(each, Tensor) for each in getattr(value, "__dict__", {}).values()):
            self.obstacle = f"a {type(value).__name__} holds a tensor"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


class _Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, recording: Recording, kernel: Any) -> None:
        self.recording, self.kernel = recording, kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            compiled = EAGER(self.kernel)[grid](*args, **options)
            self.recording.launched(self.kernel, grid, args, options, compiled)
            return compiled

        return launch


PLANS = LaunchPlans()
"""The plans of this process."""
