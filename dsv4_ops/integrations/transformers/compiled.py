"""``compile_step``: a step as one graph, or layer by layer with one graph per kind of layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.torch_compat import group_sends
from dsv4_ops.integrations.transformers.cache import PagedCache
from dsv4_ops.integrations.transformers.modules import with_methods
from dsv4_ops.integrations.transformers.steps import (
    decode,
    decode_step,
    prefill,
    prefill_step,
    spec_of,
)
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

MOST_WHOLE = 8
"""Most layers that "auto" compiles as one graph, whose time grows faster than their number."""

_PARTS = {decode_step: decode, prefill_step: prefill}


def compile_step(
    model: Any,
    step: Callable[..., Tensor] = decode_step,
    *,
    mode: str = "auto",
    cache_file: str | os.PathLike[str] | None = None,
    on_part: Callable[[str], None] | None = None,
    **settings: Any,
) -> CompiledStep:
    """Compile ``decode_step`` or ``prefill_step`` of a patched model.

    Args:
        model: A patched model.
        step: ``decode_step`` or ``prefill_step``.
        mode: "whole": one graph, as ``torch.compile(step, fullgraph=True)`` makes it. "regional":
            one graph for every kind of layer (four in the released models, whatever their depth),
            which all layers of that kind share, and three around them; a CUDA graph captures the
            step as one all the same. Modules that are put into the model later need another
            ``compile_step``. "auto": "regional" for more than 8 layers.
        cache_file: Where compiled code is kept for the next process. Read if it is there; written
            after the first step, if that compiled something that was not in it. Its entries are
            found by the sources of this package, the versions, the sizes and the device, so that
            an old file costs time and nothing else.
        on_part: Called with the name of every part before it is compiled, to show progress.
        settings: Of ``torch.compile``; ``fullgraph=True`` and ``dynamic=False`` by default.

    Returns:
        A function of the batch, the cache, and the keyword arguments of ``step``. It returns and
        writes what ``step`` does. Ranks that share the cache first compare their shapes on the
        host, and raise ValueError on all if they differ, if the group sends tensors of the CPU
        ("cpu:gloo,cuda:nccl").

    Raises:
        ValueError: the model is not patched, ``step`` is another function or ``mode`` another word.

    Example:
        >>> import torch
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations import transformers as v4
        >>> model = v4.patch(small_model(), kv="fp32", precision="reference")
        >>> cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
        >>> row = cache.add("a", num_tokens=1)
        >>> starts, lens, rows = (torch.tensor(v, dtype=torch.int32) for v in ([0, 1], [1], [row]))
        >>> batch = v4.StepBatch(torch.tensor([7]), starts, lens, rows)
        >>> step = v4.compile_step(model, mode="regional", backend="eager")
        >>> step(batch, cache).shape, len(step.parts)
        (torch.Size([1, 260]), 6)
    """
    op = "compile_step"
    spec = spec_of(op, model)
    Checks(op).one_of("mode", mode, "auto", "whole", "regional", belongs_to="the step is made of")
    if step not in _PARTS:
        rule, advice = "be decode_step or prefill_step", "Pass one of these"
        raise refusal(ValueError, op, "step", rule, getattr(step, "__name__", step), advice)
    regional = mode == "regional" or (mode == "auto" and len(spec.kinds) > MOST_WHOLE)
    path = None if cache_file is None else Path(cache_file)
    return CompiledStep(model, step, regional, path, on_part, settings)


class CompiledStep:
    """A compiled step of a model; ``compile_step`` makes it.

    Attributes:
        parts: Compiled parts by name: kinds of layers and what is around them, or "step".
    """

    def __init__(
        self,
        model: Any,
        step: Callable[..., Tensor],
        regional: bool,
        cache_file: Path | None,
        on_part: Callable[[str], None] | None,
        settings: dict[str, Any],
    ) -> None:
        self.model = with_methods(model) if regional else model
        self.step, self.regional, self._on_part = step, regional, on_part
        self.settings = {"fullgraph": True, "dynamic": False, **settings}
        self.parts: dict[str, Callable[..., Any]] = {}
        self._file, self._loaded = cache_file, _load(cache_file)
        ranks = spec_of("compile_step", model).parallel
        self._ranks = ranks if ranks is not None and group_sends(ranks.group, "cpu") else None

    @torch.no_grad()
    def __call__(self, batch: StepBatch, cache: CacheTensors | PagedCache, **rest: Any) -> Tensor:
        """Run the step; the first call compiles."""
        tensors = cache.tensors if isinstance(cache, PagedCache) else cache
        if self._ranks is not None:
            shapes = {"num_tokens": len(batch.tokens), "num_reqs": len(batch.rows)}
            self._ranks.agree("compile_step", "batch", "cpu", **shapes)
        if self.regional:
            logits = _PARTS[self.step](self.model, batch, tensors, run=self._run, **rest)
        else:
            logits = self._run("step", self.step, self.model, batch, tensors, **rest)
        if self._file is not None:
            _save(self._file, self._loaded)
            self._file = None
        return logits

    def _run(self, name: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        if name not in self.parts:
            if self._on_part is not None:
                self._on_part(name)
            # Dynamo keeps what it compiles by code object, and tries all that it has for one
            code = _part.__code__.replace(co_name=name)
            self.parts[name] = torch.compile(FunctionType(code, globals()), **self.settings)
        return self.parts[name](function, args, rest)


def _part(function: Callable[..., Any], args: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    return function(*args, **rest)


def _load(file: Path | None) -> frozenset[str]:
    """Load a file of compiled code; return the keys that it has."""
    if file is None or not file.is_file():
        return frozenset()
    return _keys(torch.compiler.load_cache_artifacts(file.read_bytes()))


def _save(file: Path, loaded: frozenset[str]) -> None:
    """Write the compiled code of this process, unless all of it was loaded."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None or _keys(saved[1]) <= loaded:
        return
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(saved[0])
    partial.replace(file)  # whole, whoever reads it meanwhile


def _keys(info: Any) -> frozenset[str]:
    artifacts = {} if info is None else info.artifacts
    return frozenset(key for keys in artifacts.values() for key in keys)
