"""Make steps from Hugging Face's padded [batch, length] batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.types import TokenMap
from dsv4_ops.integrations.transformers.architectures.base import (
    ModelSpec,
    Requests,
    StepTokens,
)
from dsv4_ops.integrations.transformers.cache.dropped_tokens import (
    count_dropped,
    may_wait,
    storable,
    unknown_id,
    values_are_free,
)
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.steps.step import check_cache
from dsv4_ops.integrations.transformers.tensors import in_vocabulary, store_lengths

OP = "model"


@dataclass(frozen=True)
class PaddedStep:
    """A step, and the columns to which the step moved padded inputs.

    Ops require that adjacent tokens of a request have consecutive positions, so a step moves
    padding to the end of the row. ``columns`` int64 [batch, length] has the new column of each
    input; None if no input moved.
    """

    step: Any
    columns: Tensor | None

    def take(self, values: Tensor | None) -> Tensor | None:
        """Return inputs [batch, length, ...] in the order of the step's tokens, [num_tokens,
        ...]."""
        if values is None:
            return None
        return _to_columns(values, self.columns).flatten(0, 1)

    def give_back(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return values [num_tokens, ...] in the order of the inputs, [batch, length, ...]."""
        values = values.view(*shape, *values.shape[1:])
        if self.columns is None:
            return values
        columns = self.columns.view(*shape, *[1] * (values.dim() - 2))
        return values.gather(1, columns.expand_as(values))


def padded_step(
    spec: ModelSpec,
    shape: tuple[int, int],
    ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: PagedCache,
    vocab_size: int,
) -> PaddedStep:
    """Build the step of a padded batch, and advance the lengths of the cache.

    Args:
        spec: Spec of the model.
        shape: Batch and length of the inputs; row r of the batch is row r of the cache.
        ids: The inputs if the inputs are ids, else None.
        attention_mask: [batch, length or more]; 0 marks padding, which may be in any column. The
            last ``length`` columns belong to the inputs. None if there is no padding.
        position_ids: Positions, [batch or 1, length]; negative for padding. Positions of a row are
            consecutive. The first position is the row's length in the cache, or a smaller position
            if the cache still has the states of that position. With None, every row continues at
            its length.
        cache: The cache, whose lengths this call updates.
        vocab_size: Size of the vocabulary.

    Raises:
        ValueError: an argument does not fit the cache, or, in an eager call, the cache cannot store
            a token. For the latter check, the host waits for the device. A graph instead counts
            the tokens that the cache cannot store in ``cache.dropped``.
    """
    _check(spec, shape, attention_mask, position_ids, cache)
    batch, length = shape
    before, device = cache.seq_lens[:batch], cache.device
    if spec.parallel is not None and values_are_free(before):
        spec.parallel.agree(OP, "batch", device, shape=shape)
    valid = torch.ones(shape, dtype=torch.bool, device=device)
    if attention_mask is not None:
        valid = attention_mask[:, attention_mask.shape[1] - length :] != 0
    if position_ids is not None:
        position_ids = position_ids.to(torch.int64).expand(batch, length)
        valid = valid & (position_ids >= 0)
    columns = None
    if length > 1 and (attention_mask is not None or position_ids is not None):
        columns = _padding_last(valid)
    column = torch.arange(length, device=device)
    is_kept, first = column < valid.sum(1, keepdim=True), before[:, None].to(torch.int64)
    moved_positions: Tensor | None = None
    if position_ids is not None:
        moved_positions = _to_columns(position_ids, columns)
        first = moved_positions[:, :1]
        follows = (moved_positions - first != column).cumsum(1) == 0
        is_kept = is_kept & follows & can_go_on(spec, first, cache)
    rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    tokens = TokenMap(*(torch.where(is_kept, of, -1).flatten() for of in (rows, first + column)))
    tokens = storable(tokens, cache.tensors, spec.block_tokens)
    positions = tokens.positions.view(shape)
    is_stored = tokens.positions >= 0
    is_token = valid.flatten()
    if ids is not None:
        exists = in_vocabulary(ids, vocab_size) | ~valid
        is_stored = is_stored & _to_columns(exists, columns).flatten()
    is_lost, has_context = False, True
    if may_wait(before):
        found = [is_token.sum() > is_stored.sum()]
        if length > 1 and spec.skips_contexts(batch * length, batch, length):
            found.append((first > 0).any())
        is_lost, has_context, *_ = (*torch.stack(found).tolist(), True)  # one wait for the device
    if is_lost:
        num_lost = valid.sum(1) - positions.ge(0).sum(1)
        wrong = None if ids is None else ids[valid & ~in_vocabulary(ids, vocab_size)]
        if wrong is not None and wrong.numel():
            raise unknown_id(OP, "input_ids", wrong, vocab_size)
        raise _refused(spec, int(num_lost.argmax()), valid, moved_positions, first, cache)
    ends = positions.amax(1).to(torch.int32) + 1
    store_lengths(before, cache.written[:batch], ends, first[:, 0])
    count_dropped(cache.tensors, is_token, is_stored)
    ends = ends[:, None].expand(shape).flatten()

    def requests() -> Requests:
        return _requests(shape, positions, rows)

    schedule = "decode" if length == 1 else "prefill"
    step_tokens = StepTokens(tokens, ends, batch, requests, has_context)
    step = spec.build_step(step_tokens, cache.tensors, schedule)
    return PaddedStep(step, columns)


