"""Patch a Hugging Face DeepSeek-V4 with one call: decoding compiles to one graph.

Four prompts of different lengths share a step of fixed shape. A request takes three tokens per step
until the end of its prompt, then one. The batch is ragged and changes, and lengths pass the window
(128 tokens) and the compressors' boundaries, but torch.compile runs once. At the end, the tokens
are compared with the tokens of Hugging Face's model, unpatched and uncompiled.

    python examples/02_compile_decode.py
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.text import ByteTokenizer, real_text

ROWS, TOKENS = 6, 16  # requests of a step, of which two are padding, and tokens of a step
PROMPTS, CHUNK = (3, 40, 100, 150), 3  # lengths of the prompts; prompt tokens per step


@dataclass
class Request:
    row: int  # row of the cache
    tokens: list[int]  # the prompt, then decoded tokens
    stored: int = 0  # tokens that the cache holds


def next_batch(requests: list[Request], device: str) -> v4.StepBatch:
    """Return the next tokens of every request, then padding up to the size of the step."""
    tokens: list[int] = []
    starts, lens, rows = [0], [0] * ROWS, [-1] * ROWS
    for place, request in enumerate(requests):
        chunk = request.tokens[request.stored : request.stored + CHUNK]
        tokens += chunk
        starts.append(len(tokens))
        lens[place], rows[place] = request.stored + len(chunk), request.row
    starts += starts[-1:] * (ROWS - len(requests))
    tokens += [0] * (TOKENS - len(tokens))
    return v4.StepBatch(
        torch.tensor(tokens, device=device),
        *(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lens, rows)),
    )


def take(requests: list[Request], batch: v4.StepBatch, logits: Tensor) -> None:
    """Append the greedy token to every request whose tokens are all stored now."""
    best, stops = logits.argmax(-1).tolist(), batch.query_start_loc.tolist()[1:]
    for request, stop, stored in zip(requests, stops, batch.seq_lens.tolist(), strict=False):
        request.stored = stored
        if stored == len(request.tokens):
            request.tokens.append(best[stop - 1])


def differing(requests: list[Request], device: str) -> int:
    """Count the tokens that differ from Hugging Face's model, which computes each text in one
    call."""
    stock, wrong = small_model(device=device), 0
    for request, length in zip(requests, PROMPTS, strict=True):
        ids = torch.tensor([request.tokens], device=device)
        best = stock(ids, use_cache=False).logits[0].argmax(-1).tolist()
        pairs = zip(best[length - 1 : -1], request.tokens[length:], strict=True)
        wrong += sum(ours != hf for hf, ours in pairs)
    return wrong


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=bounded_int(1, 256 - max(PROMPTS)),
        default=64,
        help="steps in which all requests decode",
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    model = v4.patch(
        small_model(device=args.device), kv="fp32", precision="reference", batch_invariant=True
    )
    cache = v4.PagedCache.for_model(
        model, max_batch_size=ROWS, max_cache_len=512, max_chunk=TOKENS, num_blocks=4
    )
    text, requests = real_text(sum(PROMPTS)), []
    for length in PROMPTS:
        prompt, text = text[: length - 1], text[length - 1 :]
        row = cache.add(f"request {len(requests)}", num_tokens=PROMPTS[-1] + args.steps)
        requests.append(Request(row, ByteTokenizer().encode(prompt, bos=True)))

    step = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
    print("compiling: a minute or two, unless Inductor's cache has it", flush=True)
    begun, steps, seconds = time.perf_counter(), 0, 0.0
    while len(requests[-1].tokens) <= PROMPTS[-1] + args.steps:  # the longest prompt decodes last
        batch = next_batch(requests, args.device)
        take(requests, batch, step(model, batch, cache.tensors))
        steps += 1
        if steps == 1:
            first, seconds = counters["stats"]["unique_graphs"], time.perf_counter()
            print(f"first step after {seconds - begun:.0f} s: {first} graph", flush=True)
        if steps % 32 == 0:
            print(f"step {steps}: lengths {[len(r.tokens) for r in requests]}", flush=True)
    cache.raise_if_dropped()  # a graph cannot raise: it counts tokens that do not fit
    each = (time.perf_counter() - seconds) / (steps - 1)
    graphs = counters["stats"]["unique_graphs"]
    breaks, wrong = sum(counters["graph_break"].values()), differing(requests, args.device)
    print(f"{ByteTokenizer().decode(requests[1].tokens)!r}")
    print(f"{steps} steps of {each * 1e3:.1f} ms, Inductor's cache: {dict(counters['inductor'])}")
    print(
        f"shown: graphs = {graphs}, graph breaks = {breaks}, recompiles = {graphs - first} in "
        f"{steps} steps; {wrong} tokens differ from Hugging Face's"
    )
    return int(graphs != 1 or breaks > 0 or wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
