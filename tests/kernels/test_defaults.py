"""Defaults of device functions, in the code that Inductor writes."""

import ast
from pathlib import Path

import dsv4_ops

KERNELS = Path(dsv4_ops.__file__).parent / "kernels"


def functions():
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if "triton.jit" in map(ast.unparse, getattr(node, "decorator_list", ())):
                yield path.name, node


def test_defaults_are_literals():
    """Inductor copies a function without the names in its signature. If a default is a constant of
    the function's module, the copy lacks it, although eager calls and the interpreter work."""
    found = list(functions())
    assert len(found) > 100
    named = [
        f"{file}: {function.name}"
        for file, function in found
        for default in (*function.args.defaults, *filter(None, function.args.kw_defaults))
        if not isinstance(default, ast.Constant)
    ]
    assert named == []
