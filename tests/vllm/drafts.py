"""Drafts by the checkpoint's own layer in one vLLM engine, in a process of its own."""

import json
import sys
from typing import Any

import torch

from dsv4_ops.integrations import transformers as v4
from tests.vllm.engine import compared, core_of, greedy, make_engine, prompts, runner_of

DRAFTS = 2


def main(path: str, count: int, new: int, **settings: Any) -> None:
    """After each step, compare the drafts with ``speculative_prefill`` over the text."""
    drafts = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    llm = make_engine(path, speculative_config=drafts, **settings)
    scheduler, found = core_of(llm).scheduler, []
    update = scheduler.update_draft_token_ids

    def kept(drafted: Any) -> None:
        for name, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and request.num_output_tokens and tokens:  # no prompt token
                found.append((list(request.all_token_ids), list(tokens)))
        update(drafted)

    scheduler.update_draft_token_ids = kept
    given = prompts(count, shared=True)
    texts = [{"prompt_token_ids": prompt} for prompt in given]
    outs = llm.generate(texts, greedy(new), use_tqdm=False)
    model = runner_of(llm).get_model()
    error, wrong = compared(model, outs)
    others = sum(alone(model, text, new_drafts) for text, new_drafts in found)
    cached = sum(out.num_cached_tokens or 0 for out in outs)
    seen = {"error": error, "wrong": wrong, "drafts": len(found), "others": others}
    print(json.dumps({**seen, "cached": cached}))


def alone(model: Any, text: list[int], drafts: list[int]) -> int:
    """Return whether a step over the text alone drafts other tokens."""
    cache = v4.PagedCache.for_model(
        model.hf, max_batch_size=1, max_cache_len=1024, max_chunk=1024, next_n=1 + DRAFTS
    )
    cache.add(0, len(text) + DRAFTS)
    numbers = torch.tensor([0, len(text) - 1], dtype=torch.int32)
    batch = v4.StepBatch(torch.tensor(text[:-1]), numbers, numbers[1:], numbers[:1])
    following = torch.tensor(text[-1:])
    step = v4.speculative_prefill(model.hf, batch, cache, num_drafts=DRAFTS, following=following)
    return int(step.batch.tokens[1:].tolist() != drafts)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
