"""Find the rows that each token of an attention op reads, in plain Python, from the docstrings.

A row is a cache, a block, and a place in the block. ``attended`` reads the rows with the oracles of
the caches and attends to them in float64. This file does not import ``dsv4_ops.reference``, from
which the contract's float64 results get their rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.types import INT32_MAX
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.float64.sparse_mla import exact_attention, exact_inverse_rope
from tests.oracles import dense_mla, kv
from tests.oracles.compressor import value_of

Place = tuple[str, int, int]


def listed(
    cache: str, given: dict[str, Any], indices: Sequence[int], length: int, size: int
) -> Iterator[Place]:
    """Yield the first ``length`` slots, without absent slots."""
    for slot in indices[: max(length, 0)]:
        if 0 <= slot < len(given[cache]) * size:
            yield cache, slot // size, slot % size


def walked(
    cache: str, given: dict[str, Any], table: str, request: int, rows: Iterable[int], size: int
) -> Iterator[Place]:
    """Yield the rows of a request, without rows in absent blocks."""
    if 0 <= request < len(given[table]):
        pages = given[table][request]
        for row in rows:
            if 0 <= row < len(pages) * size and 0 <= pages[row // size] < len(given[cache]):
                yield cache, pages[row // size], row % size


def up_to(length: int) -> range:
    return range(min(max(length, 0), 10**4))  # longer than any table


def sparse_mla_decode(given: dict[str, Any], token: int) -> Iterator[Place]:
    for name in ("swa", "extra"):
        if given[f"{name}_cache"] is not None:
            lists = given[f"{name}_indices"][token], given[f"{name}_lens"][token]
            yield from listed(f"{name}_cache", given, *lists, given[f"{name}_block_size"])


def sparse_mla_decode_paged(given: dict[str, Any], token: int) -> Iterator[Place]:
    lists = given["swa_indices"][token], given["swa_lens"][token]
    yield from listed("swa_cache", given, *lists, given["swa_block_size"])
    request, rows = given["req_indices"][token], up_to(given["extra_lens"][token])
    size = given["extra_block_size"]
    yield from walked("extra_cache", given, "extra_block_table", request, rows, size)


def sparse_mla_gathered(given: dict[str, Any], token: int) -> Iterator[Place]:
    return listed("kv", given, given["indices"][token], given["lens"][token], 1)


def sparse_mla_prefill(given: dict[str, Any], token: int) -> Iterator[Place]:
    """Yield the window up to the token itself, then all complete compressed rows."""
    position, request = given["positions"][token], given["req_indices"][token]
    if not 0 <= position < INT32_MAX:
        return
    window = range(max(position - given["window_size"] + 1, 0), position + 1)
    size = given["swa_block_size"]
    yield from walked("swa_cache", given, "swa_block_table", request, window, size)
    if given["extra_cache"] is not None:
        visible = (position + 1) // given["compress_ratio"]
        rows: Iterable[int] = up_to(visible)
        if given["topk_indices"] is not None:
            rows = [row for row in given["topk_indices"][token] if row < visible]
        size = given["extra_block_size"]
        yield from walked("extra_cache", given, "extra_block_table", request, rows, size)


def mla_decode(given: dict[str, Any], token: int) -> Iterator[Place]:
    request, rows = given["req_indices"][token], up_to(given["seq_lens"][token])
    return walked("kv_cache", given, "block_table", request, rows, given["block_size"])


def mla_sparse(given: dict[str, Any], token: int) -> Iterator[Place]:
    lists = given["indices"][token], given["lens"][token]
    return listed("kv_cache", given, *lists, given["block_size"])


def row_values(given: dict[str, Any], place: Place) -> list[float]:
    name, page, row = place
    block, layout = given[name][page], given.get("layout", "plain")
    if layout == "v4_fp8":
        size = given[name.replace("cache", "block_size")]
        return [value_of(bits << 16) for bits in kv.main_row(block, row, size)]
    if layout == "mla_ds_fp8":
        return [value_of(bits << 16) for bits in dense_mla.tile_values(block[row])]
    if layout == "mla_fp8":
        scale = 1.0 if given["kv_scale"] is None else given["kv_scale"][0]
        return [dense_mla.CODE_VALUES[code] * scale for code in block[row]]
    return block if name == "kv" else block[row]


def attended(name: str, names: Sequence[str], case: Case) -> list[Tensor]:
    """Return float64 results of a call; ``names`` are the names of its tensors."""
    tensors = dict.fromkeys(names) | dict(zip(names, case.tensors, strict=False))
    given = {key: None if value is None else value.tolist() for key, value in tensors.items()}
    given |= case.settings
    q: Any = tensors["q"]
    places = [list(globals()[name](given, token)) for token in range(q.shape[0])]
    read = {place: row_values(given, place) for place in {each for row in places for each in row}}
    most = max(map(len, places), default=0) + 1
    keys = torch.zeros(q.shape[0], most, q.shape[2], dtype=torch.float64)
    exists = torch.zeros(q.shape[0], most, dtype=torch.bool)
    for token, row in enumerate(places):
        if row:
            keys[token, : len(row)] = torch.tensor([read[place] for place in row]).double()
            exists[token, : len(row)] = True
    if given.get("q_scale") is not None:
        q = q.double() * tensors["q_scale"]
    sink = tensors.get("attn_sink")
    out, row_max, lse = exact_attention(q, keys, exists, sink, given["softmax_scale"])
    out = exact_inverse_rope(out, tensors.get("positions"), tensors.get("cos_sin_cache"))
    rank = given.get("kv_lora_rank", math.inf)
    value = out.value[..., : min(rank, q.shape[2])]
    return (
        [value, row_max.value, lse.value] if name == "sparse_mla_gathered" else [value, lse.value]
    )
