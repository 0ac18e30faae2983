"""The repair of Inductor's scheduler; ``test_examples.py`` runs graphs that need the repair."""

import functools

import pytest
import torch
from torch.utils._ordered_set import OrderedSet

from dsv4_ops.lowering import _compat, inductor_fixes


class Node:
    """A scheduler node, as far as its recomputation needs one."""

    def __init__(self, reads, renames):
        from torch._inductor.dependencies import ReadWrites

        self.found = ReadWrites(OrderedSet(reads), OrderedSet(), OrderedSet())
        self.read_writes = self.found
        self.mutation_renames = renames
        self.set_read_writes(self.found.rename(renames))

    def _compute_attrs(self, **_):
        """Compute what an analysis of the loops finds; it omits dependencies added later."""
        self.read_writes = self.found

    def set_read_writes(self, read_writes):
        self.read_writes = read_writes


def memory(name):
    from torch._inductor.dependencies import MemoryDep

    return MemoryDep(name, 0, (), ())


def names(node):
    return {dependency.name for dependency in node.read_writes.reads}


@pytest.fixture(autouse=True)
def _fixed():
    inductor_fixes.fix_scheduler()
    inductor_fixes.fix_scheduler()  # a second call does nothing


def test_a_read_after_a_write_stays_after_it():
    """The node of buffer 146 wrote the cache, which is argument 5."""
    node = Node([memory("arg5"), memory("buf7")], {"arg5": "buf146"})
    assert names(node) == {"buf146", "buf7"}
    _compat.SchedulerNode.recompute_size_and_body(node)
    assert names(node) == {"buf146", "buf7"}


def test_an_order_that_no_loop_shows_is_kept():
    node = Node([memory("buf7")], {})
    node.set_read_writes(node.read_writes.with_read(_compat.StarDep("buf3")))
    _compat.SchedulerNode.recompute_size_and_body(node)
    assert names(node) == {"buf3", "buf7"}


def test_other_nodes_are_as_they_were():
    node = Node([memory("buf7")], {})
    _compat.SchedulerNode.recompute_size_and_body(node)
    assert node.read_writes is node.found


def test_a_compile_on_a_cpu_is_fixed():
    """One op of ours in the graph is enough to repair the scheduler."""
    import dsv4_ops

    starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    build = torch.compile(lambda *given: dsv4_ops.mtp_seq_lens(*given, next_n=2), fullgraph=True)
    assert build(starts, lens).tolist() == [[1, 2]]
    wrapped = _compat.SchedulerNode.recompute_size_and_body
    assert wrapped.__wrapped__.__name__ == "recompute_size_and_body"


class Loop:
    """A loop, as far as code generation needs one: its inputs have their names in C++."""

    def __init__(self, *inputs):
        self.additional_inputs = [inductor_fixes._NamedInput(each) for each in inputs]

    def get_name(self):
        return "loop"


class Wrapper:
    """Records lines; code for a loop is the names that the loop reads."""

    def __init__(self):
        self.lines, self.fails = [], False

    def writeline(self, line):
        self.lines.append(line)

    def codegen_while_loop(self, while_loop, *_, **__):
        self.lines.append([each.codegen_reference() for each in while_loop.additional_inputs])
        if self.fails:
            raise RuntimeError("no code")


@pytest.fixture
def wrapper(monkeypatch):
    """Return a wrapper of a new class, with our fix."""
    kind = type("Wrapped", (Wrapper,), {"codegen_while_loop": Wrapper.codegen_while_loop})
    again = functools.cache(inductor_fixes.fix_while_loop.__wrapped__)
    monkeypatch.setattr(inductor_fixes, "fix_while_loop", again)
    monkeypatch.setattr(_compat, "CppWrapperCpu", kind)
    inductor_fixes.fix_while_loop()
    inductor_fixes.fix_while_loop()  # a second call does nothing
    return kind()


def test_views_that_a_loop_reads_have_names(wrapper):
    """In C++ a view is a call, so a loop needs a name for it; a buffer has a name."""
    wrapper.codegen_while_loop(Loop("buf3", "wrap(view(arg5, 64))", "arg1"))
    name = "loop_input_1"
    assert wrapper.lines == [f"auto {name} = wrap(view(arg5, 64));", ["buf3", name, "arg1"]]


@pytest.mark.parametrize("fails", [False, True])
def test_the_loop_has_its_inputs_back(wrapper, fails):
    loop, wrapper.fails = Loop("view(arg5)"), fails
    given = loop.additional_inputs
    try:
        wrapper.codegen_while_loop(loop)
    except RuntimeError:
        assert fails
    assert loop.additional_inputs is given
