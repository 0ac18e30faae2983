"""Refuse words that this repository no longer uses: what it says instead is what the field says.

    python .ci/words.py

prints ``file:line: word: say ...`` for each and exits with 1 if there is any. In Markdown, inline
code may hold a retired word (names that changed); ``docs/tuning.md`` is history and not read.
"""

import re
import subprocess
import sys
from pathlib import Path

EVERYWHERE = ("",)
ATTENTION = ("dsv4_ops/attention/", "dsv4_ops/integrations/")
TESTING = (*ATTENTION, "dsv4_ops/testing/", "dsv4_ops/cli/")

# Word: (what to say instead, folders in which it is refused). Widen the folders as they are done.
RETIRED = {
    "passport": ("spec", EVERYWHERE),
    "station": ("implementation", EVERYWHERE),
    "foreign": ("external (libraries) or opaque (ops that a graph keeps whole)", EVERYWHERE),
    "goal": ("dst in kernels, target in prose", EVERYWHERE),
    "spot": ("offset", EVERYWHERE),
    "peer": ("baseline, or its name", EVERYWHERE),
    "anchor": ("baseline, or its name", TESTING),
    "hostile": ("adversarial", TESTING),
    "drawn": ("sampled", TESTING),
    "turned": ("rotated, or inverse RoPE", TESTING),
    "theirs": ("the name of the library", TESTING),
    "piece": ("split, work tile or chunk", ATTENTION),
    "page": ("block", ("dsv4_ops/integrations/",)),
    "magnitude": ("amax or scale", ATTENTION),
}
NOT_READ = {".ci/words.py", "docs/tuning.md"}
_WORDS = re.compile(rf"(?<![A-Za-z])({'|'.join(RETIRED)})s?(?![A-Za-z])", re.IGNORECASE)
_INLINE_CODE = re.compile(r"`[^`]*`")


def main() -> int:
    """Read every tracked Python and Markdown file."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode:
        print("words: not a git checkout, nothing read", file=sys.stderr)
        return 0
    found = 0
    for name in listed.stdout.split():
        if name in NOT_READ or not (root / name).exists():
            continue
        for number, line in enumerate((root / name).read_text().splitlines(), 1):
            prose = _INLINE_CODE.sub("", line) if name.endswith(".md") else line
            for word in _WORDS.findall(prose):
                say, folders = RETIRED[word.lower()]
                if name.startswith(folders):
                    found += 1
                    print(f"{name}:{number}: {word}: say {say}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
