"""CPU time of processes that are no children of this one, for ``--cpu-seconds``."""

from __future__ import annotations

import os
from pathlib import Path

_of_others: dict[int, float] = {}


def until_now() -> float:
    """CPU seconds of this process, of its children that ended, and of what ``add`` was told."""
    return sum(os.times()[:4]) + sum(_of_others.values())


def of_process(pid: int, *, children: bool = False) -> float:
    """CPU seconds of a process, or of its children that ended; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    first = 13 if children else 11
    return (int(fields[first]) + int(fields[first + 1])) / os.sysconf("SC_CLK_TCK")


def add(pid: int, seconds: float) -> None:
    """Count ``seconds``, all that process ``pid`` has taken so far."""
    _of_others[pid] = seconds
