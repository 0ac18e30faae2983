"""Random batches for the metadata builders, with the block tables of all cache groups."""

import random

import torch
from torch import Tensor

from dsv4_ops.attention.metadata import AttentionSpec, BlockTables

SPEC = AttentionSpec(next_n=4, max_model_len=4096)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_inputs(
    seed: int,
    *,
    num_reqs: int,
    num_tokens: int,
    spec: AttentionSpec = SPEC,
    max_query: int | None = None,
) -> Inputs:
    """Sample query_start_loc, seq_lens, slot_mapping and three tables: ragged, with empty and
    padding requests, and padding tokens."""
    rng = random.Random(seed)
    longest = spec.next_n if max_query is None else max_query
    room, queries, lens = num_tokens, [], []
    for _ in range(num_reqs):
        query = min(room, rng.choice((0, 1, 1, longest, rng.randint(0, longest))))
        context = rng.choice((0, 1, 127, 128, 255, rng.randint(0, spec.max_model_len - longest)))
        room -= query
        queries.append(query)
        lens.append(query + context if query or rng.random() < 0.5 else 0)
    generator = torch.Generator().manual_seed(seed)

    def table(block_tokens: int) -> Tensor:
        columns = -(-spec.max_model_len // block_tokens)
        pages = torch.randint(60_000, (num_reqs, columns), generator=generator, dtype=torch.int32)
        pages.view(-1)[:: rng.randint(7, 40)] = -1
        return pages

    slots = torch.randint(0, 10**6, (num_tokens,), generator=generator)
    slots[num_tokens - room :] = -1
    query_start_loc = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    tables = (table(spec.swa_block_size), table(spec.block_tokens), table(spec.block_tokens))
    return query_start_loc, torch.tensor(lens, dtype=torch.int32), slots, *tables


def tables_of(inputs: Inputs) -> BlockTables:
    return BlockTables(swa=inputs[3], c4=inputs[4], c128=inputs[5])
