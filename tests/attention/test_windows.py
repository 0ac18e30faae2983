"""Window caches in several groups of blocks: one build makes a step for each group."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dsv4_ops.attention import ContextParallel, LayerSpec, StateTables, build_attention_step
from dsv4_ops.attention.metadata import BlockTables
from tests.attention.test_layers import layer_of, leaves
from tests.helpers import Called, assert_exact, i32, i64
from tests.support.layers import SPEC, Engine
from tests.support.sampled import sampled


def build(
    spec: LayerSpec, batch: tuple[Tensor, ...], swa: Tensor, slots: Tensor, **more: Any
) -> Any:
    starts, lens, _, _, rows, states = batch
    tables = BlockTables(swa=swa, c4=rows, c128=rows)
    held = StateTables(c4=states, c128=states)
    return build_attention_step(spec, starts, lens, slots, tables, held, **more)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_window_has_the_bits_of_a_step_of_its_own(ranks: int) -> None:
    (layer, _), spec, more = layer_of("c4", SPEC), SPEC, {}
    if ranks > 1:
        spec = replace(SPEC, parallel=ContextParallel(group="none", world_size=ranks))
        more["cp_rank"] = i32([1])

    @sampled(60)
    @given(
        st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 17]), min_size=1, max_size=4).filter(any),
        st.sampled_from([0, 2]),
        st.booleans(),
    )
    def compare(counts: list[int], padding: int, masked: bool) -> None:
        engines = (Engine(layer, len(counts), seed=seed) for seed in (1, 2))
        first, second = (engine.batch(counts, padding) for engine in engines)
        settings = dict(more)
        if masked:
            settings["is_valid_token"] = torch.arange(len(first[2])) % 3 != 1
        own = build(spec, first, second[3], second[2], **settings)
        step = build(spec, first, first[3], first[2], **settings)
        with Called() as called:
            other = step.with_window(spec, second[3], second[2])
        assert called.names == ["swa_indices_and_lens"]
        assert_exact(leaves(other), leaves(own))
        assert other.c4 is step.c4
        assert other.positions is step.positions

    compare()


def test_slots_by_hand() -> None:
    """Tokens at positions 6 and 8, padding between them, blocks of 4, and a window of 8 tokens."""
    table = i32([[7, 3, 5]])
    rest = BlockTables(swa=table, c4=table, c128=table), StateTables(c4=table, c128=table)
    valid = torch.tensor([True, False, True])
    step = build_attention_step(SPEC, i32([0, 3]), i32([9]), i64([14, 15, 20]), *rest, valid)
    other = step.with_window(SPEC, i32([[2, 0, 1]]), i64([2, 3, -1]))
    assert other.slot_mapping.tolist() == [2, -1, -1]
    rows = [[8, 9, 10, 11, 0, 1, 2, -1], [-1] * 8, [9, 10, 11, 0, 1, 2, 3, 4]]
    assert other.swa_indices.tolist() == rows
    assert other.swa_lens.tolist() == [7, 0, 8]
    with pytest.raises(ValueError, match=r"^with_window: slot_mapping must have shape"):
        step.with_window(SPEC, table, i64([1]))
    with pytest.raises(ValueError, match=r"^with_window: block_table must have shape"):
        step.with_window(SPEC, table.repeat(2, 1), i64([1, 2, 3]))
