"""Kernels name the entries of their tuples, so that no reader has to count positions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import dsv4_ops

PACKAGE = Path(dsv4_ops.__file__).parent


def is_jit(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles a function."""
    found = function.decorator_list
    decorators = (each.func if isinstance(each, ast.Call) else each for each in found)
    return any(ast.unparse(each) in ("triton.jit", "gluon.jit") for each in decorators)


def is_entry(node: ast.AST) -> bool:
    """Whether a node is an index such as ``t[0]``, but not ``x[:, None]`` or ``x.shape[0]``."""
    if not isinstance(node, ast.Subscript):
        return False
    index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
    of_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(index, ast.Constant) and type(index.value) is int and not of_shape


def are_names(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(are_names(each) for each in target.elts)
    return isinstance(target, ast.Name)


def named(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the values that are assigned to names: ``x = t[0]``, ``x, y = t[0], t[1]``."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and node.value is not None and are_names(node.target):
            yield node.value
        if isinstance(node, ast.Assign) and all(are_names(each) for each in node.targets):
            yield from node.value.elts if isinstance(node.value, ast.Tuple) else (node.value,)


def indexed_in_place(source: str) -> list[str]:
    """Return ``line: code`` of every entry without a name in the jit functions of a file."""
    unnamed = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and is_jit(function):
            names = set(map(id, named(function)))
            entries = (node for node in ast.walk(function) if is_entry(node))
            others = (node for node in entries if id(node) not in names)
            unnamed += [f"{node.lineno}: {ast.unparse(node)}" for node in others]
    return unnamed


def test_entries_of_tuples_have_names():
    """A function unpacks its tuples in its first lines, or names entries: ``WIDTH = SIZES[0]``."""
    indexed = {path: indexed_in_place(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in indexed.items() if lines} == {}


CODE = """
@triton.jit
def kernel(x, t, SIZES: tl.constexpr):
    WIDTH: tl.constexpr = SIZES[0]
    first, second = t[0], t[1]
    third, fourth = t[2]
    tile = x[:, None] + x.shape[0] + t[WIDTH]
    {line}


def launcher(t):
    return t[0] + t[1]
"""


def test_the_rule_itself():
    """The rule allows names of entries, indices that are no integers, and other functions."""
    assert indexed_in_place(CODE.format(line="return tile")) == []
    for line, expected in {
        "tl.store(x + t[1], tile)": ["t[1]"],
        "last = t[-1] + 1": ["t[-1]"],
        "row = t[1][0]": ["t[1]"],
        "x[0] = tile": ["x[0]"],
        "for value in t[3]: tile += value": ["t[3]"],
    }.items():
        lines = indexed_in_place(CODE.format(line=line))
        assert [each.partition(": ")[2] for each in lines] == expected
    gluon = CODE.replace("@triton.jit", "@gluon.jit(noinline=True)")
    assert indexed_in_place(gluon.format(line="return t[0] * 2")) == ["8: t[0]"]
