"""Compare the allocator's bytes for a model in the released precision with the computed bytes.

The model has four layers of DeepSeek-V4-Flash's sizes. The computed bytes of weights, cache and
temporary tensors follow from shapes alone, as in the tables of ``docs/memory.md``.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.live_bytes import peak_bytes
from benchmarks.harness.options import chosen_device, size
from benchmarks.harness.report import Report
from benchmarks.harness.steps import SMALL, flash_config, step_batch
from benchmarks.harness.timing import Capture
from benchmarks.run import WrongResult
from dsv4_ops.checkpoint.format import weight_bytes
from dsv4_ops.testing.released_model import on_meta, released_model

CLOSE = 0.01
"""Relative tolerance of weights and caches: the allocator rounds up to multiples of 512 bytes."""


@dataclass(kw_only=True)
class MemoryRow:
    """Memory of a part of a run, in GB; None on a CPU, except the computed bytes."""

    part: str  # weights, cache, a step (peak of its temporary tensors), or its CUDA graph
    requests: int | None = None
    tokens: int | None = None
    context: int | None = None
    computed_gb: float | None = None
    allocated_gb: float | None = None  # growth of tensors, as the allocator reports it
    reserved_gb: float | None = None  # growth of the device memory of the allocator
    outside_gb: float | None = None  # other device memory, mostly CUDA's context


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=size, help="default: 8; 2 on a CPU")
    parser.add_argument("--context", type=size, help="of each; default: 128k; 64 on a CPU")
    parser.add_argument("--experts", type=size, default=16, help="default: %(default)s")


def config_of(experts: int, **changed: Any) -> dict[str, Any]:
    """Return the ``config.json`` of four layers of Flash: window, C4, C128, C4."""
    layers = {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1}
    return flash_config(4, **{**layers, "n_routed_experts": experts, **changed})


def step_bytes(config: Mapping[str, Any], requests: int, tokens: int, context: int) -> int:
    """Return the maximum bytes that an eager step holds at once: a decode if ``tokens`` is 1, else
    a prefill. Each request has ``tokens`` new tokens at the end of its context.

    A layer frees its tensors before the next one runs, so more layers of a kind need no more bytes.
    """
    from dsv4_ops.integrations import transformers as v4

    model = v4.patch(on_meta(config))
    cache = v4.PagedCache.for_model(model, max_batch_size=requests, max_cache_len=context)
    return peak_bytes(_step(model, cache, requests, tokens, context))


def _step(
    model: Any, cache: Any, requests: int, tokens: int, context: int
) -> functools.partial[Any]:
    from dsv4_ops.integrations import transformers as v4

    batch = step_batch([tokens] * requests, [context] * requests, cache.device)
    cache.seq_lens.fill_(context)
    run = v4.decode_step if tokens == 1 else v4.prefill_step
    return functools.partial(run, model, batch, cache.tensors)


class Allocator:
    """Measures the growth of a device's allocator; on a CPU, measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.before = (0, 0)
        self.start()

    def start(self) -> None:
        """Measure growth from now on."""
        if self.cuda:
            self.before = self._settled()
            torch.cuda.reset_peak_memory_stats()

    def write(self, row: MemoryRow, *, peak: bool = False) -> MemoryRow:
        """Write the bytes allocated since ``start``, or the peak since then, into the row."""
        if self.cuda:
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            allocated, reserved = most if peak else self._settled()
            free, total = torch.cuda.mem_get_info()
            row.allocated_gb = (allocated - self.before[0]) / 1e9
            row.reserved_gb = (reserved - self.before[1]) / 1e9
            row.outside_gb = (total - free - torch.cuda.memory_reserved()) / 1e9
        return row

    def _settled(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    from dsv4_ops.integrations import transformers as v4

    device = chosen_device(options)
    cpu = device.type == "cpu"
    output = Report(options, device)
    small = SMALL if cpu else {}
    requests = options.requests or (2 if cpu else 8)
    context = options.context or (64 if cpu else 131072)
    config = config_of(options.experts, **small)
    memory = Allocator(device)

    def add(row: MemoryRow) -> None:
        output.add(row)
        print(row, flush=True)

    model = v4.patch(released_model(config, device=device))
    computed = sum(weight_bytes(config).values())
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    if held != computed:
        raise WrongResult(f"memory: the model has {held} bytes of weights, computed {computed}")
    add(_checked(memory.write(MemoryRow(part="weights", computed_gb=computed / 1e9))))
    memory.start()
    cache = v4.PagedCache.for_model(model, max_batch_size=requests, max_cache_len=context)
    computed = sum(cache.memory().values())
    row = MemoryRow(part="cache", requests=requests, context=context, computed_gb=computed / 1e9)
    add(_checked(memory.write(row)))
    for part, tokens in (("decode", 1), ("prefill", min(cache.max_chunk, context))):
        computed = step_bytes(config, requests, tokens, context)
        step = _step(model, cache, requests, tokens, context)
        step()  # compiles kernels, and lets libraries allocate workspaces
        memory.start()
        step()
        sizes = {"requests": requests, "tokens": requests * tokens, "context": context}
        row = MemoryRow(part=f"{part}, eager", **sizes, computed_gb=computed / 1e9)
        add(memory.write(row, peak=True))
    if not cpu:
        sizes = {"requests": requests, "tokens": requests, "context": context}
        row = MemoryRow(part="decode, CUDA graph", **sizes)
        add(_capture(_step(model, cache, requests, 1, context), memory, row))
    output.finish("Memory of 4 layers in the released precision")


def _capture(step: functools.partial[Any], memory: Allocator, row: MemoryRow) -> MemoryRow:
    """Measure the CUDA graph of a compiled decode step, with its pool and its output."""
    compiled = torch.compile(step.func, fullgraph=True, dynamic=False)
    capture = Capture([functools.partial(compiled, *step.args)], before=memory.start)
    memory.write(row)
    capture.graph.replay()
    torch.cuda.synchronize()
    if not bool(capture.outputs[0].isfinite().all()):
        raise WrongResult("memory: the captured step gives values that are not finite")
    return row


def _checked(row: MemoryRow) -> MemoryRow:
    """Return the row if the allocator's bytes agree with the computed bytes; else raise."""
    found, computed = row.allocated_gb, row.computed_gb
    if found is not None and computed and abs(found / computed - 1) > CLOSE:
        raise WrongResult(f"memory: the allocator has {found} GB of {row.part}, not {computed}")
    return row
