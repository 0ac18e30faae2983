"""When imported: torch does once what it does again for each node of each graph it compiles.

A quarter of the time of a compile, and nothing that a test looks at.
"""

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import config, guards
from torch._inductor import compile_fx, dtype_propagation, utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config, recording, sym_node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _config_module

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


def _at_hand(module: Any, name: str) -> None:
    """Make a setting a property. Torch lets the module fail to find it and looks for an alias, a
    knob and the environment, for each instruction that Dynamo traces."""
    entry, torchs = module._config[name], type(module).__getattr__
    unset = _config_module._UNSET_SENTINEL
    given = entry.alias, entry.justknob, entry.env_value_force, entry.env_value_default
    if given != (None, None, unset, unset) or entry.deprecated:
        return

    def value(module: Any) -> Any:
        if entry.hide:
            return torchs(module, name)
        set_here = entry.user_override.get()
        return entry.default if set_here is unset else set_here

    setattr(type(module), name, property(value))


def _silent(*event: Any) -> None:
    """What a log does that nobody reads, without a look at its level."""


# names of 2.13 and 2.15; a torch without them does all of it again, and so does `make test-all`
if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
    if hasattr(utils, "op_dtype_propagation_rules"):
        _handler.__init__ = _rules
    if _output_info is not None and hasattr(_mode, "_output_from_cache_entry"):
        _mode._get_output_info_for_cache_entry = _info
    compile_fx.FakeTensorProp = _Known
    if hasattr(_config_module._ConfigEntry, "deprecated"):
        for _name in ("verbose", "nested_graph_breaks", "rewrite_assert_with_torch_assert"):
            _at_hand(config, _name)
        _at_hand(fx_config, "backed_size_oblivious")
    if hasattr(guards, "profile_guard_manager"):  # with a flush of the caches, for a log
        vars(guards)["profile_guard_manager"] = lambda *call: 0.0
    # Python parses the line of each call again for the carets in the stack trace of a node.
    vars(traceback)["_extract_caret_anchors_from_line_segment"] = lambda line: None
    for _log in (
        getattr(recording, "trace_shape_events_log", None),
        getattr(sym_node, "log", None),
    ):
        if _log is not None and not _log.isEnabledFor(logging.DEBUG):
            vars(_log)["debug"] = _silent  # of each sum and product of sizes, three times
