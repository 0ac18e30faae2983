"""How many splits a prefill on Hopper makes of the keys of its tokens."""

import pytest
import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.core.target import HOPPER
from dsv4_ops.dispatch.prefill import gathers
from tests.support.prefill_batches import PREFILL, prefill_case, unsplit

pytest.importorskip("triton", reason="triton is for Linux only")
pytest.importorskip("dsv4_ops.kernels.common.hopper.support")
from tests.support.launches import Launches


def test_keys_of_few_tokens_are_cut():
    """128 + 70 keys are 2 + 2 blocks, and a combine takes the time of a block: 2 splits have 2
    blocks each, 4 have one. If a token must have the same bits in every batch, it has one split."""
    for tokens, heads, splits in ((1, 8, 4), (33, 64, 4), (34, 64, 2), (33, 65, 2), (67, 64, 1)):
        case = prefill_case(1, tokens, heads, "C4", topk=70, longest=300)
        for each, expected in ((case, splits), (unsplit(case), 1)):
            launch = Launches(HOPPER)
            OPS[PREFILL].implementation("kernels")(launch, *each.tensors, **each.settings)
            joined = [("combine_splits_kernel", (tokens, heads, 1))] if expected > 1 else []
            wide = -(-heads // 64)
            grid = (tokens * expected, wide)
            assert launch.made == [("hopper_prefill_keys_kernel", grid), *joined]


@pytest.mark.parametrize(
    ("tokens", "pages", "copied"),
    [(100, 747, 0), (100, 748, 1), (66, 4096, 0), (67, 4096, 1), (133, 300, 0), (133, 400, 1)],
)
def test_wide_tables_are_copied(tokens, pages, copied):
    """In place, 100 tokens take 132 * 0.06 ns per key (128 and the table's rows). A copy takes 12
    us and 0.5 ns per row (the table's and 227). The times are equal at 1496 rows, or 748 blocks of
    2. Up to 66 tokens are split instead; 133 tokens need as much time in place as 264."""

    def made(*shape):
        return torch.empty(shape, dtype=torch.int32, device="meta")

    values = {
        "q": made(tokens, 64, 512), "swa_block_table": made(1, 9000), "swa_block_size": 64,
        "extra_cache": made(1, 1), "extra_block_table": made(1, pages), "extra_block_size": 2,
        "topk_indices": None, "window_size": 128,
    }  # fmt: skip
    assert gathers(values) == copied
