"""Index matrices of sparse attention: whichever op makes them, a token reads the same rows.

Numbers by hand: ``dsv4_ops/testing/cases/indices.py``.
"""

from random import Random
from typing import Any

import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.testing.strategies.batches import Batch
from tests.helpers import INT32_MAX, assert_exact, rows32
from tests.oracles import batch as oracles
from tests.support.sampled import sampled

LONGEST = 400


def workspace_slots(
    table: Tensor, seq_lens: list[int], gather_lens: list[int], size: int, rows: int, offset: int
) -> dict[int, tuple[str, int]]:
    """What lies in every row of the workspace: a compressed row or a window row, and its slot."""
    content = {}
    for request, (seq_len, gathered) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        pages, base = table[request].tolist(), request * rows
        for row in range(offset):
            content[base + row] = ("compressed", oracles.narrow_slot(pages, row, size))
        for row in range(gathered):
            slot = oracles.narrow_slot(pages, seq_len - gathered + row, size)
            content[base + offset + row] = ("window", slot)
    return content


def test_a_workspace_has_the_rows_of_the_global_indices() -> None:
    """A token reads the same cache rows through the workspace as through global slots."""
    compared = [0]

    @sampled(200)
    @given(testing.batches(min_size=1, adversarial=False), st.integers(0, 2**32))
    def compare(batch: Batch, seed: int) -> None:
        rng, starts, lengths = Random(seed), batch.query_start_loc, batch.seq_lens
        assume(bool((starts.diff() <= lengths).all()) and int(lengths.max()) <= LONGEST)
        ratio, width, size = (
            rng.choice((1, 2, 4, 128)),
            rng.choice((1, 3, 8)),
            rng.choice((1, 3, 64)),
        )
        topk = rng.choice((1, 3, 8))
        where = positions, requests = batch.positions, batch.req_indices
        table = torch.randint(1000, (len(lengths), LONGEST), dtype=torch.int32)
        gather_lens = ops.prefill_gather_lens(starts, lengths, window_size=width)
        visible = [(position + 1) // ratio for position in positions.tolist()]
        local = [rng.sample(range(n), min(n, topk)) for n in visible]
        selected = rows32([ids + [-1] * (topk - len(ids)) for ids in local], topk)
        offset = LONGEST // ratio
        rows = offset + int(gather_lens.max()) + rng.choice((0, 3))
        combined = ops.combine_topk_swa_indices(
            *(selected, *where, lengths, gather_lens),
            window_size=width,
            compress_ratio=ratio,
            topk=topk,
            workspace_rows=rows,
            swa_offset=offset,
        )
        window = ops.swa_indices_and_lens(*where, table, block_size=size, window_size=width)
        chosen = ops.global_topk_indices_and_lens(selected, requests, table, block_size=size)
        assert_exact(combined.lens, window.lens + chosen.lens)
        content = workspace_slots(table, lengths.tolist(), gather_lens.tolist(), size, rows, offset)
        for token, length in enumerate(combined.lens.tolist()):
            keys = [content[row] for row in combined.indices[token, :length].tolist()]
            expected = []
            for name, found in (("compressed", chosen), ("window", window)):
                slots = found.indices[token, : found.lens[token]].tolist()
                expected += [(name, slot) for slot in slots]
            assert keys == expected
            compared[0] += length

    compare()
    assert compared[0] > 100


def random_rows(rng: Random, rows: int, width: int, end: int) -> Tensor:
    """Ids below ``end``, some of them odd, some rows with a tail of -1."""
    matrix = []
    for _ in range(rows):
        used = rng.choice((width, width, rng.randrange(width + 1)))
        odd = (-1, end, INT32_MAX)
        ids = [rng.choice(odd) if rng.random() < 0.25 else rng.randrange(end) for _ in range(used)]
        matrix.append(ids + [-1] * (width - used))
    return rows32(matrix, width)


def test_a_mixed_matrix_has_the_global_indices() -> None:
    """A token reads the same slots as a decode, of global or local rows, and as a prefill."""
    compared = [0]

    @sampled(200)
    @given(testing.batches(), st.integers(0, 2**32))
    def compare(batch: Batch, seed: int) -> None:
        rng, sizes = Random(seed), {"block_size": 1}
        width, topk, ratio = rng.choice((4, 8)), rng.choice((1, 4, 5)), rng.choice((1, 2, 4))
        sizes["block_size"] = size = rng.choice((1, 3, 64))
        requests, table = batch.req_indices, batch.block_table
        places: Any = (batch.positions, requests, table)
        local = random_rows(rng, batch.num_tokens, topk, table.shape[1] * size + 1)
        window = ops.swa_indices_and_lens(*places, **sizes, window_size=width)
        visible = (batch.positions.clamp(-1, INT32_MAX) + 1) // ratio
        hidden = torch.arange(topk) >= visible[:, None]
        chosen = ops.global_topk_indices_and_lens(
            local.masked_fill(hidden, -1), requests, table, **sizes
        )
        exists = window.lens > 0
        expected = torch.cat([window.indices, chosen.indices.where(exists[:, None], -1)], 1)
        lens = (~hidden).sum(1, dtype=torch.int32)
        split, is_local = rng.randrange(batch.num_tokens + 1), rng.random() < 0.5
        result = ops.mixed_sparse_indices(
            window.indices[:split],
            (local if is_local else chosen.indices)[:split],
            lens[:split],
            local[split:],
            *places,
            None,
            swa_block_size=size,
            compressed_block_size=size,
            window_size=width,
            compress_ratio=ratio,
            topk=topk,
            decode_compressed_indices_are_local=is_local,
        )
        assert_exact(result.indices[:, : width + topk], expected)
        assert (result.indices[:, width + topk :] == -1).all()
        assert_exact(result.lens, torch.where(exists, lens + width, 0))
        compared[0] += int((expected >= 0).sum())

    compare()
    assert compared[0] > 100
