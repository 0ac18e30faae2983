"""Prepare pages and docstrings for the site of ``docs/`` (``mkdocs.yml`` loads this file).

In the repository, links may lead out of ``docs/``; on the site, they become links to the
repository. A link to a missing file is a warning.
Sections of docstrings that griffe does not know (Mutates, Compile, Source) become paragraphs.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)([^)]*\))")
_OWN_SECTION = re.compile(r"^(Mutates|Compile|Source): *(.*(?:\n(?: +.*)?)*)", re.M)
_warn = logging.getLogger("mkdocs.docs_site").warning


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that lead out of ``docs/``."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            _warn("%s: link to a file that is not there: %s", page.file.src_uri, target)
        return f"{before}{config.repo_url}/blob/main/{path}{after}"

    return _LINK.sub(link, markdown)


class Sections(griffe.Extension):
    """Turns ``Mutates: text`` into a paragraph that begins with **Mutates:**."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the object's docstring, if it has one."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = _OWN_SECTION.sub(_paragraph, text)


def _paragraph(found: re.Match[str]) -> str:
    lines = [line.strip() for line in found[2].rstrip().splitlines()]
    return f"**{found[1]}:** " + "\n".join(lines) + "\n\n"
