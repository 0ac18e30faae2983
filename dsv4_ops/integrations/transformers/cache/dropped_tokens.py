"""Tokens that a step cannot store: eager CPU calls raise, and other calls count the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dsv4_ops.attention.metadata import token_slots
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch, in_vocabulary


def storable(tokens: TokenMap, cache: CacheTensors, block_tokens: int) -> TokenMap:
    """Turn tokens beyond ``max_cache_len`` or without a block into padding.

    ``block_tokens`` is the number of positions per block of the pool.
    """
    slots = token_slots(tokens, cache.tables.pool, block_tokens)
    fits = (slots >= 0) & (tokens.positions < longest_request(cache))
    return TokenMap(*(torch.where(fits, values, -1) for values in tokens))


def longest_request(cache: CacheTensors) -> int:
    """Return ``max_cache_len`` of the cache."""
    return cache.rope.num_positions


def count_dropped(cache: CacheTensors, counts: Tensor, is_stored: Tensor) -> None:
    """Add the number of tokens that a step did not store to the cache's counter.

    The sum of ``counts`` is the number of the step's tokens; ``is_stored`` has one value per token.
    """
    # one reduction kernel instead of two
    parts = torch.cat([counts.to(torch.int32), -is_stored.to(torch.int32)])
    cache.dropped.add_(parts.sum())


def values_are_free(*tensors: Tensor) -> bool:
    """Whether the host can read values without synchronising, as in eager calls on a CPU."""
    if torch.compiler.is_compiling():
        return False
    # compare the exact type, because fake tensors have no values
    return all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors)


def may_wait(tensor: Tensor) -> bool:
    """Whether the host can read values, even if it must synchronise with the device."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    return tensor.device.type != "meta" and not (
        tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def check_batch(
    op: str, batch: StepBatch, cache: CacheTensors, vocab_size: int, sizes: tuple[int, int]
) -> None:
    """Raise if the cache cannot store a token of the step. The check reads values of tensors.

    ``sizes`` has the positions per block of the pool, and the maximum tokens of a request in a
    step.
    """
    starts = batch.query_start_loc.tolist()
    _check_starts(op, starts, batch.tokens.shape[0])
    owners: dict[int, int] = {}
    for request, (row, length) in enumerate(
        zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        first, last = starts[request], starts[request + 1]
        if last == first or length <= 0 or row < 0:
            continue
        if row >= cache.num_rows:
            raise argument_error(
                op,
                "batch.rows",
                must=f"be below max_batch_size of the cache = {cache.num_rows}",
                got=f"row {row} for request {request}",
                do="Pass the row that add returned, or -1 for padding",
            )
        if row in owners:
            raise argument_error(
                op,
                "batch.rows",
                must="have a row of its own for every request",
                got=f"row {row} for requests {owners[row]} and {request}",
                do="Add each of them",
            )
        owners[row] = request
        _check_request(op, request, row, last - first, length, cache, sizes)
        ids = batch.tokens[first:last]
        if not bool(in_vocabulary(ids, vocab_size).all()):
            raise unknown_id(op, "batch.tokens", ids, vocab_size)


def check_first(op: str, batch: StepBatch, most: int | None) -> None:
    """Raise if a request has a context, or has more than ``most`` tokens. The check reads values
    of tensors."""
    tensors = batch.query_start_loc.diff(), batch.seq_lens, batch.rows
    for request, (count, length, row) in enumerate(zip(*map(Tensor.tolist, tensors), strict=True)):
        if not count or length <= 0 or row < 0:
            continue
        if length > count or (most is not None and count > most):
            of_request = f"{count} new tokens of {length} in request {request}"
            rule = "be True, unless every request begins in this step"
            rule += "" if most is None else f", with at most {most} tokens"
            raise argument_error(op, "has_context", must=rule, got=of_request, do="Leave it out")


def unknown_id(op: str, name: str, ids: Tensor, vocab_size: int) -> Exception:
    """Return the error for ``ids`` outside of the vocabulary."""
    return argument_error(
        op,
        name,
        must=f"be in 0..{vocab_size - 1}, the vocabulary of the model",
        got=int(ids[~in_vocabulary(ids, vocab_size)][0]),
        do="Pass ids of the model's tokenizer",
    )


def _check_starts(op: str, starts: Sequence[int], num_tokens: int) -> None:
    name = "batch.query_start_loc"
    advice = "Pass the first token of every request and one past the last"
    if starts[0] != 0:
        raise argument_error(op, name, must="begin with 0", got=starts[0], do=advice)
    for before, after in pairwise(starts):
        if after < before:
            raise argument_error(
                op, name, must="not decrease", got=f"{after} after {before}", do=advice
            )
    if starts[-1] > num_tokens:
        raise argument_error(
            op,
            name,
            must=f"end at the {num_tokens} of batch.tokens, or before its padding",
            got=starts[-1],
            do=advice,
        )


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
        raise argument_error(
            op,
            name,
            must=f"count the {count} tokens that request {request} has in the step",
            got=length,
            do="Pass the tokens of every request, including the tokens of the step",
        )
    most = longest_request(cache)
    if length > most:
        raise argument_error(
            op,
            name,
            must=f"be at most max_cache_len of the cache = {most}",
            got=of_request,
            do="Make the cache with a larger max_cache_len",
        )
    if count > longest:
        raise argument_error(
            op,
            "batch.query_start_loc",
            must=f"give a request at most max_chunk tokens in a step, here {longest}",
            got=f"{count} of request {request}",
            do="Cut the request into chunks, or make the cache with a larger max_chunk",
        )
    first, row_length = length - count, int(cache.seq_lens[row])
    if first > row_length:
        holds = f"{row_length} token{'' if row_length == 1 else 's'}"
        raise argument_error(
            op,
            name,
            must="let every request begin at most where its row ends",
            got=f"request {request} that begins at position {first} while row {row} holds {holds}",
            do="Pass all tokens, or set cache.seq_lens where something else filled the row",
        )
    blocks = cache.tables.pool[row, (length - count) // block_tokens :]
    block_ids = blocks[: (length - 1) // block_tokens + 1 - (length - count) // block_tokens]
    if bool((block_ids < 0).any()):
        raise argument_error(
            op,
            name,
            must=f"have blocks for all tokens of row {row}",
            got=of_request,
            do="Call reserve before the step",
        )
