"""The name that the installed transformers has for a model's cache."""

from __future__ import annotations

import functools
from dataclasses import fields


@functools.cache
def cache_argument() -> str:
    """Name of the argument of ``forward`` and ``generate``, and of the output's field.

    ``"cache"`` since transformers 5.24, ``"past_key_values"`` before. A patched model takes
    ``cache`` in every version.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    names = {field.name for field in fields(MoeModelOutputWithPast)}
    return "cache" if "cache" in names else "past_key_values"
