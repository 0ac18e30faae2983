"""Drafts by the checkpoint's own layer in one vLLM engine, in a process of its own."""

import json
import sys
from itertools import pairwise
from typing import Any

import torch

from dsv4_ops.integrations import transformers as v4
from tests.helpers import i32
from tests.vllm.engine import compared, core_of, greedy, make_engine, prompts, runner_of

DRAFTS = 2


def main(path: str, count: int, new: int, **settings: Any) -> None:
    """Compare the drafts after each step with those of ``speculative_prefill`` over the text.

    At the end of a chunk, vLLM gives the layer the prompt's last token instead of the next token.
    """
    drafts = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    llm = make_engine(path, speculative_config=drafts, **settings)
    scheduler, found = core_of(llm).scheduler, []
    ends: dict[str, list[int]] = {}
    schedule, update = scheduler.schedule, scheduler.update_draft_token_ids

    def noted(*args: Any) -> Any:
        planned = schedule(*args)
        for name in planned.num_scheduled_tokens:
            request = scheduler.requests[name]
            if request.num_computed_tokens < request.num_prompt_tokens:
                ends.setdefault(name, []).append(request.num_computed_tokens)
        return planned

    def kept(drafted: Any) -> None:
        for name, tokens in zip(drafted.req_ids, drafted.draft_token_ids, strict=True):
            request = scheduler.requests.get(name)
            if request is not None and request.num_output_tokens and tokens:  # no part of a prompt
                text, prompt = list(request.all_token_ids), request.prompt_token_ids
                found.append((text, ends.get(name, []), prompt[-1], list(tokens)))
        update(drafted)

    scheduler.schedule, scheduler.update_draft_token_ids = noted, kept
    texts = [{"prompt_token_ids": prompt} for prompt in prompts(count, shared=True)]
    outs = llm.generate(texts, greedy(new), use_tqdm=False)
    model = runner_of(llm).get_model()
    error, wrong = compared(model, outs)
    others = sum(alone(model, *each) for each in found)
    cached = sum(out.num_cached_tokens or 0 for out in outs)
    seen = {"error": error, "wrong": wrong, "drafts": len(found), "others": others}
    print(json.dumps({**seen, "cached": cached, "chunks": sum(map(len, ends.values()))}))


def alone(model: Any, text: list[int], ends: list[int], last: int, drafts: list[int]) -> int:
    """Return 1 if ``speculative_prefill`` drafts other tokens after this text, else 0. Its chunks
    end at ``ends``, where the draft layer gets the token ``last``."""
    cache = v4.PagedCache.for_model(
        model.hf, max_batch_size=1, max_cache_len=1024, max_chunk=1024, next_n=1 + DRAFTS
    )
    cache.add(0, len(text) + DRAFTS)
    for start, end in pairwise((0, *ends, len(text) - 1)):
        numbers = i32([0, end - start]), i32([end]), i32([0])
        batch = v4.StepBatch(torch.tensor(text[start:end]), *numbers)
        rest = {"following": torch.tensor(text[-1:] if end == len(text) - 1 else [last])}
        step = v4.speculative_prefill(model.hf, batch, cache, num_drafts=DRAFTS, **rest)
    return int(step.batch.tokens[1:].tolist() != drafts)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
