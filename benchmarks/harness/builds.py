"""Name the builds of a bundle's libraries, from the loaded modules."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_RELEASES = {
    "8fe4bfe927d9": "0.22.1", "25ce6b315b9b": "0.33.0",  # FlashMLA
    "7614361afedf": "0.22.1", "518ec8cad556": "0.33.0",  # the cache ops
    "b51d8905d037": "0.22.1", "94966398f822": "0.33.0",  # the compressor's slots
}  # fmt: skip
"""vLLM's releases; a key is the start of the SHA-256 of a file in the release's wheel."""


def names(*loaded: Any) -> str:
    """Name DeepGEMM by its version, and FlashMLA and files of vLLM by vLLM's release; modules that
    failed to load have no name."""
    found = []
    for each in loaded:
        if hasattr(each, "__version__"):
            found.append(f"DeepGEMM {each.__version__}")
        elif hasattr(each, "so"):
            found.append(f"FlashMLA of {_release(each.so)}")
        elif hasattr(each, "__file__"):
            found.append(f"kernels of {_release(each.__file__)}")
    return ", ".join(found)


def _release(path: str) -> str:
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    known = _RELEASES.get(digest)
    return f"vLLM {known}" if known else f"an unknown release of vLLM (SHA-256 {digest})"