def can_go_on(spec: ModelSpec, first: Tensor, cache: PagedCache) -> Tensor:
    """Whether rows can continue at positions ``first`` [batch, 1].

    A row may not skip positions, and no ring may have overwritten keys or states that the next
    token reads.
    """
    before = cache.seq_lens[: first.shape[0], None].to(torch.int64)
    return (first == before) | ((first < before) & spec.can_go_back(first, cache))


def _requests(shape: tuple[int, int], positions: Tensor, rows: Tensor) -> Requests:
    """Return the requests of a padded batch: for each row, a request for its tokens and a request
    for its padding."""
    batch, length = shape
    count = positions.ge(0).sum(1, dtype=torch.int32)
    begin = torch.arange(batch + 1, dtype=torch.int32, device=positions.device) * length
    starts = torch.stack((begin[:-1], begin[:-1] + count), 1).flatten()
    ends = positions.amax(1).to(torch.int32) + 1
    padding = torch.zeros_like(ends)
    index = 2 * torch.arange(batch, dtype=torch.int32, device=ends.device)[:, None]
    return Requests(
        torch.cat((starts, begin[-1:])),
        torch.stack((ends, padding), 1).flatten(),
        torch.stack((rows[:, 0], padding - 1), 1).flatten(),
        index.expand(shape).flatten(),
    )


def _padding_last(valid: Tensor) -> Tensor:
    """Return the new column of every input: first the valid tokens in order, then the padding in
    order."""
    padding = valid.sum(1, keepdim=True) + (~valid).cumsum(1) - 1
    return torch.where(valid, valid.cumsum(1) - 1, padding)


def _to_columns(values: Tensor, columns: Tensor | None) -> Tensor:
    """Scatter ``values`` [batch, length, ...] to their columns."""
    if columns is None:
        return values
    columns = columns.view(*columns.shape, *[1] * (values.dim() - 2)).expand_as(values)
    return values.scatter(1, columns, values)


def _refused(
    spec: ModelSpec,
    row: int,
    valid: Tensor,
    positions: Tensor | None,
    first: Tensor,
    cache: PagedCache,
) -> Exception:
    """Return the error for a row that does not fit into the cache."""
    count, ends = int(valid[row].sum()), int(cache.seq_lens[row])
    if positions is not None:
        row_positions = positions[row, :count].tolist()
        if (
            row_positions != list(range(row_positions[0], row_positions[0] + count))
            or row_positions[0] > ends
        ):
            return argument_error(
                OP,
                "position_ids",
                must=f"follow each other from position {ends} of row {row}, where the cache ends",
                got=_brief(row_positions),
                do="Pass them without a gap, or None; mark padding in attention_mask",
            )
        if not bool(can_go_on(spec, first, cache)[row]):
            return argument_error(
                OP,
                "position_ids",
                must="go back to a position whose states are still there",
                got=f"{row_positions[0]} in row {row} of {ends} tokens",
                do="Make the cache with a larger next_n, or begin at 0",
            )
    length = int(first[row, 0]) + count
    length_text = f"{length} in row {row}"
    if length > cache.max_cache_len:
        return argument_error(
            OP,
            "sequence_length",
            must=f"lead to at most max_cache_len of the cache = {cache.max_cache_len} tokens",
            got=length_text,
            do="Make the cache with a larger max_cache_len",
        )
    return argument_error(
        OP,
        "cache",
        must="have blocks for all tokens",
        got=length_text,
        do="Call reserve before the step",
    )


