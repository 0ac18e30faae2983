"""Print lines about the demo's current task, with the seconds since the demo's start."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Writes to standard error.

    Args:
        since: ``time.time()`` at the demo's start; None means now.
        every: Seconds between the lines of a long task.
        stream: Another stream to write to.
    """

    def __init__(
        self, since: float | None = None, every: float = 15.0, stream: TextIO | None = None
    ) -> None:
        self.since = time.time() if since is None else since
        self.every, self.stream = every, stream

    @property
    def seconds(self) -> float:
        """Seconds since the start of the demo."""
        return time.time() - self.since

    def say(self, text: str) -> None:
        """Write a line."""
        print(f"[{self.seconds:6.1f} s] {text}", file=self.stream or sys.stderr, flush=True)

    @contextmanager
    def during(self, task: str) -> Iterator[None]:
        """Print a line when ``task`` begins, while it runs, and when a task of over 5 s ends."""
        self.say(task)
        begun, ended = time.time(), threading.Event()

        def beat() -> None:
            while not ended.wait(self.every):
                self.say(f"  still at it after {time.time() - begun:.0f} s: {task}")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if time.time() - begun > 5:
            self.say(f"  done after {time.time() - begun:.0f} s: {task}")
