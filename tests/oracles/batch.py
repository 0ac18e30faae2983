"""Oracles of the batch ops in Python ints and loops, written from the specification.

Arguments are lists of ints (a block table is a list of rows). Results are lists, in the order of
the op's outputs. This file does not import torch.
"""

from collections.abc import Sequence
from itertools import pairwise

INT32_MAX = 2**31 - 1

Ints = Sequence[int]
Rows = Sequence[Sequence[int]]


def query_lens(query_start_loc: Ints) -> list[int]:
    return [max(stop - start, 0) for start, stop in pairwise(query_start_loc)]


def is_valid(position: int, request: int, num_reqs: int) -> bool:
    return 0 <= request < num_reqs and 0 <= position < INT32_MAX


def split_decodes_and_prefills(
    query_start_loc: Ints, *, decode_threshold: int, require_uniform: bool = False
) -> list[int]:
    lengths = query_lens(query_start_loc)
    first = next((length for length in lengths if length > 0), 0)
    boundary = len(lengths)
    for request, length in enumerate(lengths):
        differs = require_uniform and length > 0 and length != first
        if length > decode_threshold or differs:
            boundary = request
            break
    decode_tokens = query_start_loc[boundary]
    return [boundary, len(lengths) - boundary, decode_tokens, query_start_loc[-1] - decode_tokens]


def token_map(
    query_start_loc: Ints, seq_lens: Ints, *, num_tokens: int
) -> tuple[list[int], list[int]]:
    req_indices = [-1] * num_tokens
    positions = [-1] * num_tokens
    for request, seq_len in enumerate(seq_lens):
        start, stop = query_start_loc[request], query_start_loc[request + 1]
        for token in range(start, min(stop, num_tokens)):
            position = seq_len - (stop - start) + (token - start)
            if position >= 0:
                req_indices[token] = request
                positions[token] = position
    return req_indices, positions


def flatten_decode(
    query_start_loc: Ints, seq_lens: Ints, *, num_tokens: int, compress_ratio: int = 1
) -> tuple[list[int], list[int]]:
    req_indices, positions = token_map(query_start_loc, seq_lens, num_tokens=num_tokens)
    lens = [
        (position + 1) // compress_ratio if request >= 0 else 0
        for request, position in zip(req_indices, positions, strict=True)
    ]
    return lens, req_indices


def expand_block_table(block_table: Rows, req_indices: Ints, *, columns: int) -> list[list[int]]:
    known = range(len(block_table))
    return [list(block_table[each]) if each in known else [0] * columns for each in req_indices]


def mtp_seq_lens(
    query_start_loc: Ints, seq_lens: Ints, *, next_n: int, compress_ratio: int = 1
) -> list[list[int]]:
    rows = []
    for query_len, seq_len in zip(query_lens(query_start_loc), seq_lens, strict=True):
        row = [0] * next_n
        for j in range(min(query_len, next_n)):
            row[j] = max(seq_len - query_len + j + 1, 0) // compress_ratio
        rows.append(row)
    return rows


def compressed_slot_mapping(
    positions: Ints,
    req_indices: Ints,
    block_table: Rows,
    slot_mapping: Ints,
    *,
    block_size: int,
    compress_ratio: int,
    cp_world_size: int = 1,
    cp_interleave: int = 1,
) -> list[int]:
    slots = []
    for position, request, slot in zip(positions, req_indices, slot_mapping, strict=True):
        completes = (position + 1) % compress_ratio == 0
        if not is_valid(position, request, len(block_table)) or slot < 0 or not completes:
            slots.append(-1)
            continue
        group = position // (cp_interleave * cp_world_size)
        row = (group * cp_interleave + position % cp_interleave) // compress_ratio
        slots.append(wide_slot(block_table[request], row, block_size))
    return slots


def wide_slot(pages: Ints, row: int, block_size: int) -> int:
    """Return the slot of a request's row, without an upper limit; -1 if the row has no block."""
    column = row // block_size
    if column >= len(pages) or pages[column] < 0:
        return -1
    return pages[column] * block_size + row % block_size


def narrow_slot(pages: Ints, row: int, block_size: int) -> int:
    """Return the slot as an int32; a block whose last slot does not fit counts as absent."""
    column = row // block_size
    if column < len(pages) and pages[column] * block_size + block_size - 1 > INT32_MAX:
        return -1
    return wide_slot(pages, row, block_size)


def split_prefill_chunks(
    seq_lens: Ints,
    query_lens: Ints,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    max_chunks: int,
    request_offset: int = 0,
) -> tuple[list[list[int]], list[int]]:
    rest = workspace_size, max_logits_bytes, request_offset
    chunks = all_prefill_chunks(seq_lens, query_lens, *rest)
    stored = chunks[:max_chunks]
    stored += [[0, 0, 0, 0] for _ in range(max_chunks - len(stored))]
    return stored, [len(chunks)]


