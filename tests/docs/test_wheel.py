"""Check the contents of the wheel, and that it works with only its dependencies installed."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from dsv4_ops import __version__
from dsv4_ops.core.registry import OPS

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **settings):
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **settings
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, because a build leaves files in the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source, build = folder / "source", folder / "build"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in ("dsv4_ops", "benchmarks", "examples", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "wheel", *offline, "--wheel-dir", build, source)
    (made,) = build.iterdir()
    return made


def test_the_version_is_that_of_changelog_and_tag():
    """A commit without a tag, or a copy without git, is between versions."""
    heading = re.search(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    assert heading[1] == __version__
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return
    found = subprocess.run(
        [git, "-C", ROOT, "tag", "--points-at", "HEAD"], capture_output=True, text=True, check=True
    )
    tags = [tag for tag in found.stdout.split() if tag.startswith("v")]
    assert tags in ([], [f"v{__version__}"])
    assert not tags or re.fullmatch(r" - \d{4}-\d\d-\d\d", heading[2])


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"dsv4_ops-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        information = f"dsv4_ops-{__version__}.dist-info"
        metadata = message_from_bytes(archive.read(f"{information}/METADATA"))
    assert {name.split("/")[0] for name in names} == {"dsv4_ops", information}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dsv4_ops").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("dsv4_ops/")} == expected
    assert metadata["Version"] == __version__
    labels = {url.partition(",")[0] for url in metadata.get_all("Project-URL")}
    assert labels == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert {"transformers", "docs"} <= set(metadata.get_all("Provides-Extra"))


WORKS = """
import pathlib, runpy, sys, torch, dsv4_ops
print(pathlib.Path(dsv4_ops.__file__).parent)
starts, lens = torch.tensor([0, 2, 3]).int(), torch.tensor([2, 7]).int()
print(dsv4_ops.token_map(starts, lens, num_tokens=4).positions.tolist())
sys.argv = ["dsv4_ops", "list"]
runpy.run_module("dsv4_ops", run_name="__main__")
"""


def test_an_installed_wheel_runs_ops_and_lists_them(wheel, tmp_path):
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    offline = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run("-m", "pip", "install", *offline, "--target", target, wheel)
    settings = {"cwd": elsewhere, "env": {**os.environ, "PYTHONPATH": str(target)}}
    package, positions, _, *listed = run("-c", WORKS, **settings).splitlines()
    assert Path(package) == target / "dsv4_ops"
    assert positions == "[0, 1, 6, -1]"
    assert [line.split()[0] for line in listed] == list(OPS)
