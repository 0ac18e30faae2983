"""Prefills of ``generate`` from CUDA graphs, which hide the host time of launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.integrations.transformers.generation import kept
from dsv4_ops.integrations.transformers.generation.kept import KeptCache, KeptStep
from dsv4_ops.integrations.transformers.generation.prompts import MASK, first_column, whole_mask
from dsv4_ops.integrations.transformers.tensors import StepBatch, in_vocabulary

_INPUTS = (MASK, "position_ids", "logits_to_keep", "use_cache")
_POSITIONS = (torch.int64, torch.int32)


def chunks(
    prompts: Sequence[Tensor], most: int, device: torch.device
) -> Iterator[tuple[StepBatch, list[int]]]:
    """Yield steps of at most ``most`` tokens per prompt. With each step, yield how many tokens of
    every prompt have run when the step ends.

    The function splits prompts as if they had padding on the left: all prompts end in the last
    step, and a short prompt begins in a later step.
    """
    sizes = [len(prompt) for prompt in prompts]
    rows = torch.arange(len(prompts), dtype=torch.int32, device=device)
    for begin in range(0, max(sizes), most):
        columns = min(most, max(sizes) - begin)
        stops = [max(size - max(sizes) + begin + columns, 0) for size in sizes]
        parts = [
            prompt[max(stop - columns, 0) : stop]
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        starts = torch.tensor([0, *map(len, parts)], device="cpu").cumsum(0)
        lens = torch.tensor(stops, dtype=torch.int32, device=device)
        yield (
            StepBatch(torch.cat(parts).to(device), starts.to(device, torch.int32), lens, rows),
            stops,
        )


def bucket(num_tokens: int) -> int:
    """Round a number of tokens up to the size of a kept step. A number above the largest size stays
    the same."""
    if num_tokens > kept.MOST_TOKENS:
        return num_tokens
    return kept.rounded(num_tokens, kept.LEAST_TOKENS)


def prefilled(
    model: Any, ids: Tensor, config: Any, inputs: dict[str, Any], cache: KeptCache
) -> Tensor | None:
    """Run the prompts of a call of ``generate`` with steps that the model keeps.

    Args:
        model: The patched model.
        ids: Prompts with padding, [batch, columns].
        config: The ``GenerationConfig`` of the call.
        inputs: Keyword arguments of the model.
        cache: An empty cache.

    Returns:
        The logits of the prompts' last tokens, [batch, vocab_size]; or None, if Hugging Face's
        method must run the prompts or raise its own error.
    """
    paged, step = cache.cache, cache.prefill
    mask = whole_mask(ids, config, inputs, paged)
    first_column(mask, ids.shape[1], paged)
    if mask.shape != ids.shape or not _are_plain(model, ids, mask != 0, inputs):
        return None
    if step is None or not step.can_be_captured():
        return None
    prompts = [row[is_token] for row, is_token in zip(ids.to(torch.int64), mask != 0, strict=True)]
    most = min(config.prefill_chunk_size or cache.chunk, cache.chunk)
    batches = list(chunks(prompts, most, paged.device))
    if max(len(batch.tokens) for batch, _ in batches) > kept.MOST_TOKENS:
        return None
    steps: dict[tuple[int, bool], KeptStep] = {}
    try:
        for number, (batch, _) in enumerate(batches):
            tokens, longest = bucket(len(batch.tokens)), min(most, ids.shape[1])
            skips = model.dsv4_ops_spec.skips_contexts(tokens, len(ids), longest)
            key = tokens, number > 0 or not skips
            if key not in steps:
                steps[key] = cache.step(step, len(ids), *key)
            logits = steps[key](batch, paged.tensors)
    except (torch.OutOfMemoryError, kept.NoGraph) as error:
        steps.clear()  # graphs need more memory than eager steps
        if paged.spec.parallel is not None and not isinstance(error, kept.NoGraph):
            raise  # the other ranks have run the step
    else:
        return logits
    cache.drop_prefills()
    return None


def _are_plain(model: Any, ids: Tensor, is_token: Tensor, inputs: dict[str, Any]) -> bool:
    """Whether ids are the only input, all ids are in the vocabulary, and the position of each token
    is the number of tokens before it."""
    known = (*_INPUTS, cache_argument())
    if any(value is not None and name not in known for name, value in inputs.items()):
        return False
    plain = in_vocabulary(ids, model.config.vocab_size)
    positions = inputs.get("position_ids")
    if positions is not None:
        if positions.shape[1:] != ids.shape[1:] or positions.dtype not in _POSITIONS:
            return False
        plain = plain & (positions == is_token.cumsum(1) - 1)
    return bool((plain | ~is_token).all())
