"""Decode ragged requests with Hugging Face's DeepSeek-V3, a paged latent cache and one graph.

One step prefills three prompts of different lengths. Then all requests decode; one request ends and
gives its row to a new request, but torch.compile runs once. Decodes attend to latent rows with
absorbed queries: no key or value of the context is expanded. At the end, the tokens are compared
with the tokens of Hugging Face's model, unpatched and uncompiled.

    python examples/08_deepseek_v3.py            # two minutes or three, most of them in Inductor
    python examples/08_deepseek_v3.py --eager    # without a compiler
    python examples/08_deepseek_v3.py --version 2
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
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.testing.models import small_mla_model
from dsv4_ops.testing.text import ByteTokenizer, real_text

ROWS, MAX_LEN = 4, 256  # requests of a step, of which one is padding; maximum tokens of a request
PROMPTS = (90, 7, 40, 25)  # lengths; the last prompt gets the row of the request that ends


@dataclass
class Request:
    name: str
    tokens: list[int]  # the prompt, then decoded tokens
    prompt: int  # length of the prompt


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def batch_of(
    requests: list[Request], counts: list[int], cache: hf.PagedCache, device: str
) -> hf.StepBatch:
    """Return the last ``counts`` tokens of every request, then padding requests of one token."""
    padding = ROWS - len(requests)
    tokens, starts, lens, rows = [], [0], [], []
    for request, count in zip(requests, counts, strict=True):
        cache.reserve(request.name, len(request.tokens))
        tokens += request.tokens[-count:]
        starts.append(len(tokens))
        lens.append(len(request.tokens))
        rows.append(cache.requests[request.name])
    starts += [starts[-1]] * padding
    numbers = (starts, lens + [0] * padding, rows + [-1] * padding)
    ids = torch.tensor(tokens + [0] * padding, device=device)
    return hf.StepBatch(ids, *(int32(each, device) for each in numbers))


def differing(request: Request, stock: torch.nn.Module, device: str) -> int:
    """Count the tokens that differ from Hugging Face's model, which computes the text in one
    call."""
    ids = torch.tensor([request.tokens], device=device)
    best = stock(ids, use_cache=False).logits[0].argmax(-1).tolist()
    pairs = zip(best[request.prompt - 1 : -1], request.tokens[request.prompt :], strict=True)
    return sum(stock != patched for stock, patched in pairs)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=bounded_int(2, MAX_LEN - max(PROMPTS)), default=32, help="decode steps"
    )
    parser.add_argument("--version", type=bounded_int(2, 3), default=3, help="of DeepSeek")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    stock = small_mla_model(args.version, device=args.device)
    model = small_mla_model(args.version, device=args.device)
    hf.patch(model, kv="fp32", precision="reference")
    cache = hf.PagedCache.for_model(
        model, max_batch_size=ROWS, max_cache_len=MAX_LEN, num_blocks=12
    )
    print(cache)
    text, requests = real_text(sum(PROMPTS)), []
    for number, length in enumerate(PROMPTS):
        prompt, text = text[: length - 1], text[length - 1 :]
        tokens = ByteTokenizer().encode(prompt, bos=True)
        requests.append(Request(f"request {number}", tokens, len(tokens)))

    def prefill(new: list[Request]) -> None:
        for request in new:
            cache.add(request.name, num_tokens=request.prompt)
        counts = [request.prompt for request in new]
        logits = hf.prefill_step(model, batch_of(new, counts, cache, args.device), cache)
        for request, token in zip(new, logits.argmax(-1).tolist(), strict=False):
            request.tokens.append(token)

    live = requests[:-1]
    prefill(live)
    step = hf.decode_step
    if not args.eager:
        print("compiling: a minute or two, unless Inductor's cache has it", flush=True)
        step = torch.compile(hf.decode_step, fullgraph=True, dynamic=False)
    seconds = 0.0
    for number in range(args.steps):
        if number == args.steps // 2:
            cache.free(live.pop(0).name)
            prefill(requests[-1:])
            live.append(requests[-1])
        batch = batch_of(live, [1] * len(live), cache, args.device)
        begun = time.perf_counter()
        best = step(model, batch, cache.tensors).argmax(-1).tolist()
        seconds += (time.perf_counter() - begun) * (number > 0)
        for request, token in zip(live, best, strict=False):
            request.tokens.append(token)
    cache.raise_if_dropped()  # a graph cannot raise: it counts tokens that do not fit
    wrong = sum(differing(request, stock, args.device) for request in requests)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    print(f"{ByteTokenizer().decode(requests[1].tokens)!r}")
    print(f"{args.steps} steps of {seconds / (args.steps - 1) * 1e3:.1f} ms")
    print(
        f"shown: graphs = {graphs}, graph breaks = {breaks} in {args.steps} decode steps of a "
        f"changing batch; {wrong} tokens differ from Hugging Face's"
    )
    return int(graphs != (0 if args.eager else 1) or breaks > 0 or wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
