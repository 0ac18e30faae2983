"""Find the stages of an eager step and the kernels of a compiled step, for ``07_trace.py``."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from dsv4_ops.integrations import transformers as v4

REST = "metadata: slots, windows, pages"


class Stages:
    """Measures the seconds of each stage with module hooks, except the seconds of nested stages."""

    def __init__(self, model: Any) -> None:
        self.seconds: Counter[str] = Counter()
        self.open: list[tuple[str, ExitStack]] = []
        self.device, self.last = model.device.type, 0.0
        body = model.model
        self.watch("embedding, last norm, logits", body.embed_tokens, body.norm, model.lm_head)
        self.watch("hyper-connections and norms", body.hc_head, *body.layers)
        for layer in body.layers:
            self.watch("attention ops", layer.self_attn)
            named = layer.self_attn.named_modules()
            self.watch("projections of attention", *(m for name, m in named if projects(name, m)))
            self.watch("experts and routers", layer.mlp)

    def watch(self, stage: str, *modules: nn.Module) -> None:
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.begin(stage))
            module.register_forward_hook(lambda *_: self.end())

    def begin(self, stage: str) -> None:
        self.tick()
        stack = ExitStack()
        stack.enter_context(record_function(stage))
        self.open.append((stage, stack))

    def end(self) -> None:
        self.tick()
        self.open.pop()[1].close()

    def run(self, model: Any, batch: v4.StepBatch, cache: v4.PagedCache) -> None:
        self.begin(REST)  # the time outside of all modules
        v4.decode_step(model, batch, cache.tensors)
        self.end()

    def tick(self) -> None:
        """Add the time since the last change to the running stage."""
        finish(self.device)
        now = time.perf_counter()
        if self.open:
            self.seconds[self.open[-1][0]] += now - self.last
        self.last = now


def projects(name: str, module: nn.Module) -> bool:
    """Return whether a step calls the module. A step calls the compressors' projections only if
    they have hooks; else it multiplies by their weights in float32. Ops compute the other norms."""
    if name in ("q_a_norm", "kv_norm"):
        return True
    of_compressor = "compressor" in name and name.endswith(("kv_proj", "gate_proj"))
    return isinstance(module, nn.Linear) and not of_compressor


def name_kernels() -> None:
    """Record the CPU kernels of the compiled step, functions of a generated module, in the trace.
    The profiler records GPU kernels itself."""
    from torch._inductor.codecache import PyCodeCache

    def named(name: str, kernel: Any) -> Any:
        def call(*args: Any) -> None:
            with record_function(name):
                kernel(*args)

        return call

    for module in PyCodeCache.modules:
        for name, value in list(vars(module).items()):
            if name.startswith("cpp_fused"):
                setattr(
                    module, name, named(f"fused {name.rpartition('_')[2]}: {name[10:70]}", value)
                )


def kernel_seconds(profiler: profile, device: str) -> Counter[str]:
    """Return the seconds of the compiled steps' kernels, by name."""
    events, on_gpu = profiler.events(), device == "cuda"
    end = max(e.time_range.end for e in events if e.name.startswith("compiled step"))
    found: Counter[str] = Counter()
    for event in events:
        if event.time_range.end <= end and (event.device_type == DeviceType.CUDA) == on_gpu:
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            host = event.name.startswith("compiled step")
            found["Python between the kernels" if host else event.name[:80]] += spent / 1e6
    return found


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
