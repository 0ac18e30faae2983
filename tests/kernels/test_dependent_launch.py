"""A kernel that starts before the previous kernel has ended waits for it before it uses memory."""

import ast
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops import kernels as package
from dsv4_ops.cli import kernels
from dsv4_ops.core.torch_compat import FakeTensorMode
from dsv4_ops.kernels import launcher
from dsv4_ops.kernels.experts.plan import expert_counts_kernel
from dsv4_ops.kernels.external.sanitize import finish_heads_kernel
from tests.helpers import nightly
from tests.support.hopper import hopper  # noqa: F401  # a fixture

LATE = {"finish_heads_kernel"}
"""This kernel follows FlashMLA's combine, which may end before the combine's predecessor."""

WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
MEMORY = re.compile(r"\b(?:ld|st|atom|red|prefetch)[\w.:]*\.global|\bcp\.\w|\bgriddepcontrol\.\w+")


def test_all_kernels_but_late_ones_wait_in_their_first_line():
    """The wait comes before any branch, so that every program waits, and it occurs nowhere else."""
    functions, called = {}, set()
    for path in Path(*package.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "jit" in map(_decorator, node.decorator_list):
                functions[node.name] = node
                called |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                called |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    call, first = "wait_for_previous_kernel()", set()
    for name, node in functions.items():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        first |= {name} if ast.unparse(body[0]) == call else set()
        assert call not in "\n".join(map(ast.unparse, body[1:]))
    assert first == functions.keys() - called - LATE
    assert len(first) > 50


def _decorator(node):
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", None)


CHEAP = ("expert_plan", "gather_k_cache, plain", "mla_expand_kv")


@pytest.mark.parametrize(
    "example", [*CHEAP, *nightly("CHEAP", *sorted(kernels.examples().keys() - CHEAP))]
)
def test_the_wait_comes_before_memory(example):
    """On Hopper, kernels in Triton and Gluon wait; earlier GPUs have no such instruction."""
    call, op = kernels.examples()[example], example.partition(",")[0]
    for launch in kernels.launches(op, *call, (9, 0)):
        made = kernels.compiled(launch, 90)
        assert made.metadata.launch_pdl
        assert MEMORY.findall(made.asm["ptx"])[:2] == [WAIT, NEXT], launch.kernel.__name__
        assert made.asm["ptx"].count(WAIT) == 1
    if example in CHEAP:
        (launch,) = kernels.launches(op, *call, (8, 0))
        made = kernels.compiled(launch, 80)
        assert not made.metadata.launch_pdl
        assert "griddepcontrol" not in made.asm["ptx"]


@pytest.mark.usefixtures("hopper")
def test_launches_ask_for_it_on_hopper_if_the_kernel_waits(monkeypatch):
    """Eager and traced launches set the option, with which the compiler writes the wait."""
    asked = []

    class Kernel:
        def __init__(self, kernel):
            self.fn = kernel.fn

        def __getitem__(self, grid):
            return lambda *args, **options: asked.append(options.get("launch_pdl"))

    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(launcher, "takes_options_in_graphs", lambda: True)
    with FakeTensorMode():
        here, there = torch.empty(1), torch.empty(1, device="cuda")
    for launch in (launcher.EAGER, launcher.TRACED):
        launch(Kernel(expert_counts_kernel))[1,](2, there)
        launch(Kernel(expert_counts_kernel))[1,](here)
        launch(Kernel(finish_heads_kernel))[1,](there)
    assert asked == 2 * [True, None, None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    launcher.EAGER(Kernel(expert_counts_kernel))[1,](there)
    assert asked[-1] is None
