"""The indexer's kernels in Triton's interpreter, with small scratch rows."""

from pathlib import Path

import pytest
import torch

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from tests.helpers import NIGHTLY
from tests.support import forked

pytest.importorskip("triton", reason="published for Linux only")
from tests.support.launches import Launches


@pytest.mark.parametrize(
    ("name", "kernel", "dtype", "settings"),
    [
        ("indexer_logits", "indexer_logits_kernel", torch.int32, {"num_rows": 9}),
        ("indexer_select", "select_keys_kernel", torch.int64, {"compress_ratio": 4, "topk": 512}),
    ],
)
def test_rows_of_tokens_are_a_view_of_one_row_a_token(name, kernel, dtype, settings):
    """Six requests with four tokens run as 24 tokens, without a copy of the caller's memory."""
    layout = IndexerLayout(64)
    places, tables = torch.zeros(6, 4, dtype=dtype), torch.zeros(6, 8, dtype=torch.int32)
    queries = (torch.empty(24, 64, 128).to(torch.float8_e4m3fn), torch.empty(24, 64))
    requests = torch.zeros(24, dtype=torch.int32)
    launches, flat = Launches(), Launches()
    for taken, each in ((launches, places), (flat, places.flatten())):
        tensors = (*queries, layout.allocate(8), each, requests, tables)
        OPS[name].launcher("triton")(taken, *tensors, block_size=64, layout=layout.tag, **settings)
    assert launches.made == flat.made
    given = [each for each in launches.arguments[kernel] if isinstance(each, torch.Tensor)]
    assert [each.shape for each in given if each.data_ptr() == places.data_ptr()] == [(24,)]


@pytest.mark.nightly("test_kernels.py has launches of one part, tests/gpu/test_indexer.py of more")
@pytest.mark.slow
def test_parts_reductions_and_groups_choose_the_same_rows():
    script = Path(__file__).parent / "interpret_indexer.py"
    launched = "\n".join(forked.interpreted(script, "20" if NIGHTLY else "1"))
    for name in ("merge_groups_kernel", "merge_parts_kernel", "select_kept_kernel"):
        assert name in launched
