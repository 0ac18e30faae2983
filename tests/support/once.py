"""When imported, make torch do work once that it would repeat for each node of each graph.

The patches save a quarter of the time of a compilation, and change nothing that a test checks.
"""

import logging
import os
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo import config, guards
from torch._inductor import compile_fx, config as inductor_config, dtype_propagation, utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config, recording, sym_node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _config_module

_handler: Any = dtype_propagation.DtypePropagationOpsHandler
_mode: Any = FakeTensorMode
_make_rules: Callable[[Any], None] = _handler.__init__
_output_info: Any = getattr(_mode, "_get_output_info_for_cache_entry", None)
_CONSTANTS = (bool, int, float, str, type(None))
_rules_of = -1
_seen: set[Any] = set()


def _rules(handler: Any) -> None:
    """Make the handler's table only if there are new rules, instead of at each use."""
    global _rules_of
    if _rules_of != len(utils.op_dtype_propagation_rules):
        _rules_of = len(utils.op_dtype_propagation_rules)
        _make_rules(handler)


def _info(mode: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the entry of a new output for torch's cache of fake tensors.

    Torch makes the tensor again from the entry, to compare dispatch keys; with this function, only
    once for each op, dtype and keys, instead of for each size.
    """
    if not isinstance(output, torch.Tensor):
        return _output_info(mode, state, key, func, args, kwargs, output)
    kind = (func, output.dtype, torch._C._dispatch_key_set(output))
    if kind not in _seen:
        info = _output_info(mode, state, key, func, args, kwargs, output)
        _seen.add(kind)  # not reached if torch refuses to cache this output
        return info
    mode._output_from_cache_entry = lambda *call: output
    try:
        return _output_info(mode, state, key, func, args, kwargs, output)
    finally:
        del mode._output_from_cache_entry


class _Known(FakeTensorProp):
    """Skips fake execution in Inductor. AOTAutograd has already run the graph with fake tensors,
    and Inductor looks for strides that passes changed: in 13,500 nodes of our graphs, none did."""

    def run_node(self, n: torch.fx.Node) -> Any:
        known = n.meta.get("val")
        if n.op != "call_function" or known is None or "unbacked_bindings" in n.meta:
            return super().run_node(n)
        return known


def _at_hand(module: Any) -> None:
    """Make settings properties. Torch would look for an alias, a knob and the environment at each
    access, which happens for each instruction that Dynamo traces."""
    kind, unset = type(module), _config_module._UNSET_SENTINEL
    torchs: Callable[[Any, str], Any] = kind.__getattr__
    follow = getattr(module, "_implications", ())
    known: dict[str, Callable[[Any], Any]] = {}

    def know(name: str, entry: Any) -> None:
        def value(module: Any) -> Any:
            if entry.hide:
                return torchs(module, name)
            own = entry.user_override
            own = own.get() if isinstance(own, ContextVar) else own  # before 2.15
            return entry.default if own is unset else own

        known[name] = value
        if "." not in name:
            setattr(kind, name, property(value))

    def setting(module: Any, name: str) -> Any:
        return known[name](module) if name in known else torchs(module, name)

    for name, entry in module._config.items():
        given = entry.alias, entry.justknob, entry.env_value_force, entry.env_value_default
        plain = given == (None, None, unset, unset) and not getattr(entry, "deprecated", False)
        if plain and type(entry.default) in _CONSTANTS and name not in follow:
            know(name, entry)
    kind.__getattr__ = setting


def _silent(*event: Any) -> None:
    """Replace ``debug`` of loggers that are off, to save the check of their level."""


# patch names of torch 2.13 and 2.15, if they exist; `make test-all` runs torch unpatched
if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
    if hasattr(utils, "op_dtype_propagation_rules"):
        _handler.__init__ = _rules
    if _output_info is not None and hasattr(_mode, "_output_from_cache_entry"):
        _mode._get_output_info_for_cache_entry = _info
    compile_fx.FakeTensorProp = _Known
    for _settings in (config, inductor_config, fx_config):
        _at_hand(_settings)
    if hasattr(guards, "profile_guard_manager"):  # it flushes caches, but only a log needs it
        vars(guards)["profile_guard_manager"] = lambda *call: 0.0
    # For carets in the stack trace of a node, Python would parse the line of each call again.
    vars(traceback)["_extract_caret_anchors_from_line_segment"] = lambda line: None
    _logs = getattr(recording, "trace_shape_events_log", None), getattr(sym_node, "log", None)
    for _log in _logs:
        if _log is not None and not _log.isEnabledFor(logging.DEBUG):
            vars(_log)["debug"] = _silent  # called three times per sum or product of sizes
