"""Decode batches like those of a server: mixed contexts, scattered blocks, full-width tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from dsv4_ops.attention.metadata import AttentionSpec, BlockTables, DecodeMetadata

SHORTEST_CONTEXT = 100
_MAX_SETS = 32
_CAPTURED_CALLS = 8  # minimum calls per CUDA graph, so that the graph's launch hardly counts


@dataclass(frozen=True)
class Batch:
    """Inputs of one decode step in which every request has ``next_n`` tokens."""

    requests: int
    next_n: int
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_tables: BlockTables
    positions: Tensor
    """int64 [num_tokens]. Our builder computes positions; the baselines get them, as in vLLM."""

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.requests * self.next_n

    def arguments(self) -> tuple[Tensor, ...]:
        """The six tensors of ``build_decode_metadata``."""
        tables = (self.block_tables.swa, self.block_tables.c4, self.block_tables.c128)
        return (self.query_start_loc, self.seq_lens, self.slot_mapping, *tables)


def mixed_lengths(requests: int, *, longest: int, generator: torch.Generator) -> Tensor:
    """Sample log-uniform lengths from ``SHORTEST_CONTEXT`` to ``longest``: most are short."""
    low, high = math.log(min(SHORTEST_CONTEXT, longest)), math.log(longest)
    draw = torch.rand(requests, generator=generator, dtype=torch.float64)
    return (low + (high - low) * draw).exp().round().clamp(max=longest).to(torch.int32)


def draw_batch(
    spec: AttentionSpec, lengths: Tensor, *, next_n: int, device: torch.device, seed: int
) -> Batch:
    """Make a batch of requests of these ``lengths`` (context included), on distinct blocks."""
    requests, draw = lengths.shape[0], Draw(device, seed)

    def table(block_tokens: int) -> Tensor:
        columns = -(-spec.max_model_len // block_tokens)
        return draw.order(requests * columns).view(requests, columns).clone()

    tables = BlockTables(
        swa=table(spec.swa_block_size), c4=table(spec.block_tokens), c128=table(spec.block_tokens)
    )
    seq_lens = lengths.clamp(min=next_n).to(device, torch.int32)
    positions = (seq_lens[:, None].long() - next_n) + torch.arange(next_n, device=device)
    pages = tables.swa.gather(1, positions // spec.swa_block_size).long()
    slots = pages * spec.swa_block_size + positions % spec.swa_block_size
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * next_n
    # clone, because Dynamo guards on the base of a view, which has a size of 1 for next_n = 1
    slots, positions = slots.reshape(-1).clone(), positions.reshape(-1).clone()
    return Batch(requests, next_n, starts, seq_lens, slots, tables, positions)


def input_bytes(spec: AttentionSpec, batch: Batch) -> int:
    """Return the bytes that any builder must read: vectors, and every block id that it uses."""
    last = batch.seq_lens.long() - 1
    first = (last - (batch.next_n - 1) - (spec.window_size - 1)).clamp(min=0)
    window_pages = last // spec.swa_block_size - first // spec.swa_block_size + 1
    c128_blocks = -(-((last + 1) // spec.c128_ratio) // spec.c128_block_size)
    completed = sum(
        int(((batch.positions + 1) % ratio == 0).sum())
        for ratio in (spec.c4_ratio, spec.c128_ratio)
    )
    vectors = (batch.query_start_loc, batch.seq_lens, batch.slot_mapping)
    page_ids = int(window_pages.sum()) + int(c128_blocks.sum()) + completed
    return sum(tensor.nbytes for tensor in vectors) + 4 * page_ids


def output_bytes(metadata: DecodeMetadata) -> int:
    """Return the bytes that any builder must write."""
    return sum(tensor.nbytes for tensor in vars(metadata).values())


def rotating_sets(step_bytes: int, device: torch.device) -> int:
    """Return how many input sets fill three times the L2, 32 at most; on a CPU, 1."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MAX_SETS, max(2, -(-3 * cache // step_bytes)))


def captured_calls(calls: Sequence[Any]) -> list[Any]:
    """Repeat the calls over all input sets for a CUDA graph."""
    return list(calls) * math.ceil(_CAPTURED_CALLS / len(calls))
