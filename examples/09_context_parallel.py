"""Decode DeepSeek-V3 with a cache that ranks share: each rank stores a part of every context.

Every rank runs the same steps, and ranks store positions round-robin. The tokens equal those of one
process. torchrun starts the ranks, with gloo on CPUs and NCCL on GPUs; without torchrun the script
itself starts two ranks.

    python examples/09_context_parallel.py           # two processes on a CPU, uncompiled
    torchrun --nproc-per-node 4 examples/09_context_parallel.py --device cuda --compile
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist

from dsv4_ops.attention import ContextParallel
from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.testing.models import small_mla_model
from dsv4_ops.testing.text import ByteTokenizer, real_text

# lengths of the prompts (one rank has all 7 tokens of the short one); maximum tokens
PROMPTS, MAX_LEN = (90, 7, 140), 320


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def decode(
    model: torch.nn.Module, steps: int, compiled: bool, device: torch.device
) -> tuple[list[list[int]], hf.PagedCache]:
    """Prefill all prompts in one step, then decode; return all requests' tokens, and the cache."""
    cache = hf.PagedCache.for_model(model, max_batch_size=len(PROMPTS), max_cache_len=MAX_LEN)
    requests, text = [], real_text(sum(PROMPTS))
    for number, length in enumerate(PROMPTS):
        requests.append(ByteTokenizer().encode(text[: length - 1], bos=True))
        text = text[length - 1 :]
        cache.add(number)
    step = torch.compile(hf.decode_step, fullgraph=True, dynamic=False) if compiled else None
    counts, run = [len(tokens) for tokens in requests], hf.prefill_step
    for _ in range(steps):
        ids = [token for tokens, n in zip(requests, counts, strict=True) for token in tokens[-n:]]
        starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
        lens, rows = [len(tokens) for tokens in requests], list(range(len(requests)))
        tensors = (int32(each, device) for each in (starts, lens, rows))
        batch = hf.StepBatch(torch.tensor(ids, device=device), *tensors)
        best = run(model, batch, cache.tensors).argmax(-1).tolist()
        for tokens, token in zip(requests, best, strict=True):
            tokens.append(token)
        counts, run = [1] * len(counts), step or hf.decode_step
    return requests, cache


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=bounded_int(1, MAX_LEN - max(PROMPTS)), default=12)
    parser.add_argument(
        "--interleave", type=bounded_int(1), default=16, help="positions on a rank in turn"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.call([sys.executable, *torchrun, *sys.argv])
    on_gpu = args.device == "cuda"
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"])) if on_gpu else "cpu"
    device = torch.device(device)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    results = []
    for parallel in (None, ContextParallel.of(interleave=args.interleave)):
        model = small_mla_model(device=device)
        hf.patch(model, kv="fp32", precision="reference", parallel=parallel)
        compiled = args.compile and parallel is not None
        results.append(decode(model, args.steps, compiled, device))
    (want, whole), (got, part) = results
    wrong = sum(x != y for a, b in zip(want, got, strict=True) for x, y in zip(a, b, strict=True))
    share = part.memory()["latents"] / whole.memory()["latents"]
    if dist.get_rank() == 0:
        print(part)
        print(
            f"shown: {dist.get_world_size()} ranks decode the tokens of one process, {wrong} "
            f"differ; each holds {share:.0%} of the latent rows"
        )
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
