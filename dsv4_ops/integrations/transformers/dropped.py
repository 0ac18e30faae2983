"""Tokens that a step cannot store: refused where the host may read values, counted elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch
from dsv4_ops.ops.slot_mapping import compressed_slot_mapping


def storable(tokens: TokenMap, cache: CacheTensors, block_tokens: int) -> TokenMap:
    """The tokens below ``max_cache_len`` whose block is reserved; the others become padding.

    Args:
        tokens: Row of the cache and position of every token.
        cache: The cache that they go to.
        block_tokens: Positions that a block of the pool covers.
    """
    slots = compressed_slot_mapping(
        tokens.positions,
        tokens.req_indices,
        cache.tables.compressed,
        tokens.positions,  # every token that exists is stored
        block_size=block_tokens,
        compress_ratio=1,
    )
    kept = (slots >= 0) & (tokens.positions < longest_request(cache))
    return TokenMap(*(torch.where(kept, values, -1) for values in tokens))


def longest_request(cache: CacheTensors) -> int:
    """Its ``max_cache_len``."""
    return cache.rope.window.shape[0]


def count_dropped(cache: CacheTensors, wanted: Tensor, stored: Tensor) -> None:
    """Add to the counter of a cache the tokens of a step that it did not store.

    Args:
        cache: The cache.
        wanted: Tokens to store, in any parts, which add up to them.
        stored: Whether each token of the step is.
    """
    # one sum of both: one kernel
    parts = torch.cat([wanted.to(torch.int32), -stored.to(torch.int32)])
    cache.dropped.add_(parts.sum())


def in_vocabulary(tokens: Tensor, vocab_size: int) -> Tensor:
    """Which ids exist."""
    return (tokens >= 0) & (tokens < vocab_size)


def values_are_free(*tensors: Tensor) -> bool:
    """Whether the host may look at values and stop nothing: an eager call, tensors of a CPU."""
    if torch.compiler.is_compiling():
        return False
    # no subclass: fake ones have no values
    return all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors)


def may_wait(tensor: Tensor) -> bool:
    """Whether the host may look at values, if only once the device has computed them."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    return tensor.device.type != "meta" and not (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def check_batch(
    op: str, batch: StepBatch, cache: CacheTensors, vocab_size: int, sizes: tuple[int, int]
) -> None:
    """Refuse what a step could not store, by the values of its tensors.

    Args:
        op: Public function that was called.
        batch: The step.
        cache: The cache that it goes to.
        vocab_size: Ids that exist.
        sizes: Positions of a block of the pool, and most tokens of a request in a step.
    """
    starts = batch.query_start_loc.tolist()
    _check_starts(op, starts, batch.tokens.shape[0])
    owners: dict[int, int] = {}
    for request, (row, length) in enumerate(
        zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        first, last = starts[request], starts[request + 1]
        if last == first or length <= 0 or not 0 <= row < cache.tables.swa.shape[0]:
            continue
        if row in owners:
            rule = "have a row of its own for every request"
            found = f"row {row} for requests {owners[row]} and {request}"
            raise refusal(ValueError, op, "batch.rows", rule, found, "Add each of them")
        owners[row] = request
        _check_request(op, request, row, last - first, length, cache, sizes)
        ids = batch.tokens[first:last]
        if not bool(in_vocabulary(ids, vocab_size).all()):
            raise unknown_id(op, "batch.tokens", ids, vocab_size)


def unknown_id(op: str, name: str, ids: Tensor, vocab_size: int) -> ValueError:
    """The error for ``ids``, one of which does not exist."""
    wrong = int(ids[~in_vocabulary(ids, vocab_size)][0])
    rule = f"be in 0..{vocab_size - 1}, the vocabulary of the model"
    return refusal(ValueError, op, name, rule, wrong, "Pass ids of the model's tokenizer")


def _check_starts(op: str, starts: Sequence[int], num_tokens: int) -> None:
    name = "batch.query_start_loc"
    advice = "Pass the first token of every request and one past the last"
    if starts[0] != 0:
        raise refusal(ValueError, op, name, "begin with 0", starts[0], advice)
    for before, after in pairwise(starts):
        if after < before:
            found = f"{after} after {before}"
            raise refusal(ValueError, op, name, "not decrease", found, advice)
    if starts[-1] > num_tokens:
        rule = f"end at the {num_tokens} of batch.tokens, or before its padding"
        raise refusal(ValueError, op, name, rule, starts[-1], advice)


def _check_request(
    op: str,
    request: int,
    row: int,
    count: int,
    length: int,
    cache: CacheTensors,
    sizes: tuple[int, int],
) -> None:
    block_tokens, longest = sizes
    name, of_request = "batch.seq_lens", f"{length} of request {request}"
    if length < count:
        rule = f"count the {count} tokens that request {request} has in the step"
        advice = "Pass the tokens of every request, those of the step included"
        raise refusal(ValueError, op, name, rule, length, advice)
    most = longest_request(cache)
    if length > most:
        advice = "Make the cache with a larger max_cache_len"
        raise refusal(
            ValueError,
            op,
            name,
            f"be at most max_cache_len of the cache = {most}",
            of_request,
            advice,
        )
    if count > longest:
        rule = f"give a request at most max_chunk tokens in a step, here {longest}"
        advice = "Cut the request into chunks, or make the cache with a larger max_chunk"
        found = f"{count} of request {request}"
        raise refusal(ValueError, op, "batch.query_start_loc", rule, found, advice)
    blocks = cache.tables.compressed[row, (length - count) // block_tokens :]
    held = blocks[: (length - 1) // block_tokens + 1 - (length - count) // block_tokens]
    if bool((held < 0).any()):
        rule = f"have blocks for all tokens of row {row}"
        raise refusal(ValueError, op, name, rule, of_request, "Call reserve before the step")
