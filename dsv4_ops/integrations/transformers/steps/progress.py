"""Show the progress of a compile: a bar of its parts on a terminal, or else one line."""

from __future__ import annotations

import sys
from typing import Any


class PartsBar:
    """A progress bar on a terminal, from the first part to the end of the ``with`` block.

    There is no bar if the step takes less than a second. Without a terminal, a step that compiles
    writes one line to stderr. transformers' switch for progress bars (``disable_progress_bar``)
    turns off the bar and the line.

    Args:
        title: Name of the step.
        place: File or folder that keeps the parts, or None.

    Attributes:
        is_kept: Whether the parts of this call are kept there.
    """

    def __init__(self, title: str, place: Any) -> None:
        self._title, self._place, self.is_kept = title, place, True
        self._bar: Any = None
        self._has_line = False

    def begin(self, name: str, num_parts: int | None) -> None:
        """Show the name of the part that is now compiled or loaded, and the number of parts."""
        if self._bar is None:
            from transformers.utils.logging import tqdm

            title = f"compile {self._title}"
            self._bar = tqdm(
                total=num_parts, desc=title, unit="part", delay=1, leave=False, disable=None
            )
        else:
            self._bar.update()
        self._bar.set_postfix_str(name)

    def compiles(self, num_parts: int | None) -> None:
        """Write one line before the first part is compiled, unless there is a bar."""
        from transformers.utils import logging

        enabled = logging.is_progress_bar_enabled()
        if self._has_line or self._bar is None or sys.stderr.isatty() or not enabled:
            return
        self._has_line = True
        parts = "" if num_parts in (None, 1) else f" in {num_parts} parts"
        kept = f"kept in {self._place}" if self._place and self.is_kept else "not kept"
        takes = "up to a minute on a GPU, several on a CPU"
        text = f"dsv4_ops: compiling {self._title}{parts}: {takes}; {kept}"
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> PartsBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
