"""Refuse words that this repository no longer uses, and name the field's words for them.

    python .ci/words.py

prints ``file:line: word: say ...`` for each word, and exits with 1 if it finds one. Words in
``NAMES`` are refused everywhere, even as a part of a name such as ``num_stations``. Words in
``PROSE`` are refused in prose, and words in ``WHOLE_NAMES`` as names of Python. Prose is comments,
docstrings and Markdown, without inline code and doctests.

A docstring that ``docs/api`` shows must begin with a sentence of at most 80 characters, on a line
of its own; a rule of ruff (D401) demands the imperative.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Word: what to say instead.
NAMES = {
    "passport": "spec",
    "station": "implementation",
    "foreign": "external (libraries) or opaque (ops that a graph keeps whole)",
    "goal": "dst in kernels, target in prose",
    "spot": "offset",
    "peer": "baseline, or its name",
    "hostile": "adversarial",
    "drawn": "sampled",
    "turned": "rotated, or inverse RoPE",
    "theirs": "the name of the library",
}

# Word: (what to say instead, why a name may hold it, where prose may say it).
PROSE = {
    "lens": ("lengths", "vLLM's seq_lens and swa_lens", ()),
    "piece": ("split, work tile or chunk", "", ()),
    "join": ("combine", "str.join, tl.join and Thread.join", ()),
    "cut": ("split, or what schedules it", "", ()),
    "further": ("extra", "", ()),
    "anchor": ("baseline, or its name", "", ()),
    "floor": ("roofline", "torch.floor", ()),
    "room": ("capacity", "", ()),
    "ways": ("variants", "", ()),
    "magnitude": ("amax, absolute value or scale", "orders of magnitude", ()),
    "page": (
        "block",
        "the bytes of a block: page_bytes, page_stride",
        (
            *("dsv4_ops/kernels/", "dsv4_ops/core/layout.py"),
            *("docs/", "README.md", "CONTRIBUTING.md", ".ci/"),  # pages of the site
        ),
    ),
}

WHOLE_NAMES = {"largest": "row_max of logits, amax of values to be quantised, max_ of a limit"}

DOCUMENTED = (
    "dsv4_ops/ops/",
    "dsv4_ops/attention/",
    "dsv4_ops/core/",
    "dsv4_ops/checkpoint/",
    "dsv4_ops/dispatch/",
    "dsv4_ops/testing/",
)
NOT_READ = {
    ".ci/words.py",
}
SENTENCE = 80

_INLINE_CODE = re.compile(r"``[^`]*``|`[^`]*`|\]\([^)]*\)")
"""Inline code, and targets of links."""


_IN_NAMES = re.compile(rf"(?<![A-Za-z])({'|'.join(NAMES)})s?(?![A-Za-z])", re.IGNORECASE)
_IN_PROSE = re.compile(rf"(?<![\w.])({'|'.join(PROSE)})s?(?![\w/])", re.IGNORECASE)
_KEPT = re.compile(r"^\s*(\w+, )*\w+: |floor division|orders? of magnitude|\[[^]]*\]")
"""Argument names before a colon, terms that contain a retired word, and shapes."""


def _prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines of prose."""
    if name.endswith(".md"):
        block = False
        for number, line in enumerate(text.splitlines(), 1):
            block ^= line.lstrip().startswith("```")
            if not block:
                yield number, line
        return
    strings = {
        node.lineno: node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and token.start[0] in strings:
            for number in range(token.start[0], token.end[0] + 1):
                if not lines[number - 1].lstrip().startswith((">>>", "...")):
                    yield number, lines[number - 1]


def _words(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the word, and the word to say instead."""
    for number, line in enumerate(text.splitlines(), 1):
        shown = _INLINE_CODE.sub("", line) if name.endswith(".md") else line
        for word in _IN_NAMES.findall(shown):
            yield number, word, f"say {NAMES[word.lower()]}"
    for number, line in _prose(name, text):
        for word in _IN_PROSE.findall(_KEPT.sub("", _INLINE_CODE.sub("", line))):
            say, _, may = PROSE[word.lower()]
            if not name.startswith(may or ("-",)):
                yield number, word, f"say {say}"


def _names(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield names of Python that are refused as names, though not in prose."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string.lower() in WHOLE_NAMES:
            yield token.start[0], token.string, f"say {WHOLE_NAMES[token.string.lower()]}"


def _public(root: Path) -> set[str]:
    """Return the names whose docstrings ``docs/api`` shows."""
    pages = (page.read_text() for page in (root / "docs/api").glob("*.md"))
    return set(re.findall(r"^::: dsv4_ops\.(?:[\w.]+\.)?(\w+)$", "\n".join(pages), re.M))


def _sentences(text: str, public: set[str]) -> Iterator[tuple[int, str, str]]:
    """Yield public functions and classes whose docstring does not begin with a short sentence."""
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name not in public:
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        if len(first) > SENTENCE or not first.endswith("."):
            yield node.lineno, node.name, f"begin with a sentence of at most {SENTENCE} characters"


def main() -> int:
    """Check every tracked Python and Markdown file."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode:
        print("words: not a git checkout, nothing read", file=sys.stderr)
        return 0
    found, public = 0, _public(root)
    for name in listed.stdout.split():
        if name in NOT_READ or not (root / name).exists():
            continue
        text = (root / name).read_text()
        rows = [*_words(name, text)]
        if name.endswith(".py"):
            rows += _names(text)
        if name.startswith(DOCUMENTED):
            rows += _sentences(text, public)
        for number, what, say in rows:
            found += 1
            print(f"{name}:{number}: {what}: {say}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
