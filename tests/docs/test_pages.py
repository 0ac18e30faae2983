"""The code in README and docs/ runs and prints what its comments say, links lead to files, and the
API reference has every public name."""

import importlib
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from dsv4_ops.__main__ import main
from dsv4_ops.core.versions import release
from tests.helpers import nightly
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
PAGES = sorted(page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text()))
GPU, LONG = "# needs a GPU\n", "# takes "
"""First lines of blocks that do not run here, or not in every run."""


def run(code, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = forked.python("-c", code, cwd=folder, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def blocks(page):
    """Return the blocks of code that the installed transformers can run."""
    found = BLOCK.findall((DOCS / page).read_text())
    try:
        installed = release(version("transformers"))
    except PackageNotFoundError:
        return found
    return [block for block in found if "generate_batch" not in block or installed >= (5, 19)]


def check(code, folder):
    """Assert that the printed lines equal the comments after each ``print``."""
    if "transformers" in code:
        pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    printed = re.findall(r"^print\(.*\)  # (.*)", code, re.M)
    assert len(printed) == len(re.findall(r"^print\(", code, re.M))
    assert run(code, folder).splitlines() == printed


COMPILED = ["own_engine.md", "transformers.md"]
"""Files with calls of ``torch.compile``. A test below runs all code of such a file eagerly."""
OTHERS = [page for page in PAGES if page not in COMPILED]


@pytest.mark.parametrize(
    "page", [*OTHERS, *nightly("test_code_to_compile_runs_eagerly_too runs it", *COMPILED)]
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, tmp_path):
    chosen = [block for block in blocks(page) if not block.startswith((GPU, LONG))]
    check("\n".join(chosen), tmp_path)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.nightly("the other blocks run, and those that compile in the next test")
def test_the_code_that_compiles_for_long_runs_too(page, tmp_path):
    check("\n".join(block for block in blocks(page) if not block.startswith(GPU)), tmp_path)


@pytest.mark.parametrize("page", COMPILED)
def test_code_to_compile_runs_eagerly_too(page, tmp_path, monkeypatch):
    """An eager step refuses tokens that a compiled step only counts."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    quick = [block for block in blocks(page) if not block.startswith((GPU, LONG))]
    long = [block for block in blocks(page) if block.startswith(LONG)]
    compiled = [block for block in long if "torch.compile(" in block]
    assert compiled
    check("\n".join(b for b in blocks(page) if b in quick or b in compiled), tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_code_that_needs_a_gpu_is_python(page):
    for block in blocks(page):
        if block.startswith(GPU):
            compile(block, page, "exec")


def test_the_guides_have_code():
    assert {"engines.md", "own_engine.md", "transformers.md"} <= set(PAGES)


def test_the_readme_loads_patches_and_generates(tmp_path):
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    (block,) = BLOCK.findall((ROOT / "README.md").read_text())
    made = "from tests.docs.checkpoint import save\nsave('path/to/model')\n"
    assert run(made + block, tmp_path).startswith("The sky is")


def test_the_reference_has_the_table_that_list_prints(capsys):
    assert main(["list", "--markdown"]) == 0
    begin, end = "<!-- ops: python -m dsv4_ops list --markdown -->\n", "<!-- /ops -->"
    page = (DOCS / "api/index.md").read_text()
    assert page.partition(begin)[2].partition(end)[0] == capsys.readouterr().out


PUBLIC = {
    "dsv4_ops": {"__version__"},
    "dsv4_ops.attention": {"KINDS"},
    "dsv4_ops.integrations.transformers": set(),
    "dsv4_ops.dispatch.providers": {"LIBRARIES", "VARIABLES", "Choice", "FlashMlaPlan"},
    "dsv4_ops.testing": set(),
}
"""Modules with ``__all__``, and the names that need no entry."""


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(module):
    if module.endswith("transformers"):
        pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", pages, re.M)
    assert len(entries) == len(set(entries))
    names = set(importlib.import_module(module).__all__) - PUBLIC[module]
    assert {f"{module}.{name}" for name in names} <= set(entries)


def test_the_reference_has_no_name_that_is_gone():
    for page in (DOCS / "api").glob("*.md"):
        for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            module, _, name = entry.rpartition(".")
            if "transformers" not in module:
                assert hasattr(importlib.import_module(module), name), entry


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page):
    """`make docs` checks the links in ``docs/``."""
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.S)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    wrong = [target for target in targets if ":" not in target and not (ROOT / target).exists()]
    assert wrong == []
