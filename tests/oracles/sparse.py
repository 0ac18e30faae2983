"""Oracles of the ops of index matrices in Python ints, written from the specification.

Arguments are lists of ints (a matrix is a list of rows) or None. Results are lists, in the order of
the op's outputs. This file does not import torch.
"""

from tests.oracles.batch import INT32_MAX, Ints, Rows, is_valid, narrow_slot, swa_indices_and_lens
from tests.oracles.plan import up


def known_width(name: str, rows: Rows, width: int | None) -> int:
    if rows:
        return len(rows[0])
    if width is None:
        raise ValueError(f"{name} has no rows: its width is unknown")
    return width


def combine_topk_swa_indices(
    topk_indices: Rows, positions: Ints, req_indices: Ints, seq_lens: Ints, gather_lens: Ints, *,
    window_size: int, compress_ratio: int, topk: int, workspace_rows: int, swa_offset: int,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    width = 128 * up(topk + window_size, 128)
    indices, lens = [], []
    for local, position, request in zip(topk_indices, positions, req_indices, strict=True):
        row = [-1] * width
        length = 0
        if is_valid(position, request, len(seq_lens)):
            selected = min((position + 1) // compress_ratio, topk)
            visible = min(position + 1, window_size)
            length = selected + visible
            base = workspace_rows * request
            for column in range(selected):
                if 0 <= local[column] < swa_offset:
                    row[column] = base + local[column]
            gathered = gather_lens[request]
            gather_start = seq_lens[request] - gathered
            for o in range(visible):
                g = position - visible + 1 + o - gather_start
                if 0 <= g < gathered and swa_offset + g < workspace_rows:
                    row[selected + o] = base + swa_offset + g
        indices.append([index if index <= INT32_MAX else -1 for index in row])
        lens.append(length)
    return indices, lens


def spread(index: int, block_size: int, span: int | None) -> int:
    """Convert the id of a row to a cache whose blocks are ``span`` rows apart."""
    if index < 0:
        return -1
    if span is not None:
        index = index // block_size * span + index % block_size
    return index if index <= INT32_MAX else -1


def mixed_sparse_indices(
    decode_swa_indices: Rows, decode_compressed_indices: Rows | None,
    decode_compressed_lens: Ints | None, prefill_topk_indices: Rows, positions: Ints,
    req_indices: Ints, swa_block_table: Rows, compressed_block_table: Rows | None, *,
    swa_block_size: int, compressed_block_size: int, window_size: int, compress_ratio: int,
    topk: int, decode_compressed_indices_are_local: bool = False, swa_block_span: int | None = None,
    compressed_block_span: int | None = None, swa_width: int | None = None,
    compressed_width: int | None = None,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    swa_width = known_width("decode_swa_indices", decode_swa_indices, swa_width)
    if decode_compressed_indices is None:
        compressed_width = 0
    else:
        name = "decode_compressed_indices"
        compressed_width = known_width(name, decode_compressed_indices, compressed_width)
    compressed_columns = 4 * up(max(topk, compressed_width), 4)
    if compressed_block_table is None:
        compressed_block_table = swa_block_table
    num_decodes = len(decode_swa_indices)
    assert len(positions) == len(req_indices) == num_decodes + len(prefill_topk_indices)

    indices, lens = [], []
    for token, (position, request) in enumerate(zip(positions, req_indices, strict=True)):
        if not is_valid(position, request, len(swa_block_table)):
            indices.append([-1] * (swa_width + compressed_columns))
            lens.append(0)
            continue
        pages = compressed_block_table[request]
        if token < num_decodes:
            window = list(decode_swa_indices[token])
            compressed, length = decode_compressed(
                decode_compressed_indices[token] if decode_compressed_indices is not None else [],
                decode_compressed_lens[token] if decode_compressed_lens is not None else None,
                pages if decode_compressed_indices_are_local else None,
                compressed_block_size,
            )
        else:
            sizes = {"block_size": swa_block_size, "window_size": window_size}
            rows, _ = swa_indices_and_lens([position], [request], swa_block_table, **sizes)
            window = rows[0] + [-1] * (swa_width - window_size)
            length = min((position + 1) // compress_ratio, topk)
            local = prefill_topk_indices[token - num_decodes]
            compressed = [slot(pages, local[c], compressed_block_size) for c in range(length)]
        compressed += [-1] * (compressed_columns - len(compressed))
        indices.append(
            [spread(index, swa_block_size, swa_block_span) for index in window]
            + [spread(index, compressed_block_size, compressed_block_span) for index in compressed]
        )
        lens.append(swa_width + length)
    return indices, lens


def decode_compressed(
    entries: Ints, given: int | None, pages: Ints | None, block_size: int
) -> tuple[list[int], int]:
    """Return a decode token's slots, and how many are valid; without ``pages``, ids are global."""
    slots = [max(entry, -1) for entry in entries]
    if pages is not None:
        slots = [slot(pages, entry, block_size) for entry in entries]
    length = len(slots)
    if given is not None:
        length = min(max(given, 0), len(slots))
    elif pages is not None:
        length = max((column + 1 for column, index in enumerate(slots) if index >= 0), default=0)
    return slots[:length], length


def slot(pages: Ints, row: int, block_size: int) -> int:
    return narrow_slot(pages, row, block_size) if row >= 0 else -1
