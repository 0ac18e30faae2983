"""Defaults of the functions that kernels call, in the code that Inductor writes."""

import ast
from pathlib import Path

import dsv4_ops

KERNELS = Path(dsv4_ops.__file__).parent / "kernels"


def of_triton(function):
    return any(ast.unparse(each) == "triton.jit" for each in function.decorator_list)


def functions():
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and of_triton(node):
                yield path.name, node


def test_defaults_are_literals():
    """Inductor copies a function without what its signature names: a default that is a constant of
    its module is no name there, which an eager call, and the interpreter, would not show."""
    found = list(functions())
    assert len(found) > 100
    named = [
        f"{file}: {function.name}"
        for file, function in found
        for default in (*function.args.defaults, *filter(None, function.args.kw_defaults))
        if not isinstance(default, ast.Constant)
    ]
    assert named == []
