"""Run Hugging Face's DeepSeek-V3.2 or GLM-5, whose tokens attend to rows that an indexer selects.

One step prefills two prompts, one shorter and one much longer than a selection. One graph of
torch.compile then decodes both requests. Every layer caches a latent and an indexer key per token.
The tokens are compared with Hugging Face's unpatched model, which expands the keys and
values of the whole context and masks tokens that are not selected.

    python examples/12_deepseek_v32.py                    # minutes, most of them in Inductor
    python examples/12_deepseek_v32.py --eager            # without a compiler
    python examples/12_deepseek_v32.py --family GLM-5
"""

from __future__ import annotations

import argparse
import os

# idle threads must not spin: they would take the core from the compiler
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch._dynamo.utils import counters

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.testing.models import small_dsa_model
from dsv4_ops.testing.text import ByteTokenizer, real_text

PROMPTS, MAX_LEN = (10, 200), 256


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=bounded_int(1, MAX_LEN - max(PROMPTS)), default=24, help="decode steps"
    )
    parser.add_argument("--family", default="V3.2", choices=("V3.2", "GLM-5"))
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    stock = small_dsa_model(args.family, device=args.device)
    model = small_dsa_model(args.family, device=args.device)
    hf.patch(model, kv="fp32", precision="reference")
    cache = hf.PagedCache.for_model(model, max_batch_size=2, max_cache_len=MAX_LEN)
    print(cache)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=args.device)

    text = real_text(sum(PROMPTS))
    prompts = [text[: PROMPTS[0] - 1], text[PROMPTS[0] :][: PROMPTS[1] - 1]]
    texts = [ByteTokenizer().encode(prompt, bos=True) for prompt in prompts]
    lengths, rows = [len(tokens) for tokens in texts], [cache.add(request) for request in (0, 1)]

    def batch_of(counts: list[int]) -> hf.StepBatch:
        """Return the last ``counts`` tokens of the two requests."""
        tokens = [
            token for each, count in zip(texts, counts, strict=True) for token in each[-count:]
        ]
        starts, lens = [0, counts[0], sum(counts)], [len(each) for each in texts]
        ids = torch.tensor(tokens, device=args.device)
        return hf.StepBatch(ids, *(int32(each) for each in (starts, lens, rows)))

    step = hf.decode_step
    if not args.eager:
        print("compiling: minutes, unless Inductor's cache has it", flush=True)
        step = torch.compile(hf.decode_step, fullgraph=True, dynamic=False)
    logits = hf.prefill_step(model, batch_of(lengths), cache)
    for _ in range(args.steps):
        for tokens, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
        logits = step(model, batch_of([1, 1]), cache.tensors)
    cache.raise_if_dropped()  # a graph cannot raise: it counts tokens that do not fit

    wrong = 0
    for tokens, length in zip(texts, lengths, strict=True):
        ids = torch.tensor([tokens], device=args.device)
        best = stock(ids, use_cache=False).logits[0].argmax(-1).tolist()
        pairs = zip(best[length - 1 : -1], tokens[length:], strict=True)
        wrong += sum(stock_token != token for stock_token, token in pairs)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    print(f"{ByteTokenizer().decode(texts[0])!r}")
    print(
        f"shown: graphs = {graphs}, graph breaks = {breaks} in {args.steps} decode steps that "
        f"attend to {model.config.index_topk} of up to {len(texts[1])} tokens; {wrong} tokens "
        "differ from Hugging Face's"
    )
    return int(graphs != (0 if args.eager else 1) or breaks > 0 or wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
