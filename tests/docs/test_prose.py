"""Lines of Markdown are short, named files exist, docstrings begin with a noun or a verb."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", "benchmarks", "docs", "dsv4_ops", "examples", "tests")
WIDTH = 120
NAMED = re.compile(r"(?<![\w/<*{-])(?:\.\./)*((?:\.?[\w-]+/)*[\w-]+\.(?:py|md))\b(?!\.\w|/)")
BEGINS = re.compile(r"(Of|By|Likewise|The same)\b")


def files(pattern: str) -> list[Path]:
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob(pattern))
    return sorted([*ROOT.glob(pattern), *below])


SOURCES = files("*.py")
PAGES = [page.relative_to(ROOT).as_posix() for page in files("*.md")]
EXISTING = {
    "/".join(parts[start:])
    for parts in (path.relative_to(ROOT).parts for path in [*SOURCES, *files("*.md")])
    for start in range(len(parts))
}
"""Paths, and their ends: prose may say ``kernels/launcher.py``."""


def docstrings(text: str) -> list[str]:
    """Return the docstrings of modules, classes, functions and assigned names."""
    return [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def absent(text: str) -> set[str]:
    """Return the files that a text names but that do not exist."""
    return set(NAMED.findall(text)) - EXISTING


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_pages_are_short(page):
    """Tables, code, marks of figures and targets of links do not count."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    lines = re.sub(r"<!--.*?-->|\]\([^)\s]*\)", "", text).splitlines()
    wide = [line for line in lines if len(line) > WIDTH]
    assert [line for line in wide if not line.startswith(("|", "    "))] == []


OF_ANOTHER = {"benchmarks/README.md": {"name.py"}}
"""Files of other packages, and placeholders."""


@pytest.mark.parametrize("page", PAGES)
def test_a_file_that_a_page_names_exists(page):
    assert absent((ROOT / page).read_text()) == OF_ANOTHER.get(page, set())


def test_a_file_that_a_docstring_or_a_comment_names_exists():
    named = {}
    for path in SOURCES:
        text = path.read_text()
        if not absent(text):  # if the file names none, its docstrings name none
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
        if gone := absent("\n".join([*docstrings(text), *comments])):
            named[path.relative_to(ROOT).as_posix()] = gone
    assert named == {}


def test_an_extra_is_installed_from_a_clone():
    """No index has the package, so pip would not find ``dsv4_ops``."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^([\w-]+) = ", table.split("\n[")[0], re.M))
    texts = {path: path.read_text() for path in [*SOURCES, *files("*.md")]}
    assert [path for path, text in texts.items() if re.search(r"dsv4_ops\[\w", text)] == []
    named = re.findall(r"pip install '\.\[(.+?)\]'", "".join(texts.values()))
    helper = re.findall(r"install_extra\([\"'](\w+)", "".join(texts.values()))
    index = re.search(r"\| extra \|.*?\n\n", texts[ROOT / "docs/index.md"], re.S)[0]
    assert set(re.findall(r"^\| `([\w-]+)` ", index, re.M)) == extras
    assert {name for name in [*named, *helper] if name.isidentifier()} <= extras


def test_no_docstring_begins_with_what_belongs_behind_its_noun():
    begins = {
        f"{path.relative_to(ROOT)}: {first}"
        for path in (ROOT / "dsv4_ops").rglob("*.py")
        for text in docstrings(path.read_text())
        if BEGINS.match(first := " ".join(text.split()[:6]))
    }
    assert begins == set()


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("see ``kernels/launcher.py`` and ../docs/performance.md.", set()),
        ("see no_such_file.py.", {"no_such_file.py"}),
        ("kernels/<stem>.py, tests/*.py, {name}.py", set()),
    ],
)
def test_names_of_files_are_found(text, gone):
    assert absent(text) == gone
