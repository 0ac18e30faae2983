"""Measure the attainable memory bandwidth with copies that miss the L2."""

from __future__ import annotations

import functools

import torch

from benchmarks.harness.batches import captured_calls, rotating_sets
from benchmarks.harness.timing import Capture
from dsv4_ops.core.layout import round_up

_LARGE = 2**28  # from 512 MiB on, an H200 copies at two thirds of its bandwidth
_VECTOR = 16


class ColdCache:
    """Empties the L2 by reading a buffer four times as large, so that no line is dirty."""

    def __init__(self, device: torch.device) -> None:
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        torch.sum(self.buffer)


class Copies:
    """The times of copies on the device, each measured at its first use.

    ``bytes_per_us`` is the bandwidth of a copy of 256 MiB, bytes read plus bytes written.
    """

    def __init__(self, device: torch.device, cold: ColdCache) -> None:
        self.device, self.cold = device, cold
        self._known: dict[int, float] = {}
        self.bytes_per_us = 2 * _LARGE / self.us(2 * _LARGE)

    def us(self, moved_bytes: int) -> float:
        """Return the time of a copy that reads half of ``moved_bytes`` and writes the rest."""
        size = round_up(max(moved_bytes // 2, 1), _VECTOR)
        if size not in self._known:
            self._known[size] = self._measured(size)
        return self._known[size]

    def _measured(self, size: int) -> float:
        """Return the time of a memcpy or of a copy kernel, whichever is faster at this size."""
        sets = rotating_sets(2 * size, self.device)
        source = torch.zeros(sets, size // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        copies = [functools.partial(target[place].copy_, source[place]) for place in range(sets)]
        kernels = [
            functools.partial(torch.neg, source[place], out=target[place]) for place in range(sets)
        ]
        return min(
            Capture(captured_calls(calls)).device_us(self.cold).median
            for calls in (copies, kernels)
        )