def _brief(values: list[int]) -> str:
    text = ", ".join(map(str, values[:6]))
    return f"[{text}{', ...' if len(values) > 6 else ''}]"


def check_inputs(
    body: Any,
    ids: Tensor | None,
    embeddings: Tensor | None,
    outputs: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Raise for inputs and outputs that a step with a cache on ``device`` does not support."""
    checks, config = Checks(OP, device), body.config
    if ids is not None:
        checks.tensor("input_ids", ids, (torch.int64, torch.int32), "batch_size", "sequence_length")
    elif embeddings is None or "hash_moe" in getattr(config, "mlp_layer_types", ()):
        rule, advice = "be given", "Pass input_ids or inputs_embeds"
        if embeddings is not None:
            rule, advice = "be given to hash routers", "Pass input_ids beside inputs_embeds"
        raise argument_error(OP, "input_ids", must=rule, got="None", do=advice)
    if embeddings is not None:
        sizes = ("batch_size", "sequence_length", config.hidden_size)
        own, dtype = body.get_input_embeddings(), getattr(embeddings, "dtype", torch.float32)
        # a replaced module, a hook or autocast can change the dtype in which layers compute
        plain = type(own) is nn.Embedding and not own._forward_hooks and "forward" not in vars(own)
        if plain and not torch.is_autocast_enabled(own.weight.device.type):
            dtype = own.weight.dtype
        checks.tensor("inputs_embeds", embeddings, dtype, *sizes)
    for name in ("output_attentions", "output_router_logits"):
        if outputs.get(name, getattr(config, name, False)):
            raise argument_error(
                OP,
                name,
                must="be False with a PagedCache",
                got="True",
                do="Pass another cache, or none",
                kind=NotImplementedError,
            )
    states = outputs.get("output_hidden_states")
    if states is not None and not isinstance(states, bool):
        raise argument_error(
            OP,
            "output_hidden_states",
            must="be True or False with a PagedCache",
            got=states,
            do="Choose from the tuple of all",
            kind=NotImplementedError,
        )


def _check(
    spec: ModelSpec,
    shape: tuple[int, int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: PagedCache,
) -> None:
    batch, length = shape
    checks = Checks(OP)
    checks.at_least(1, batch_size=batch, sequence_length=length)
    checks.at_most("batch_size", batch, "max_batch_size of the cache", cache.max_batch_size)
    checks.at_most("sequence_length", length, "max_chunk of the cache", cache.max_chunk)
    if cache.spec.kv != spec.kv:
        raise argument_error(
            OP,
            "cache",
            must=f"hold {spec.kv!r} keys like the model",
            got=repr(cache.spec.kv),
            do="Make the cache with PagedCache.for_model",
        )
    check_cache(OP, spec, cache.tensors)
    # checked on the host only: in a graph, this check would recompile for every request
    if not torch.compiler.is_compiling() and not cache.requests and cache.lacking_blocks(None, 1):
        raise argument_error(
            OP,
            "cache",
            must="have requests, as its rows share blocks",
            got="none",
            do="Give each row of the batch its blocks with add and reserve",
        )
    rows, columns = matrix(attention_mask)
    if attention_mask is not None and (rows != batch or columns < length):
        raise argument_error(
            OP,
            "attention_mask",
            must=f"have shape [{batch}, {length} or more]",
            got=shape_text(attention_mask),
            do="Pass the mask of the tokens, 0 for padding",
        )
    rows, columns = matrix(position_ids)
    if position_ids is not None and (rows not in (1, batch) or columns != length):
        raise argument_error(
            OP,
            "position_ids",
            must=f"have shape [{batch} or 1, {length}]",
            got=shape_text(position_ids),
            do="Pass a position per token, or None to go on where the cache ends",
        )
    if position_ids is not None:
        checks.floats("position_ids", position_ids, torch.int64, torch.int32)


def matrix(value: object) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix, or (0, 0) for anything else."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return 0, 0
    return value.shape[0], value.shape[1]


def shape_text(value: object) -> object:
    """Return the shape of a tensor, or the class name of another object, for a message."""
    shape = getattr(value, "shape", type(value).__name__)
    return list(shape) if isinstance(shape, torch.Size) else shape
