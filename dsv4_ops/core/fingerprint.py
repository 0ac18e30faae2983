"""Make Inductor's cache keys depend on the sources of this package.

torch's cache keys do not contain the registered lowerings: after an edit of a lowering, a new
process would get code that the old lowering generated. ``torch.compiler.config.cache_key_tag`` is
part of every key, so we append a hash of our sources to it.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch.compiler.config as compiler_config

_CODE_LAYERS = ("core", "dispatch", "kernels", "lowering", "meta", "ops", "reference")


@functools.cache
def source_hash(*layers: str) -> str:
    """Hash the source files of ``layers``; by default, of all layers that can change the code that
    Inductor generates. The layer "" is the whole package."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for layer in layers or _CODE_LAYERS:
        for path in sorted((package / layer).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extend_cache_key(version: str) -> str:
    """Append our tag to ``cache_key_tag`` once; return the tag."""
    tag = f"dsv4_ops={version}:{source_hash()}"
    present = compiler_config.cache_key_tag
    if tag not in present.split(";"):
        compiler_config.cache_key_tag = f"{present};{tag}" if present else tag
    return tag
