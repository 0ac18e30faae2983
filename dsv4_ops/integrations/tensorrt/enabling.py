"""Make both compilers of torch-tensorrt keep writes to inputs and buffers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

from torch.fx import GraphModule

from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import tensorrt as guard
from dsv4_ops.integrations.tensorrt import _compat, passes


def enable() -> None:
    """Let torch-tensorrt compile graphs that write to caches.

    This function imports torch-tensorrt. Afterwards, ``torch_tensorrt.compile(ir="dynamo")`` and
    ``torch_tensorrt.dynamo.compile`` keep writes to inputs and buffers, and the ops of this package
    write in place. ``torch.compile(backend="torch_tensorrt")`` uses AOTAutograd to trace graphs in
    which an op of this package writes. All ops of this package run in PyTorch segments between the
    engines. A second call of this function does nothing.

    Raises:
        ImportError: torch-tensorrt is missing or unsupported, or lacks TensorRT's libraries.
    """
    if guard.is_enabled():
        return
    names = _compat.load("enable")
    _replace_passes(names)
    _replace_backend(names)
    guard.set_enabled(True)


def _replace_passes(names: Mapping[str, Any]) -> None:
    index = names["passes"].passes.index(names["remove_unread"])
    names["remove_pass"](index=index)
    names["add_pass"](passes.remove_unread, index=index)
    names["add_pass"](passes.keep_writes, index=0)


def _replace_backend(names: Mapping[str, Any]) -> None:
    """For graphs in which our ops write, use torch-tensorrt's trace mode for distributed models."""
    backends, original = names["backends"], names["aot_backend"]
    # writes to inputs stay in the graph, where `keep_writes` finds them
    in_place = functools.partial(names["aot_autograd"], keep_inference_input_mutations=True)

    @functools.wraps(original)
    def backend(gm: GraphModule, sample_inputs: Any, **kwargs: Any) -> Any:
        if not _writes(gm):
            return original(gm, sample_inputs, **kwargs)
        options = {**kwargs.get("options", kwargs), "use_distributed_mode_trace": True}
        with mock.patch.object(backends, "aot_autograd", in_place):
            return original(gm, sample_inputs, options=options)

    backends.aot_torch_tensorrt_aten_backend = backend


def _writes(gm: GraphModule) -> bool:
    written = {spec.op for spec in OPS.values() if spec.mutated}
    graphs = (each.graph for each in gm.modules() if isinstance(each, GraphModule))
    return any(node.target in written for graph in graphs for node in graph.nodes)
