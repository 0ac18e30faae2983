"""The mbarriers of an emulated program: their phases, and the clocks that they pass on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.gluon_emulator.values import EmulationError

MOST = 8
"""Maximum number of partitions in a program."""


@dataclass
class Barrier:
    count: int
    arrived: int = 0
    phase: int = 0
    """Number of complete phases."""
    next_clock: np.ndarray = field(default_factory=lambda: np.zeros(MOST))
    clock: np.ndarray = field(default_factory=lambda: np.zeros(MOST))
    seen: dict[int, float] = field(default_factory=dict)
    """Times at which partitions saw the present phase."""

    def arrive(self, number: int, clock: np.ndarray, count: int, name: str) -> None:
        """Count arrivals of the partition ``number``. Raise if a waiting partition may miss a
        phase: a barrier has one bit, and the next phase may complete first."""
        self.next_clock = np.maximum(self.next_clock, clock)
        self.arrived += count
        if self.arrived > self.count:
            raise EmulationError(f"too many arrivals at {name}")
        if self.arrived < self.count:
            return
        self.arrived, self.clock = 0, self.next_clock
        self.phase += 1
        for other, time in self.seen.items():
            if other != number and self.clock[other] < time:
                raise EmulationError(f"partition {other} may miss a phase of {name}")
        self.seen.clear()
