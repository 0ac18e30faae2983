"""Load, patch and run DeepSeek-V4 in the released precision.

Without a folder the script writes a tiny checkpoint in the released format, with random weights,
and loads it. FP8 and FP4 weights stay as they are in the files. The decode step is compiled by
kind of layer, one part after the other, and stored for the next process.

    python examples/11_checkpoint.py            # minutes, most of them in Inductor
    python examples/11_checkpoint.py --eager    # without a compiler
    python examples/11_checkpoint.py FOLDER --device cuda --cache-file step.cache
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from dsv4_ops.checkpoint.format import check_checkpoint
from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.checkpoint import write_checkpoint

PROMPT, MAX_LEN = 12, 256


class Clock:
    """Prints a line after each task: the seconds that it took, and its name."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def done(self, what: str) -> None:
        now = time.perf_counter()
        print(f"{now - self.start:7.1f} s  {what}", flush=True)
        self.start = now


def decode(
    step: Callable[..., Tensor], cache: v4.PagedCache, tokens: list[int], count: int, device: str
) -> list[int]:
    """Append ``count`` tokens, each the most likely token after the earlier ones."""
    tokens = list(tokens)
    for _ in range(count):
        cache.reserve("request", len(tokens))
        starts, lens, rows = (
            torch.tensor(each, dtype=torch.int32, device=device)
            for each in ([0, 1], [len(tokens)], [cache.requests["request"]])
        )
        batch = v4.StepBatch(torch.tensor(tokens[-1:], device=device), starts, lens, rows)
        tokens.append(int(step(batch, cache).argmax(-1)))
    return tokens


def prefilled(model: Any, tokens: list[int], device: str) -> tuple[v4.PagedCache, int]:
    """Prefill a cache with the prompt; return the cache and the next token."""
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=MAX_LEN)
    cache.add("request", num_tokens=len(tokens))
    starts, lens, rows = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([0, len(tokens)], [len(tokens)], [cache.requests["request"]])
    )
    batch = v4.StepBatch(torch.tensor(tokens, device=device), starts, lens, rows)
    return cache, int(v4.prefill_step(model, batch, cache).argmax(-1))


@torch.no_grad()
def run(folder: Path, args: argparse.Namespace) -> int:
    clock = Clock()
    info = check_checkpoint(folder)
    clock.done(f"checked {info.num_tensors} tensors, {info.num_bytes / 1e9:.3f} GB")
    model = v4.load_quantized(folder, scales=False, device_map=args.device)
    clock.done("loaded")
    v4.patch(model)
    held = sum(weight.nbytes for weight in model.state_dict().values())
    clock.done(f"patched; weights {held / 1e9:.3f} GB, {info.expert_dtype} experts as in the files")
    prompt = list(range(2, 2 + PROMPT))
    ids = torch.tensor([prompt], device=args.device)
    settings = {"max_new_tokens": args.tokens + 1, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **settings)[0].tolist()
    clock.done(f"generated {args.tokens + 1} tokens")
    cache, first = prefilled(model, prompt, args.device)
    names: list[str] = []
    step: Callable[..., Tensor] = partial(v4.decode_step, model)
    if not args.eager:

        def note(name: str) -> None:
            names.append(name)
            print(f"           compiling {name}", flush=True)

        step = v4.compile_step(model, mode="regional", cache_file=args.cache_file, on_part=note)
    tokens = decode(step, cache, [*prompt, first], args.tokens, args.device)
    clock.done(f"decoded {args.tokens} tokens")
    wrong = sum(ours != other for ours, other in zip(tokens, expected, strict=True))
    print(
        f"shown: {model.config.num_hidden_layers} layers with {info.expert_dtype} experts on "
        f"{args.device}, {len(names)} compiled parts; {wrong} tokens differ from those of generate"
    )
    # compiled code rounds differently, and two bf16 logits may be equal
    return int(args.eager and wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of a checkpoint; default: a tiny one")
    parser.add_argument(
        "--tokens",
        type=bounded_int(1, MAX_LEN - PROMPT - 1),
        default=4,
        help="decoded after the prompt",
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--cache-file", type=Path, help="for compiled code")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.folder is not None:
        return run(args.folder, args)
    with tempfile.TemporaryDirectory() as folder:
        return run(write_checkpoint(folder), args)


if __name__ == "__main__":
    raise SystemExit(main())
