"""What ``insert_c4_step`` leaves, in plain Python: the oracles of its four parts, each with the
tensors that the specification gives it.

Tensors are nested lists by name: ints, unsigned bit patterns of floats (``bits``), or floats
(``numbers``).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.oracles import (
    compressor as oracles_compressor,
    indexer as oracles_indexer,
    rope as oracles_rope,
)


class Left(NamedTuple):
    """Bit patterns of what is exact, and the rows of both compressors before they are rounded."""

    indexer_q: Any
    indexer_weights: Any
    swa_cache: Any
    states: Any
    indexer_states: Any
    rows: Any
    indexer_rows: Any


def insert_c4_step(
    bits: Mapping[str, Any],
    numbers: Mapping[str, Any],
    *,
    bf16_weights: bool,
    eps: float,
    softmax_scale: float,
    compress_ratio: int,
    state_block_size: int,
    swa_block_size: int,
    block_size: int,
    save_first: bool = False,
) -> Left:
    slots, positions = bits["swa_slot_mapping"], bits["positions"]
    window = oracles_rope.inserted(
        bits["kv"][: len(slots)],
        bits["swa_cache"],
        slots,
        positions[: len(slots)],
        numbers["cos_sin_cache"],
        block_size=swa_block_size,
        layout="v4_fp8",
    )
    states, rows = {}, {}
    for prefix, cache in (("", "k_cache"), ("indexer_", "indexer_cache")):
        states[prefix] = oracles_compressor.save_compressor_states(
            bits[f"{prefix}kv_score"],
            bits[f"{prefix}ape"],
            bits[f"{prefix}states"],
            bits["state_slot_mapping"],
            positions,
            compress_ratio=compress_ratio,
            block_size=state_block_size,
        )
        read = numbers[f"{prefix}states"]
        if save_first:
            read = [list(map(oracles_compressor.value_of, page)) for page in states[prefix]]
        rows[prefix] = oracles_compressor.compressed_rows(
            numbers[f"{prefix}kv_score"],
            numbers[f"{prefix}ape"],
            read,
            bits["state_block_table"],
            positions,
            bits["req_indices"],
            numbers[f"{prefix}norm_weight"],
            numbers["cos_sin_cache"],
            bits["slot_mapping"],
            num_slots=len(bits[cache]) * block_size,
            compress_ratio=compress_ratio,
            overlap=True,
            eps=eps,
            state_block_size=state_block_size,
        )
    codes, scaled = oracles_indexer.indexer_quantize_q(
        bits["indexer_q"],
        bits["indexer_weights"],
        positions,
        bits["cos_sin_cache"],
        softmax_scale=softmax_scale,
        bf16_weights=bf16_weights,
    )
    kept = states[""], states["indexer_"], rows[""], rows["indexer_"]
    return Left(codes, scaled, window, *kept)