def all_prefill_chunks(
    seq_lens: Ints,
    query_lens: Ints,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[list[int]]:
    elems = max_logits_bytes // 4
    rows = [max(length, 0) for length in seq_lens]
    queries = [max(length, 0) for length in query_lens]
    chunks = []
    start = 0
    while start < len(rows):
        stop = start
        while stop < len(rows):
            group_rows = sum(rows[start : stop + 1])
            group_queries = sum(queries[start : stop + 1])
            if group_rows > workspace_size or group_rows * group_queries > elems:
                break
            stop += 1
        stop = max(stop, start + 1)
        group_rows = sum(rows[start:stop])
        group_queries = sum(queries[start:stop])
        step = max(1, elems // group_rows) if group_rows > 0 else max(1, group_queries)
        for first in range(0, group_queries, step):
            last = min(first + step, group_queries)
            chunks.append([start + request_offset, stop + request_offset, first, last])
        start = stop
    return chunks


def plan_prefill_chunks(
    seq_lens: Ints,
    query_lens: Ints,
    *,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[tuple[slice, slice]]:
    rest = workspace_size, max_logits_bytes, request_offset
    chunks = all_prefill_chunks(seq_lens, query_lens, *rest)
    return [(slice(chunk[0], chunk[1]), slice(chunk[2], chunk[3])) for chunk in chunks]


def max_prefill_chunks(
    *, num_reqs: int, num_tokens: int, max_seq_len: int, max_logits_bytes: int
) -> int:
    step = max(1, max_logits_bytes // 4 // max(1, max_seq_len))
    return max(1, min(num_tokens, num_reqs + num_tokens // step))


def prefill_row_bounds(
    positions: Ints, req_indices: Ints, seq_lens: Ints, *, compress_ratio: int
) -> tuple[list[int], list[int], list[int]]:
    cumulative = [0]
    for seq_len in seq_lens:
        cumulative.append(min(cumulative[-1] + max(seq_len, 0) // compress_ratio, INT32_MAX))
    starts, stops = [], []
    for position, request in zip(positions, req_indices, strict=True):
        if is_valid(position, request, len(seq_lens)):
            visible = cumulative[request] + (position + 1) // compress_ratio
            starts.append(cumulative[request])
            stops.append(min(visible, cumulative[request + 1]))
        else:
            starts.append(0)
            stops.append(0)
    return cumulative, starts, stops


def prefill_chunk_row_bounds(
    positions: Ints,
    req_indices: Ints,
    seq_lens: Ints,
    query_start_loc: Ints,
    chunk: Ints,
    *,
    compress_ratio: int,
) -> tuple[list[int], list[int], list[int]]:
    num_reqs = len(seq_lens)
    first = min(max(chunk[0], 0), num_reqs)
    last = min(max(chunk[1], 0), num_reqs)
    inside = [seq_len if first <= request < last else 0 for request, seq_len in enumerate(seq_lens)]
    cumulative, starts, stops = prefill_row_bounds(
        positions, req_indices, inside, compress_ratio=compress_ratio
    )
    for token, request in enumerate(req_indices):
        relative = token - query_start_loc[first]
        in_chunk = first <= request < last and max(chunk[2], 0) <= relative < chunk[3]
        if not in_chunk:
            starts[token] = stops[token] = 0
    return cumulative, starts, stops


def swa_indices_and_lens(
    positions: Ints, req_indices: Ints, block_table: Rows, *, block_size: int, window_size: int
) -> tuple[list[list[int]], list[int]]:
    indices, lens = [], []
    for position, request in zip(positions, req_indices, strict=True):
        row = [-1] * window_size
        length = 0
        if is_valid(position, request, len(block_table)):
            start = max(position - window_size + 1, 0)
            length = position + 1 - start
            for o in range(length):
                row[o] = narrow_slot(block_table[request], start + o, block_size)
        indices.append(row)
        lens.append(length)
    return indices, lens


def prefill_gather_lens(query_start_loc: Ints, seq_lens: Ints, *, window_size: int) -> list[int]:
    lens = []
    for query_len, seq_len in zip(query_lens(query_start_loc), seq_lens, strict=True):
        context = max(seq_len - query_len, 0)
        lens.append(min(query_len + min(context, window_size - 1), max(seq_len, 0)))
    return lens


def global_topk_indices_and_lens(
    topk_indices: Rows, req_indices: Ints, block_table: Rows, *, block_size: int
) -> tuple[list[list[int]], list[int]]:
    indices, lens = [], []
    for local, request in zip(topk_indices, req_indices, strict=True):
        row = [-1] * len(local)
        length = 0
        for column, index in enumerate(local):
            if index >= 0 and 0 <= request < len(block_table):
                row[column] = narrow_slot(block_table[request], index, block_size)
            if row[column] >= 0:
                length = column + 1
        indices.append(row)
        lens.append(length)
    return indices, lens


def dense_compressed_indices(
    positions: Ints,
    req_indices: Ints,
    block_table: Rows,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: int,
) -> tuple[list[list[int]], list[int]]:
    indices, lens = [], []
    for position, request in zip(positions, req_indices, strict=True):
        row = [-1] * max_compressed
        length = 0
        if is_valid(position, request, len(block_table)):
            length = min((position + 1) // compress_ratio, max_compressed)
            for o in range(length):
                row[o] = narrow_slot(block_table[request], o, block_size)
        indices.append(row)
        lens.append(length)
    return indices, lens
