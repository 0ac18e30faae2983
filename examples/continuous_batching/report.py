"""Statistics of ``05_continuous_batching.py``, and their plot."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field

import torch

from continuous_batching.scheduler import Request, Scheduler


@dataclass
class Record:
    """Of a run: requests, and per step the blocks in use, the requests in the queue and the memory
    of the process in MB."""

    requests: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def after_step(self, scheduler: Scheduler) -> None:
        """Record the current state."""
        cache = scheduler.cache
        self.blocks.append(cache.num_blocks - cache.num_free_blocks)
        self.waiting.append(len(scheduler.waiting))
        self.memory.append(resident())

    def line(self, scheduler: Scheduler) -> str:
        """Describe the current state."""
        return (
            f"step {len(self.blocks):5}: {len(scheduler.running)} running, {self.waiting[-1]} "
            f"waiting, {len(self.finished)} finished, blocks {self.blocks[-1]} of "
            f"{scheduler.cache.num_blocks}, {scheduler.preemptions} preempted, "
            f"{self.memory[-1]:.0f} MB"
        )

    def summary(self, scheduler: Scheduler) -> str:
        """Summarise the run."""
        cancelled = sum(request.status == "cancelled" for request in self.requests)
        used = sum(self.blocks) / len(self.blocks)
        return (
            f"{len(self.requests)} requests: {len(self.finished)} finished, {cancelled} cancelled, "
            f"{scheduler.preemptions} times preempted; {scheduler.waits_for_blocks} steps without "
            f"blocks for the next; {self.tokens / self.seconds:.0f} tokens/s; {used:.1f} of "
            f"{scheduler.cache.num_blocks} blocks in use; memory {self.growth():+.1f} MB"
        )

    def growth(self) -> float:
        """Memory growth in MB: median of the last quarter of the steps minus that of the second."""
        quarter = max(1, len(self.memory) // 4)
        second, last = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return statistics.median(last) - statistics.median(second or last)

    def plot(self, path: str, num_blocks: int) -> None:
        """Plot blocks and queue over the steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(9, 5))
        top.step(range(len(self.blocks)), self.blocks, where="post")
        top.axhline(num_blocks, color="grey", linestyle=":")
        top.set_ylabel("blocks in use")
        bottom.step(range(len(self.waiting)), self.waiting, where="post", color="tab:orange")
        bottom.set_ylabel("requests waiting")
        bottom.set_xlabel("step")
        figure.suptitle(f"{len(self.finished)} requests through one step of fixed shape")
        figure.tight_layout()
        figure.savefig(path, dpi=120)


def resident() -> float:
    """Memory of the GPU that tensors have, or of this process, in MB; 0 where nobody says."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.memory_allocated() / 1e6
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0
