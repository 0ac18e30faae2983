"""The stages of a layer, to time each on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.cases.layer_cases import parts_of
from benchmarks.harness.work import Args
from dsv4_ops.attention import LayerSpec, layer as stages, output
from dsv4_ops.attention.tensors import LayerCall
from dsv4_ops.core.types import IndexerQuery


class Stage(NamedTuple):
    """A part of the layer, and the arguments that it takes of one input set."""

    name: str
    call: Callable[..., Any]
    args: Args


@functools.cache
def _stage(name: str, kind: str, spec: LayerSpec) -> Callable[..., Any]:
    """A stage as a function of the layer's tensors, behind those of stages before it."""

    def layer_of(args: Args) -> LayerCall:
        return LayerCall(spec, kind, *parts_of(args))

    def window(*args: Any) -> Any:
        return stages.insert_window(layer_of(args))

    def compressed(*args: Any) -> Any:
        return stages.insert_compressed(layer_of(args), state_rings=False)

    def written(*args: Any) -> Any:
        return stages.insert(layer_of(args), schedule="decode", state_rings=False)

    def selection(query: IndexerQuery, *args: Any) -> Any:
        return stages.select(layer_of(args), query, slots=True)

    def attention(q: Tensor, slots: Tensor | None, *args: Any) -> Any:
        fused, layer = output.fuses_inverse_rope(spec, q), layer_of(args)
        selected = None if slots is None else (slots, layer.step.c4.lens)
        return output.attend_decode(layer, q, selected, inverse_rope=fused).out

    def projected(out: Tensor, *args: Any) -> Any:
        return output.group_output(layer_of(args), out, inverse_rope=False)

    found: dict[str, Callable[..., Any]] = {
        "window": window,
        "compressed": compressed,
        "written": written,
        "selection": selection,
        "attention": attention,
        "output": projected,
    }
    return found[name]


class Results(NamedTuple):
    """What stages give to stages behind them: ``slots`` are those of the selected rows, ``out`` is
    the attention before its rotation is undone."""

    q: Tensor
    slots: Tensor | None
    out: Tensor


def our_stages(kind: str, spec: LayerSpec, args: Args) -> tuple[list[Stage], Results]:
    """The stages of a layer in their order, with the arguments that the ones before left. All that
    C4 writes is one launch, so one stage. There is no output stage where attention undoes the
    rotation: what is left of it is a view."""
    found: list[Stage] = []

    def run(name: str, *args: Any) -> Any:
        found.append(Stage(name, _stage(name, kind, spec), args))
        return found[-1].call(*args)

    slots = None
    if kind == "c4":
        q, query = run("written", *args)
        slots = run("selection", query, *args)
    else:
        q = run("window", *args)
    if kind == "c128":
        run("compressed", *args)
    out = run("attention", q, slots, *args)
    if output.fuses_inverse_rope(spec, q):
        layer = LayerCall(spec, kind, *parts_of(args))
        selected = None if slots is None else (slots, layer.step.c4.lens)
        out = output.attend_decode(layer, q, selected, inverse_rope=False).out
    else:
        run("output", out, *args)
    return found, Results(q, slots, out)
