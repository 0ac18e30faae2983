"""Run a patched decode step with torch-tensorrt, with projections and experts in engines.

Our ops run outside of the engines. They write to the caches, which are inputs of the graph, and
`enable` preserves these writes. The script compares logits with those of the same model without
engines. We never ran the script with TensorRT (docs/tensorrt.md); tests compile it without engines.

    python examples/10_tensorrt.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import tensorrt, transformers as v4
from dsv4_ops.integrations.transformers.steps.export import DecodeModule, padding_batch
from dsv4_ops.testing.models import small_model

REQUESTS, MAX_LEN = 2, 512


def compile_step(model: Any, cache: v4.PagedCache, **options: Any) -> Callable[..., Tensor]:
    """Compile the decode step of one token per request into engines and PyTorch segments."""
    import torch_tensorrt

    inputs = v4.decode_inputs(padding_batch(cache, REQUESTS, REQUESTS), cache)
    module = DecodeModule(model, cache, state_rings=False)
    program = torch.export.export(module, inputs, strict=False)
    return torch_tensorrt.dynamo.compile(program, arg_inputs=inputs, **options)


def compare(model: Any, step: Callable[..., Tensor], cache: v4.PagedCache, steps: int) -> float:
    """Return the maximum difference from PyTorch's logits, over steps that read earlier writes."""
    plain = v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=MAX_LEN)
    device = cache.device
    tokens, worst = torch.tensor([5, 6], device=device), 0.0
    rows = [
        torch.tensor([each.add(name, num_tokens=steps) for name in range(REQUESTS)]).int()
        for each in (cache, plain)
    ]
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device)
    for length in range(1, steps + 1):
        lens = torch.full((REQUESTS,), length, dtype=torch.int32, device=device)
        ours, same = (v4.StepBatch(tokens, starts, lens, each.to(device)) for each in rows)
        found = step(*v4.decode_inputs(ours, cache))
        wanted = v4.decode_step(model, same, plain, state_rings=False)
        worst = max(worst, (found - wanted).abs().max().item())
        tokens = wanted.argmax(-1)
    return worst


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=bounded_int(1, MAX_LEN), default=16)
    args = parser.parse_args()
    try:
        tensorrt.enable()
    except ImportError as error:
        print(f"needs torch-tensorrt: {error}")
        return 1
    model = v4.patch(small_model(device="cuda"), kv="fp32", precision="reference")
    cache = v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=MAX_LEN)
    step = compile_step(model, cache, min_block_size=1, disable_tf32=True)
    engines = sum("_run_on_acc" in name for name, _ in step.named_children())
    worst = compare(model, step, cache, args.steps)
    print(
        f"shown: {args.steps} steps through {engines} engines, caches written in place; logits "
        f"within {worst:.1e} of PyTorch's"
    )
    return int(engines == 0 or worst > 1e-2)


if __name__ == "__main__":
    raise SystemExit(main())
