"""CPU time, for ``--cpu-seconds``, including processes that are not children of this one."""

from __future__ import annotations

import os
from pathlib import Path

_of_others: dict[int, float] = {}


def until_now() -> float:
    """Return the CPU seconds of this process, of its ended children, and of ``add``'s processes."""
    return sum(os.times()[:4]) + sum(_of_others.values())


def of_process(pid: int, *, children: bool = False) -> float:
    """Return the CPU seconds of a process, or of its ended children; 0 without /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    first = 13 if children else 11
    return (int(fields[first]) + int(fields[first + 1])) / os.sysconf("SC_CLK_TCK")


def add(pid: int, seconds: float) -> None:
    """Record that process ``pid`` has taken ``seconds`` so far."""
    _of_others[pid] = seconds
