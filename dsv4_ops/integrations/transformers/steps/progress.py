"""A progress bar of the parts that a step compiles."""

from __future__ import annotations

from typing import Any


class PartsBar:
    """A bar on a terminal, from the first part that is compiled to the end of the block.

    transformers' switch for progress bars (``disable_progress_bar``) turns it off. There is none if
    the step takes less than a second.

    Args:
        title: Name of the step.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar: Any = None

    def begin(self, name: str, num_parts: int | None) -> None:
        """Show that a part is compiled now, of so many if that is known."""
        if self._bar is None:
            from transformers.utils.logging import tqdm

            title = f"compile {self._title}"
            self._bar = tqdm(
                total=num_parts, desc=title, unit="part", delay=1, leave=False, disable=None
            )
        else:
            self._bar.update()
        self._bar.set_postfix_str(name)

    def __enter__(self) -> PartsBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
