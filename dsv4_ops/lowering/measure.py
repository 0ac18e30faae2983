"""``impl="auto"`` under max_autotune: Inductor's benchmarker times what can run here.

Inductor's ``autotune_select_algorithm`` cannot make this choice. It takes candidates of one output,
and these ops return tuples; and it chooses while Inductor lowers, when a candidate can only be an
opaque call, whereas our kernels are traced into the graph, fused and packaged, before that.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import AUTO, OPS, REFERENCE, OpSpec
from dsv4_ops.core.torch_compat import disable_current_modes
from dsv4_ops.dispatch import choice
from dsv4_ops.dispatch.choice import Values
from dsv4_ops.dispatch.libraries import LIBRARIES

_MOST_BLOCKS = 4096
"""Most blocks of a cache that is measured."""

Signature = tuple[tuple[str, Any], ...]


def fastest(spec: OpSpec, values: Values) -> str | None:
    """Return the fastest implementation of such a call, or None if there is nothing to measure:
    without max_autotune, with dynamic shapes, and where no library runs."""
    if choice.subject(values).device.type not in choice.DEVICES:
        return None
    if values["impl"] != AUTO or not _asked_for() or choice.takes_no_library(values):
        return None
    signature = _signature(values)
    if signature is None or torch.cuda.is_current_stream_capturing():
        return None
    libraries = [name for name in spec.providers if name in LIBRARIES]
    able = [name for name in libraries if not choice.limit(spec.name, name, values)]
    able = [name for name in able if not choice.unusable(name)]
    return _measured(spec.name, (choice.ours(spec), *able), signature) if able else None


def _asked_for() -> bool:
    if "torch._inductor.config" not in sys.modules:
        return False
    from dsv4_ops.lowering import _compat

    return bool(_compat.config.max_autotune)


def _signature(values: Values) -> Signature | None:
    """Names with what they are like; None if a size is a symbol."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(values.items()):  # whatever order they were passed in
        if not isinstance(value, Tensor):
            found.append((name, value))
            continue
        if not all(isinstance(size, int) for size in value.shape):
            return None
        found.append((name, (tuple(value.shape), value.dtype, value.device)))
    return tuple(found)


@functools.cache
def _measured(op: str, impls: tuple[str, ...], signature: Signature) -> str:
    given = dict(signature)
    device = given["q" if "q" in given else "x"][2]
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with disable_current_modes(), torch.no_grad(), here:
        values = example(op, given)
        times = {impl: _time_of(OPS[op], impl, values) for impl in impls}
    return min(times, key=times.__getitem__)  # the first, which is ours, if none can run


def _time_of(spec: OpSpec, impl: str, values: dict[str, Any]) -> float:
    """Milliseconds of a call in a CUDA graph, without launches from Python; infinite if it cannot
    run."""
    from dsv4_ops.kernels.launcher import EAGER
    from dsv4_ops.lowering._compat import benchmarker

    given = choice.given_to(impl, values)
    run = spec.reference if impl == REFERENCE else functools.partial(spec.launcher(impl), EAGER)
    try:
        run(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(**given)
        return float(benchmarker.benchmark_gpu(graph.replay))
    except RuntimeError:
        return math.inf


def example(op: str, like: dict[str, Any]) -> dict[str, Any]:
    """Make arguments of these shapes: full lists of rows from all over the caches."""
    made = {
        name: _tensor(name, *value) if isinstance(value, tuple) and len(value) == 3 else value
        for name, value in like.items()
    }
    for name, rows in _rows(made).items():
        made[name].random_(0, max(rows, 1))
    for name in ("lens", "swa_lens", "extra_lens"):
        if isinstance(made.get(name), Tensor):
            made[name].fill_(_most(name, made))
    if op == "indexer_select":
        made["positions"].fill_(_table_rows(made, "block_table") * made["compress_ratio"] - 1)
    requests = made.get("req_indices")
    if op == "sparse_mla_prefill":
        _prefilled(made)
    elif isinstance(requests, Tensor):
        table = made["block_table"] if "block_table" in made else made["extra_block_table"]
        count = torch.arange(len(requests), device=requests.device)
        requests.copy_(count % max(table.shape[0], 1))
    if isinstance(made.get("plan"), Tensor):
        made["plan"] = _plan(made)
    return made


def _prefilled(made: dict[str, Any]) -> None:
    """The last tokens of requests that fill their tables, as many of each, and rows that all of
    them may see."""
    token = torch.arange(made["positions"].shape[0], device=made["positions"].device)
    each = max(-(-len(token) // max(made["swa_block_table"].shape[0], 1)), 1)
    rows = _table_rows(made, "swa_block_table", "swa_block_size")
    if isinstance(made["extra_block_table"], Tensor):
        extra = _table_rows(made, "extra_block_table", "extra_block_size")
        rows = min(rows, (extra + 1) * made["compress_ratio"] - 1)
    made["req_indices"].copy_(token // each)
    made["positions"].copy_((rows - each + token % each).clamp(min=0))
    if isinstance(made["topk_indices"], Tensor):
        visible = max((rows - each + 1) // made["compress_ratio"], 1)
        made["topk_indices"].random_(0, visible)


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if name.endswith("cache") and dtype == torch.uint8:
        shape = (min(shape[0], _MOST_BLOCKS), *shape[1:])
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _rows(made: dict[str, Any]) -> dict[str, int]:
    """How many rows or blocks the entries of each list choose among."""
    found = {}
    for source in ("swa", "extra"):
        if isinstance(made.get(f"{source}_indices"), Tensor):
            size = made[f"{source}_block_size"]
            found[f"{source}_indices"] = made[f"{source}_cache"].shape[0] * size
    tables = {"swa_block_table": "swa_cache", "extra_block_table": "extra_cache"}
    for name, cache in {**tables, "block_table": "k_cache"}.items():
        if isinstance(made.get(name), Tensor):
            found[name] = made[cache].shape[0]
    if "indices" in made:
        found["indices"] = made["kv"].shape[0]
    return found


def _most(name: str, made: dict[str, Any]) -> int:
    if name == "extra_lens" and "extra_block_table" in made:
        return _table_rows(made, "extra_block_table", "extra_block_size")
    if name == "lens" and "block_table" in made:
        return _table_rows(made, "block_table")
    return int(made[name.replace("lens", "indices")].shape[1])


def _table_rows(made: dict[str, Any], table: str, size: str = "block_size") -> int:
    return int(made[table].shape[1] * made[size])


def _plan(made: dict[str, Any]) -> Tensor:
    from dsv4_ops.lowering.external import adapter

    q, extra = made["q"], 0
    if "extra_block_table" in made:
        extra = _table_rows(made, "extra_block_table", "extra_block_size")
    elif isinstance(made.get("extra_indices"), Tensor):
        extra = made["extra_indices"].shape[1]
    widths = (made["swa_indices"].shape[1], extra)
    planned: Tensor = adapter("flash_mla").plan_for(*q.shape[:2], *widths, q.device).schedule
    return planned
