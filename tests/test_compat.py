"""The private names of torch that we rely on exist in the installed version; CI and the GPU machine
cover 2.13 and 2.11."""

import ast
from pathlib import Path

import pytest
import torch

import dsv4_ops
from dsv4_ops.lowering import _compat

PACKAGE = Path(dsv4_ops.__file__).parent


@pytest.mark.parametrize("name", _compat.__all__)
def test_inductor_name_exists(name):
    assert getattr(_compat, name) is not None


def test_every_imported_name_is_listed():
    tree = ast.parse((PACKAGE / "lowering" / "_compat.py").read_text())
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(_compat.__all__)


def test_trace_rule_machinery_exists():
    import torch._functorch.config as functorch_config
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    assert functorch_config.decompose_custom_triton_ops is True
    assert issubclass(FunctionalTensorMode, torch.utils._python_dispatch.TorchDispatchMode)
    assert isinstance(torch.compiler.config.cache_key_tag, str)


def test_atens_used_exist():
    assert torch.ops.aten._unsafe_masked_index.default is not None
    assert torch.ops.aten._unsafe_index.Tensor is not None


def test_inductor_is_imported_in_one_file_only():
    """One home for private imports: a torch upgrade touches one file."""
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            offenders += [
                f"{path.name}: {name}" for name in names if name.startswith("torch._inductor")
            ]
    assert offenders == []
