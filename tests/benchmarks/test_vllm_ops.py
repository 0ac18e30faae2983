"""Files of a bundle that the layer benchmark loads one by one: errors name a missing file."""

import lzma
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import vllm_metadata, vllm_ops


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """Make a bundle whose loader does nothing, and restore the interpreter's modules."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/anchor_lib.py").write_text(
        "preloaded = []\ninstall_vllm_stubs = print\npreload = lambda *x: preloaded.extend(x)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "anchor_lib", raising=False)
    monkeypatch.setenv("ANCHOR_DIR", "")
    yield tmp_path
    sys.modules.pop("anchor_lib", None)


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
