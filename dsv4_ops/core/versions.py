"""Releases of torch, Triton and transformers that are tested together, and what to say of others.

``doctor``, the warnings, the documentation and CI's lanes have them from here. No pin holds pip to
the newest of them: a later release is installed and gets a warning of one line.
"""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple


class Lane(NamedTuple):
    """Releases that run the tests together, in an environment of their own."""

    torch: str
    triton: str
    transformers: str


LANES = {
    "oldest": Lane("2.11", "3.6", "5.17"),
    "middle": Lane("2.13", "3.7", "5.20"),
    "torch-2.11": Lane("2.11", "3.6", "5.24"),
    "torch-2.12": Lane("2.12", "3.7", "5.24"),
    "torch-2.13": Lane("2.13", "3.7", "5.24"),
    "torch-2.14": Lane("2.14", "3.8", "5.24"),
    "newest": Lane("2.15", "3.9", "5.24"),
    "transformers-5.18": Lane("2.12", "3.7", "5.18"),
    "transformers-5.19": Lane("2.14", "3.8", "5.19"),
    "transformers-5.21": Lane("2.15", "3.9", "5.21"),
    "transformers-5.22": Lane("2.11", "3.6", "5.22"),
    "transformers-5.23": Lane("2.15", "3.9", "5.23"),
}
"""``make smoke LANE=name``. The full lane of CI has no row: it runs what pip resolves on the day,
which is "newest" until a release follows."""


def release(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0+cu130" or "2.15rc1"."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def supported(package: str) -> tuple[str, str]:
    """The oldest and the newest release of torch, triton or transformers that is tested."""
    releases = sorted({getattr(lane, package) for lane in LANES.values()}, key=release)
    return releases[0], releases[-1]


def partners(torch: str) -> list[str]:
    """Releases of transformers that are tested with a release of torch."""
    found = {lane.transformers for lane in LANES.values() if release(lane.torch) == release(torch)}
    return sorted(found, key=release)


def untested(torch: str, transformers: str | None) -> str:
    """What to say of versions that no lane runs together, in a line; empty if one does."""
    tested = partners(torch)
    if transformers is None and tested:
        return ""
    if transformers is not None and release(transformers) in map(release, tested):
        return ""
    beside = f" with transformers {transformers}" if transformers else ""
    oldest, newest = supported("torch")
    if tested:
        known = f"torch {torch} was tested with transformers {', '.join(tested)}"
    else:
        known = f"torch {oldest} to {newest} were tested"
    return f"torch {torch}{beside} was not tested: {known}."


def warn_if_newer(package: str, version: str) -> None:
    """Warn, in a line, of a release that came after the newest that is tested."""
    newest = supported(package)[1]
    if release(version) > release(newest):
        warnings.warn(
            f"dsv4_ops was tested with {package} up to {newest}, not with {version}: "
            "`python -m dsv4_ops doctor` says what works.",
            stacklevel=3,
        )
