"""Releases of torch, Triton and transformers that are tested together; warnings for others.

``doctor``, the warnings, the documentation and CI's lanes read ``LANES``. pip may install a release
that is newer than all tested releases, which causes a one-line warning.
"""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple


class Lane(NamedTuple):
    """Releases that the tests run on together, in a separate environment."""

    torch: str
    triton: str
    transformers: str


LANES = {
    "oldest": Lane("2.11", "3.6", "5.17"),
    "middle": Lane("2.13", "3.7", "5.19"),  # what vLLM 0.32 takes
    "torch-2.11": Lane("2.11", "3.6", "5.24"),
    "torch-2.12": Lane("2.12", "3.7", "5.24"),
    "torch-2.13": Lane("2.13", "3.7", "5.24"),
    "torch-2.14": Lane("2.14", "3.8", "5.24"),
    "newest": Lane("2.15", "3.9", "5.24"),
    "transformers-5.18": Lane("2.12", "3.7", "5.18"),
    "transformers-5.20": Lane("2.14", "3.8", "5.20"),  # what vLLM 0.33 takes
    "transformers-5.21": Lane("2.15", "3.9", "5.21"),
    "transformers-5.22": Lane("2.11", "3.6", "5.22"),
    "transformers-5.23": Lane("2.15", "3.9", "5.23"),
}
"""The lanes of ``make smoke LANE=name``. CI's full run is not listed: it uses the latest releases
of its day, which are those of "newest" until one of the packages has a new release."""


def release(version: str) -> tuple[int, int]:
    """Parse major and minor: (2, 15) from "2.15.0+cu130" or "2.15rc1"."""
    match = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def supported(package: str) -> tuple[str, str]:
    """Return the oldest and the newest tested release of torch, triton or transformers."""
    releases = sorted({getattr(lane, package) for lane in LANES.values()}, key=release)
    return releases[0], releases[-1]


def partners(torch: str) -> list[str]:
    """Return the releases of transformers that are tested with a release of torch."""
    releases = {
        lane.transformers for lane in LANES.values() if release(lane.torch) == release(torch)
    }
    return sorted(releases, key=release)


def untested(torch: str, transformers: str | None) -> str:
    """Return a one-line warning if no lane tests these versions together, else an empty string."""
    tested = partners(torch)
    if transformers is None and tested:
        return ""
    if transformers is not None and release(transformers) in map(release, tested):
        return ""
    beside = f" with transformers {transformers}" if transformers else ""
    oldest, newest = supported("torch")
    if tested:
        tested_versions = f"torch {torch} was tested with transformers {', '.join(tested)}"
    else:
        tested_versions = f"torch {oldest} to {newest} were tested"
    return f"torch {torch}{beside} was not tested: {tested_versions}."


def warn_if_newer(package: str, version: str) -> None:
    """Warn in one line if a release is newer than the newest tested release."""
    newest = supported(package)[1]
    if release(version) > release(newest):
        warnings.warn(
            f"dsv4_ops was tested with {package} up to {newest}, not with {version}: "
            "`python -m dsv4_ops doctor` says what works.",
            stacklevel=3,
        )
