"""The indexer's kernels in Triton's interpreter, where their scratch rows are small."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from tests.helpers import NIGHTLY
from tests.support import forked

pytest.importorskip("triton", reason="triton is published for Linux only")

from dsv4_ops.kernels.indexer import topk  # imports triton


class Grids(dict[str, torch.SymInt | int]):
    """A launch that takes down the programs of every kernel."""

    def __call__(self, kernel):
        return Grid(self, kernel.__name__.removesuffix("_kernel"))


class Grid:
    def __init__(self, grids, name):
        self.grids, self.name = grids, name

    def __getitem__(self, grid):
        (self.grids[self.name],) = grid
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("tokens", "grouped", "parts"),
    # 396 programs are 49, 6, 1 and 0 for each token; the lists of 8 and fewer are merged at once
    [(8, 64, 8), (66, 1, 66), (200, 1, 1), (400, 1, 1)],
)
def test_merges_of_any_number_of_tokens(tokens, grouped, parts):
    """A graph for any number of tokens merges for all of them, or launches one program where that
    number turns out to leave nothing to merge."""
    logits, lens = torch.empty(tokens, 200_000), torch.empty(tokens, dtype=torch.int32)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [mode.from_tensor(each, static_shapes=False) for each in (logits, lens)]
        grids = Grids()
        OPS["indexer_topk"].launcher("triton")(grids, *fakes, topk=512)
    assert isinstance(grids["merge_groups"], torch.SymInt)
    assert int(grids["merge_groups"]) == grouped
    assert int(grids["merge_parts"]) == parts


@pytest.mark.parametrize(
    ("next_n", "num_heads", "together"),
    [
        *((1, 64, 1), (2, 64, 2), (3, 64, 3), (4, 64, 4), (5, 64, 1), (6, 64, 3), (8, 64, 4)),
        *((4, 128, 2), (4, 512, 1)),
    ],
)
def test_tokens_of_a_row_share_keys(next_n, num_heads, together):
    """As many as divide a row and have their queries in shared memory, for any number of rows."""
    layout, rows = IndexerLayout(64), 6
    tensors = (
        torch.empty(rows * next_n, num_heads, 128).to(torch.float8_e4m3fn),
        torch.empty(rows * next_n, num_heads),
        layout.allocate(8),
        torch.empty(rows, next_n, dtype=torch.int64),
        torch.empty(rows * next_n, dtype=torch.int32),
        torch.empty(rows, 512, dtype=torch.int32),
    )
    sizes = {"block_size": 64, "compress_ratio": 4, "topk": 512, "layout": layout.tag}
    grids = Grids()
    OPS["indexer_select"].launcher("triton")(grids, *tensors, **sizes)
    kernel = "select_keys" if together == 1 else "select_shared_keys"
    assert kernel in grids
    # each row of keys in up to 128 parts
    most = topk.PROGRAMS if together == 1 else topk.SHARED_PROGRAMS
    groups = rows * next_n // together
    assert grids[kernel] == groups * min(128, most // groups)


@pytest.mark.slow
def test_parts_reductions_and_groups_choose_the_same_rows():
    script = Path(__file__).parent / "interpret_indexer.py"
    launched = "\n".join(forked.interpreted(script, "20" if NIGHTLY else "1"))
    assert "select_shared_keys_kernel" in launched
    assert "indexer_logits_shared_kernel" in launched
    assert "merge_groups_kernel" in launched
    assert "merge_parts_kernel" in launched
