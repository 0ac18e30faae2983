"""The indexer's kernels in Triton's interpreter, where their scratch rows are small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is published for Linux only")


@pytest.mark.slow
def test_parts_reductions_and_groups_choose_the_same_rows():
    script = Path(__file__).parent / "interpret_indexer.py"
    done = subprocess.run(
        [sys.executable, script, "40"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "merge_groups_kernel" in done.stdout
    assert "merge_parts_kernel" in done.stdout


class NoDevice:
    """A driver for an H200 that is not there: enough to trace kernels."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def written(kernel, arguments):
    """Tensors that torch takes for written to, as far as its version says."""
    from torch._higher_order_ops import triton_kernel_wrap

    if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):
        return set(triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {}))
    found = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
    return {item.name for item in found.read_writes.writes}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("indexer_quantize_q", {"out", "weights_out"}),
        ("indexer_logits", {"out"}),
        ("indexer_logits_ragged", {"out"}),
        ("indexer_topk", {"keys", "indices", "plan", "out"}),
        ("indexer_select", {"keys", "indices", "plan", "out"}),
    ],
)
def test_torch_takes_no_argument_for_written_to(op, expected, monkeypatch):
    """Else compiled graphs with caches and queries as arguments would be refused by CUDA graphs, or
    copy them."""
    from triton.runtime import driver

    from dsv4_ops.kernels import report

    monkeypatch.setattr(driver, "_active", NoDevice())
    found = set()
    arguments, settings = report.examples()[op]
    for launch in report.recorded(op, arguments, settings):
        named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        named |= {name: value for name, value in launch.kwargs.items() if name != "num_warps"}
        found |= written(launch.kernel, named)
    assert found == expected
