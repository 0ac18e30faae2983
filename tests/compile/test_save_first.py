"""Compiled and packaged steps with ``save_first`` save states before a window reads them."""

from functools import partial
from pathlib import Path

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.lowering.inspect import build_package, load_package
from dsv4_ops.testing.contract import checks
from tests.helpers import nightly

NAME = "the state of another request's token, which this call saves"
CASE = next(case for case in testing.cases_of("save_and_compress") if case.name == NAME)


@pytest.mark.parametrize(
    "how",
    ["aot_eager", *nightly("what Inductor compiles is what aot_eager runs", "inductor", "package")],
)
def test_a_row_has_the_states_that_its_call_saves(how: str, tmp_path: Path) -> None:
    call = partial(ops.save_and_compress, **CASE.settings)
    tensors = CASE.copy().tensors
    if how == "package":
        program = checks.export_dynamic(call, CASE.copy().tensors)
        load_package(build_package(program, tmp_path / "step.pt2"))(*tensors)
    else:
        torch.compile(call, fullgraph=True, backend=how)(*tensors)
    for actual, expected in zip((tensors[2], tensors[9]), CASE.expected, strict=True):
        assert torch.equal(actual, torch.tensor(expected).reshape(actual.shape))
