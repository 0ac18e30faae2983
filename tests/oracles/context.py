"""Oracles of chunks of contexts, and of the ranks' parts, in Python ints, from docstrings."""

import math
from collections.abc import Sequence

from tests.oracles.batch import INT32_MAX
from tests.oracles.compressor import value_of
from tests.oracles.indexer import best
from tests.oracles.plan import up


def context_chunks(
    context_lens: Sequence[int],
    *,
    workspace_rows: int,
    max_chunks: int,
    chunk_plan: str,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int,
) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]:
    """Distribute the rounds of each request; in a round, every rank has one turn."""
    turn = cp_interleave if cp_world_size > 1 else 1
    lens = [max(length, 0) for length in context_lens]
    rounds = [up(length, turn * cp_world_size) for length in lens]
    taken = [[0] * len(lens) for _ in range(max_chunks)]
    if chunk_plan == "packed":
        capacity = workspace_rows // cp_world_size // turn
        num_chunks = up(sum(rounds), capacity)
        chunk, left = 0, capacity
        for request, count in enumerate(rounds):
            while count > 0 and chunk < max_chunks:
                mine = min(count, left)
                taken[chunk][request] = mine
                count, left = count - mine, left - mine
                if left == 0:
                    chunk, left = chunk + 1, capacity
    else:
        unit = math.lcm(block_size, turn * cp_world_size)
        share = workspace_rows // max(1, sum(length > 0 for length in lens)) // unit
        each = share * unit // (turn * cp_world_size)
        longest = max(lens, default=0)
        if share == 0:
            num_chunks = INT32_MAX if longest else 0
        else:
            num_chunks = up(longest, share * unit)
            for chunk in range(max_chunks):
                taken[chunk] = [min(max(n - chunk * each, 0), each) for n in rounds]
    starts, whole, local = [], [], []
    done = [0] * len(lens)
    for counts in taken:
        # a later request begins at its first row, and a finished request at its end
        starts.append([n * turn for n in done])
        whole.append([0])
        local.append([0])
        for request, count in enumerate(counts):
            first, last = (n * turn * cp_world_size for n in (done[request], done[request] + count))
            whole[-1].append(whole[-1][-1] + min(last, lens[request]) - min(first, lens[request]))
            local[-1].append(local[-1][-1] + count * turn)
            done[request] += count
    return starts, whole, local, [min(num_chunks, INT32_MAX)]


def owner(position: int, ranks: int, turn: int) -> int:
    return position // turn % ranks


def local_row(position: int, ranks: int, turn: int) -> int:
    """Return the position's row on its rank: rows of earlier turns, plus the place in its turn."""
    return position // (turn * ranks) * turn + position % turn


def cp_slot_mapping(
    positions: Sequence[int],
    req_indices: Sequence[int],
    block_table: Sequence[Sequence[int]],
    cp_rank: Sequence[int],
    *,
    block_size: int,
    cp_world_size: int,
    cp_interleave: int,
) -> list[int]:
    slots = []
    for position, request in zip(positions, req_indices, strict=True):
        slots.append(-1)
        if not (0 <= position < INT32_MAX and 0 <= request < len(block_table)):
            continue
        if cp_world_size > 1 and owner(position, cp_world_size, cp_interleave) != cp_rank[0]:
            continue
        row = local_row(position, cp_world_size, cp_interleave)
        blocks = block_table[request]
        block = blocks[row // block_size] if row // block_size < len(blocks) else -1
        if block >= 0:
            slots[-1] = block * block_size + row % block_size
    return slots


def cp_row_indices(
    req_indices: Sequence[int],
    positions: Sequence[int],
    local_starts: Sequence[int],
    local_cu_seq_lens: Sequence[int],
    *,
    num_local_rows: int,
    cp_world_size: int,
    cp_interleave: int,
) -> list[int]:
    """Map each position to the gathered row: the n-th of its rank's part of the chunk."""
    indices = []
    for request, position in zip(req_indices, positions, strict=True):
        indices.append(-1)
        if not (0 <= position < INT32_MAX and 0 <= request < len(local_starts)):
            continue
        n = local_row(position, cp_world_size, cp_interleave) - local_starts[request]
        row = local_cu_seq_lens[request] + n
        if n >= 0 and 0 <= row < min(num_local_rows, local_cu_seq_lens[request + 1]):
            rank = owner(position, cp_world_size, cp_interleave)
            indices[-1] = rank * num_local_rows + row
    return indices


def cp_topk(
    scores: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[Sequence[Sequence[int]]],
    *,
    topk: int,
    cp_interleave: int,
) -> list[list[int]]:
    """Select from the candidates of all ranks as the indexer does, by rows of the request."""
    ranks, selected = len(rows), []
    for token in range(len(rows[0])):
        found: list[tuple[int, float]] = []
        for rank in range(ranks):
            for row, bits in zip(rows[rank][token], scores[rank][token], strict=True):
                turn, place = divmod(row, cp_interleave)
                whole = cp_interleave * (turn * ranks + rank) + place
                if row >= 0 and whole < INT32_MAX:
                    found.append((whole, value_of(bits)))
        selected.append(best(found, topk))
    return selected


def cp_local_rows(
    rows: Sequence[Sequence[int]], cp_rank: Sequence[int], *, cp_world_size: int, cp_interleave: int
) -> tuple[list[list[int]], list[int]]:
    found, lens = [], []
    for selected in rows:
        own = [
            local_row(row, cp_world_size, cp_interleave)
            for row in selected
            if row >= 0 and owner(row, cp_world_size, cp_interleave) == cp_rank[0]
        ]
        lens.append(len(own))
        found.append(own + [-1] * (len(selected) - len(own)))
    return found, lens
