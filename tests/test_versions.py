"""The tested versions are in one file, and later versions cause a warning."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dsv4_ops.core import versions
from tests.support import forked

ROOT = Path(__file__).resolve().parents[1]
NEWEST = {"torch": "2.15", "triton": "3.9", "transformers": "5.24"}
OLDEST = {"torch": "2.11", "triton": "3.6", "transformers": "5.17"}


@pytest.mark.parametrize("package", OLDEST)
def test_every_release_from_the_oldest_to_the_newest_has_a_lane(package):
    major, first = versions.release(OLDEST[package])
    _, last = versions.release(NEWEST[package])
    tested = {getattr(lane, package) for lane in versions.LANES.values()}
    assert tested == {f"{major}.{minor}" for minor in range(first, last + 1)}
    assert versions.supported(package) == (OLDEST[package], NEWEST[package])


def test_every_torch_meets_the_newest_transformers():
    torches = {lane.torch for lane in versions.LANES.values()}
    newest = NEWEST["transformers"]
    lanes = (lane for lane in versions.LANES.values() if lane.transformers == newest)
    assert {lane.torch for lane in lanes} == torches


def test_a_torch_has_one_triton():
    """Each lane has the Triton that its torch requires."""
    pairs = {(lane.torch, lane.triton) for lane in versions.LANES.values()}
    assert len(pairs) == len({torch for torch, _ in pairs})


def test_pins_have_no_upper_bound():
    """With an upper bound, pip would downgrade a user's packages, or refuse them."""
    project = (ROOT / "pyproject.toml").read_text()
    for package, oldest in OLDEST.items():
        assert re.findall(rf'"{package}([<>=~!][^";]*)', project) == [f">={oldest}"]


def test_the_pages_say_what_is_tested():
    spans = {package: " to ".join(versions.supported(package)) for package in OLDEST}
    readme = (ROOT / "README.md").read_text()
    assert f"torch {spans['torch']}, Triton {spans['triton']} " in readme
    assert f"transformers {spans['transformers']}" in readme
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+) \| (.*?) \| (.*?) \|$", page, re.M)
    torches = sorted({lane.torch for lane in versions.LANES.values()}, key=versions.release)
    triton = {lane.torch: lane.triton for lane in versions.LANES.values()}
    assert rows == [(each, triton[each], ", ".join(versions.partners(each))) for each in torches]


def lane(*names):
    command = [sys.executable, str(ROOT / ".ci" / "lanes.py"), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_makefile_is_told_what_a_lane_has():
    assert lane("oldest").stdout == "torch==2.11.* triton==3.6.* transformers==5.17.*\n"
    assert lane().stdout.split() == list(versions.LANES)
    wrong = lane("oldst")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "LANE must be one of oldest, middle," in wrong.stderr


@pytest.mark.parametrize("version", ["2.16.0.dev20261127+cu132", "2.16.1", "3.0"])
def test_a_later_release_is_a_warning_of_one_line(version):
    with pytest.warns(UserWarning, match="up to 2.15, not with") as found:
        versions.warn_if_newer("torch", version)
    (warning,) = found
    assert str(warning.message) == (
        f"dsv4_ops was tested with torch up to 2.15, not with {version}: "
        "`python -m dsv4_ops doctor` says what works."
    )


@pytest.mark.parametrize("version", ["2.15.0+cu132", "2.15.9", "2.11.0a0+git1"])
def test_a_tested_release_is_no_warning(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_newer("torch", version)


def test_imports_warn_of_later_releases(tmp_path):
    """The package warns of torch, and its integration of transformers."""
    code = """
import sys, torch, importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: "6.0.0" if name == "transformers" else known(name)
torch.__version__ = "2.99.0"
import dsv4_ops
print("between", file=sys.stderr)
import dsv4_ops.integrations.transformers
"""
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    done = forked.python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, _, second = done.stderr.partition("between")
    assert "tested with torch up to 2.15, not with 2.99.0" in first
    assert "tested with transformers up to 5.24, not with 6.0.0" in second


@pytest.mark.parametrize(
    ("version", "pair"),
    [("2.15.0+cu130", (2, 15)), ("2.16.0a0+git1234", (2, 16)), ("2.16rc1", (2, 16)),
     ("5.25.0.dev0", (5, 25)), ("6", (6, 0)), ("unknown", (0, 0))],
)  # fmt: skip
def test_a_release_of_any_version_string(version, pair):
    assert versions.release(version) == pair
