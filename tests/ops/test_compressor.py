"""The compressor beyond the contract: which bytes it writes, and quantised rows."""

import pytest
import torch
from hypothesis import given

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.compressor import decode, written_slots
from tests.helpers import i32
from tests.support.sampled import sampled

LAYOUTS = {"v4_fp8": (MainLayout, 512), "v4_indexer_fp8": (IndexerLayout, 128)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_row_is_what_the_insert_makes_of_the_bfloat16_row(layout: str) -> None:
    kind, head_dim = LAYOUTS[layout]
    made = torch.Generator().manual_seed(1)
    tokens, width, blocks = 24, 2 * head_dim, 3
    angle = torch.rand(40, 32, generator=made)
    tensors = {
        "kv_score": torch.randn(tokens, 2 * width, generator=made),
        "ape": torch.randn(4, width, generator=made),
        "states": StateLayout(4, 2 * width).allocate(1),
        "state_block_table": i32([[-1]]),
        "positions": torch.arange(tokens),
        "req_indices": torch.zeros(tokens, dtype=torch.int32),
        "norm_weight": torch.randn(head_dim, generator=made),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], 1),
        "slot_mapping": torch.arange(tokens) // 4,
    }
    settings = {"compress_ratio": 4, "overlap": True, "eps": 1e-6, "state_block_size": 4}
    plain = PlainLayout(2, head_dim).allocate(blocks)
    ops.compress_and_insert(k_cache=plain, **tensors, **settings, block_size=2, layout="plain")
    quantised = torch.full(kind(2).shape(blocks), 9, dtype=torch.uint8)
    expected = quantised.clone()
    ops.compress_and_insert(k_cache=quantised, **tensors, **settings, block_size=2, layout=layout)
    main, indexer = ops.quantize_and_insert_k_cache, ops.quantize_and_insert_indexer_k
    insert = main if layout == "v4_fp8" else indexer
    insert(plain.flatten(0, 1), expected, torch.arange(6), block_size=2)
    assert torch.equal(quantised, expected)
    assert plain.float().abs().amin(-1).gt(0).all()


def test_only_written_rows_change() -> None:
    """All bytes outside of the slots of finished windows stay."""

    @sampled(100)
    @given(testing.strategy("compress_and_insert"))
    def compare(case: Case) -> None:
        written = case.run(ops.compress_and_insert, (8,))
        before = decode(case, [case.tensors[8]])[-1]
        after = decode(case, written)[-1]
        if case.settings["layout"] == "v4_fp8":  # the eighth scale byte becomes 0
            layout = MainLayout(case.settings["block_size"])
            for _, slot in written_slots(case):
                before.view(-1)[layout.scale_offset(slot) + 7] = 0
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
        if not written_slots(case):
            assert torch.equal(case.tensors[8].view(torch.uint8), written[0].view(torch.uint8))

    compare()
