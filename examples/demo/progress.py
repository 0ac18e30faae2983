"""Lines about the current task of the demo, with the seconds since its start."""

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
        since: ``time.time()`` when the demo began; None is now.
        every: Seconds between the lines of a long task.
        stream: Stream to write to instead.
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
        """Print that ``task`` begins, that it goes on, and the time that it took."""
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
