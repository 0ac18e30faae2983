"""TensorRT engines, for machines that have TensorRT; these tests have never run."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.tensorrt]

EXAMPLE = Path(__file__).parents[2] / "examples" / "10_tensorrt.py"


@pytest.fixture(scope="module")
def torch_tensorrt():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from dsv4_ops.integrations import tensorrt

    try:
        tensorrt.enable()
    except ImportError as error:
        pytest.skip(str(error))
    return importlib.import_module("torch_tensorrt")


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, k, slots, cache):
        made = self.project(k)
        torch.ops.dsv4_ops.insert_k_cache(made, cache, slots)
        return cache.sum((0, 1)) + made


def inputs():
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(3, 8, generator=generator)
    return k.cuda(), torch.tensor([1, 5, -1]).cuda(), torch.zeros(4, 2, 8).cuda()


@torch.no_grad()
def compiled(torch_tensorrt, step):
    program = torch.export.export(step, inputs())
    settings = {"min_block_size": 1, "disable_tf32": True}
    return torch_tensorrt.dynamo.compile(program, arg_inputs=inputs(), **settings)


@torch.no_grad()
def assert_writes(function, step):
    ours, plain = inputs(), inputs()
    torch.testing.assert_close(function(*ours), step(*plain), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours[2], plain[2], atol=1e-4, rtol=1e-4)
    assert ours[2].any()


def test_an_engine_beside_a_write(torch_tensorrt):
    step = Step().cuda().eval()
    function = compiled(torch_tensorrt, step)
    assert any("_run_on_acc" in name for name, _ in function.named_children())
    assert_writes(function, step)


def test_the_backend_of_torch_compile(torch_tensorrt):
    step = Step().cuda().eval()
    options = {"min_block_size": 1, "pass_through_build_failures": True, "disable_tf32": True}
    assert_writes(torch.compile(step, backend="torch_tensorrt", options=options), step)


def test_cuda_graphs(torch_tensorrt):
    step = Step().cuda().eval()
    with torch_tensorrt.runtime.enable_cudagraphs(compiled(torch_tensorrt, step)) as function:
        assert_writes(function, step)


def test_a_saved_program_writes_too(torch_tensorrt, tmp_path):
    step, path = Step().cuda().eval(), str(tmp_path / "step.ep")
    torch_tensorrt.save(compiled(torch_tensorrt, step), path, inputs=list(inputs()))
    assert_writes(torch_tensorrt.load(path).module(), step)


def test_the_example(torch_tensorrt, monkeypatch):
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 0
