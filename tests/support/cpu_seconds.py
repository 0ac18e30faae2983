"""CPU time of processes that are no children of this one, for ``--cpu-seconds``."""

from __future__ import annotations

import os
from pathlib import Path

_of_others: dict[int, float] = {}


def until_now() -> float:
    """CPU seconds of this process, of its children that ended, and of what ``add`` was told."""
    return sum(os.times()[:4]) + sum(_of_others.values())


def of_process(pid: int) -> float:
    """CPU seconds of a process without its children; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add(pid: int, seconds: float) -> None:
    """Count ``seconds``, all that process ``pid`` has taken so far."""
    _of_others[pid] = seconds
