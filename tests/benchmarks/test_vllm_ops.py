"""Files of a bundle that a benchmark loads by themselves: what is missing is named."""

import lzma
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import vllm_metadata, vllm_ops

LIBRARY = """
import importlib, importlib.machinery, sys, types

class _Stubs:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        pass

def install_vllm_stubs():
    if not any(isinstance(finder, _Stubs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Stubs())

def preload(*names):
    preloaded.extend(names)

preloaded = []
"""
QUANTISE = """
import torch
from vllm.utils.torch_utils import direct_register_custom_op
from .scales import SCALE

def _impl(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x * SCALE, x.new_zeros(count)

def quantise(x):
    from vllm.utils.deep_gemm import get_tma_aligned_size

    return torch.ops.vllm.test_quantise(x, get_tma_aligned_size(x.shape[0], 4))

direct_register_custom_op(op_name="test_quantise", op_func=_impl, fake_impl=None)
"""


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A bundle with a loader of stubs and two files, and the interpreter as it was."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/anchor_lib.py").write_text(LIBRARY)
    kernels = tmp_path / "vllm_py" / vllm_ops.KERNELS
    kernels.mkdir(parents=True)
    (kernels / "scales.py").write_text("SCALE = 2.0\n")
    (kernels / "quantise.py").write_text(QUANTISE)
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in ("vllm", "anchor_lib")]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("ANCHOR_DIR", "")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "anchor_lib")]:
        del sys.modules[name]
    sys.modules.update(before)


def test_a_file_runs_with_its_neighbours_and_what_the_stubs_lack(bundle):
    assert vllm_ops.triton_file(bundle, "scales").SCALE == 2.0
    module = vllm_ops.triton_file(bundle, "quantise")
    doubled, padding = module.quantise(torch.ones(5))
    assert doubled.tolist() == [2.0] * 5
    assert padding.shape == (8,)
    again = vllm_ops.triton_file(bundle, "quantise")  # its op exists once
    assert again.quantise(torch.ones(4))[1].shape == (4,)


def test_what_is_missing_is_named(bundle):
    with pytest.raises(FileNotFoundError) as error:
        vllm_ops.triton_file(bundle, "absent")
    where = f"vllm_py/models/deepseek_v4/common/ops/absent.py in {bundle.name}"
    assert str(error.value) == f"no {where}"
    with pytest.raises(FileNotFoundError, match=r"no _C\.abi3\.so in "):
        vllm_ops.extension(bundle)


def test_the_extension_is_loaded_once_packed_or_not(bundle, monkeypatch):
    found = []
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: found.append(Path(path).read_bytes())
    )
    (bundle / "_C.abi3.so.xz").write_bytes(lzma.compress(b"packed"))
    for _ in range(2):
        assert vllm_ops.extension(bundle) is torch.ops._C
    (bundle / "_C.abi3.so").write_bytes(b"plain")
    vllm_ops.extension(bundle)
    assert found == [b"packed", b"plain"]
    assert vllm_metadata.library(bundle).preloaded == ["libcudart.so.13"] * 2
