"""The private names of torch that we use exist in the installed version. Every lane of
``core/versions.py`` runs these tests."""

import ast
import re
from pathlib import Path

import pytest
import torch

import dsv4_ops
from dsv4_ops.core import torch_compat
from dsv4_ops.core.ints import single
from dsv4_ops.core.torch_compat import one_graph_for_all_sizes
from dsv4_ops.lowering import _compat

pytestmark = pytest.mark.smoke

PACKAGE = Path(dsv4_ops.__file__).parent


@pytest.mark.parametrize("module", [_compat, torch_compat], ids=lambda module: module.__name__)
def test_private_names_exist(module):
    assert [name for name in module.__all__ if getattr(module, name) is None] == []


def test_what_is_private_answers():
    assert torch_compat.decomposes_triton_ops() is True
    assert torch_compat.any_requires_grad([torch.ones(1, requires_grad=True)])
    assert not torch_compat.any_requires_grad([torch.ones(1)])
    assert torch_compat.find_schema("dsv4_ops::token_map")
    assert not torch_compat.find_schema("dsv4_ops::none")
    assert not torch_compat.forward_mode()
    assert torch_compat.guard_or_false(2 > 1)
    assert torch_compat.statically_known_true(2 > 1)


def names_in(path):
    """Yield the imported names of a file, and its attributes with the objects before them."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    yield from imported_in(nodes)
    yield from (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))


def imported_in(nodes):
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_private_torch_is_imported_in_two_files_only():
    """The test reads the folders that import no kernel."""
    private = re.compile(r"torch(\.\w+)*\._(?!_)(?!schema|unsafe)")
    offenders = [
        f"{path.name}: {name}"
        for folder in ("core", "dispatch", "ops", "meta", "reference", "lowering")
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name not in ("_compat.py", "torch_compat.py")
        for name in names_in(path)
        if private.match(name) and "torch.ops." not in name
    ]
    assert offenders == []


def test_every_imported_name_is_listed():
    tree = ast.parse((PACKAGE / "lowering" / "_compat.py").read_text())
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    imported = {each.asname or each.name for node in imports for each in node.names}
    assert imported == set(_compat.__all__)


def test_trace_rule_machinery_exists():
    mode = torch.utils._python_dispatch.TorchDispatchMode
    assert issubclass(torch_compat.FunctionalTensorMode, mode)
    assert isinstance(torch.compiler.config.cache_key_tag, str)


def test_atens_used_exist():
    assert torch.ops.aten._unsafe_masked_index.default is not None
    assert torch.ops.aten._unsafe_index.Tensor is not None


def test_inductor_is_imported_in_one_file_only():
    """All private imports are in one file, which a torch upgrade may change."""
    offenders = [
        f"{path.name}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "_compat.py"
        for name in imported_in(ast.walk(ast.parse(path.read_text())))
        if name.startswith("torch._inductor")
    ]
    assert offenders == []


def test_every_kernel_is_launched_with_fusion_set(monkeypatch):
    """Triton 3.10 turns fusion off by default; eager launches, graphs and binaries turn it on."""
    binary = pytest.importorskip("dsv4_ops.kernels.aot.compile", reason="needs triton")
    from dsv4_ops.kernels import launcher
    from dsv4_ops.kernels.common import triton_compat

    asked = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: asked.append((grid, args, options))

    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(launcher, "takes_options_in_graphs", lambda: True)
    launcher.EAGER(Kernel())[(2,)](1, num_warps=4)
    launcher.TRACED(Kernel())[(3,)](2)
    fused = triton_compat.FUSION
    assert asked == [((2,), (1,), {"num_warps": 4, **fused}), ((3,), (2,), fused)]
    monkeypatch.setattr(launcher, "takes_options_in_graphs", lambda: False)
    launcher.TRACED(Kernel())[(4,)](3)
    assert asked[2] == ((4,), (3,), {})
    given = {}
    monkeypatch.setattr(binary.triton, "compile", lambda source, **rest: given.update(rest))
    from dsv4_ops.kernels.indexer.topk import select_logits_kernel

    binary.compiled(select_logits_kernel, [], dict.fromkeys(select_logits_kernel.arg_names, 1), 90)
    assert given["options"] == triton_compat.FUSION


def test_graphs_take_options_where_torch_says_so():
    """On torch 2.14 a traced launch passes FUSION to Inductor; earlier releases may not."""
    compat = pytest.importorskip("dsv4_ops.kernels.common.triton_compat", reason="needs triton")
    newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    assert compat.takes_options_in_graphs() is newer


def test_triton_is_imported_by_its_old_names_in_one_file_only():
    """kernels/common/triton_compat.py looks up what moved between Triton's releases."""
    moved = ("async_copy_global_to_shared", "_reinterpret", "GluonASTSource", "knobs", "get_ptxas")
    offenders = [
        f"{path.name}: {name}"
        for path in (PACKAGE / "kernels").glob("*.py")
        for name in moved
        if path.name != "triton_compat.py" and f"import {name}" in path.read_text()
    ]
    offenders += [
        path.name
        for path in (PACKAGE / "kernels").glob("*.py")
        if path.name != "triton_compat.py"
        and re.search(r"\._reinterpret\(|copy_global_to", path.read_text())
    ]
    assert offenders == []


def lens_of_rank(lens, rank):
    own = dsv4_ops.cp_seq_lens(lens, rank, cp_world_size=2)
    first = single(rank) * 4
    return own, lens.index_select(0, (first + torch.arange(4)).clamp(max=len(lens) - 1))


def test_an_element_is_not_read_past_where_sizes_are_symbols():
    """Inductor of torch 2.11 reads cp_rank[i] of a tensor [1] if the size is symbolic."""
    rank = torch.tensor([1], dtype=torch.int32)
    with one_graph_for_all_sizes():
        compiled = torch.compile(lens_of_rank, dynamic=True, fullgraph=True)
        for count in (1, 8, 5):
            found = compiled(torch.arange(5, 5 + count, dtype=torch.int32), rank)
            assert found[0].tolist() == [length // 2 for length in range(5, 5 + count)]
            assert found[1].tolist() == [5 + min(each, count - 1) for each in range(4, 8)]
