"""Check ``config.json`` of a released checkpoint: sizes and the quantisation format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import WEIGHT_BLOCK

SCALE_FORMATS = ("float", "ue8m0")
_ADVICE = "Take the config.json that belongs to the weights"
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [WEIGHT_BLOCK, WEIGHT_BLOCK],
}
"""Values that the fields of quantization_config must have. ``quant_method`` must be present; any
other field may be missing, and then counts as the value given here."""

_FORMATS = (None, "e4m3", "float8_e4m3fn")
"""Accepted names of the code format. Loaders do not read this field."""


def check_sizes(
    op: str, config: Mapping[str, Any], names: Iterable[str], *, zero: Collection[str] = ()
) -> None:
    """Raise unless a config has the sizes in ``names``: integers of at least 1, or of at least 0
    for names in ``zero``."""
    names = list(names)
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise argument_error(
            op,
            "config",
            must=f"have {', '.join(missing)}",
            got=f"{len(missing)} missing",
            do=_ADVICE,
        )
    for name in names:
        least = 0 if name in zero else 1
        check_size(op, name, config[name], least)


def check_size(op: str, name: str, size: Any, least: int = 1) -> None:
    """Raise unless a size is an integer of at least ``least``."""
    if type(size) is not int or size < least:
        raise argument_error(
            op,
            f"config.{name}",
            must=f"be an integer of at least {least}",
            got=repr(size),
            do=_ADVICE,
        )


def check_ratios(op: str, config: Mapping[str, Any]) -> None:
    """Raise unless a DeepSeek-V4 config has a compression ratio for each layer."""
    ratios, layers = config.get("compress_ratios"), config["num_hidden_layers"]
    name, must = "config.compress_ratios", f"have a ratio for each of {layers} layers"
    if not isinstance(ratios, list):
        raise argument_error(op, name, must=must, got=type(ratios).__name__, do=_ADVICE)
    if len(ratios) < layers:
        raise argument_error(op, name, must=must, got=len(ratios), do=_ADVICE)
    for ratio in ratios:
        check_size(op, "compress_ratios", ratio, 0)


def scale_format(op: str, config: Mapping[str, Any]) -> str:
    """Return the format in which a loader stores scales: "float", or "ue8m0" for UE8M0 bytes.

    Raises:
        ValueError: the config does not say how weights are quantised, or names a format other than
            block-scaled FP8.
    """
    name, quantization = "quantization_config", config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise argument_error(
            op,
            f"config.{name}",
            must="say how weights are quantised",
            got=None if quantization is None else type(quantization).__name__,
            do="Load it by from_pretrained",
        )
    for part, required in _QUANTIZATION.items():
        actual = quantization.get(part, None if part == "quant_method" else required)
        if actual != required:
            raise argument_error(
                op, f"{name}.{part}", must=f"be {required!r}", got=repr(actual), do=_ADVICE
            )
    if quantization.get("fmt") not in _FORMATS:
        raise argument_error(
            op, f"{name}.fmt", must="be 'e4m3'", got=repr(quantization["fmt"]), do=_ADVICE
        )
    scale_fmt = quantization.get("scale_fmt", "float")
    if scale_fmt not in SCALE_FORMATS:
        raise argument_error(
            op,
            f"{name}.scale_fmt",
            must=f"be one of {', '.join(SCALE_FORMATS)}",
            got=repr(scale_fmt),
            do=_ADVICE,
        )
    return str(scale_fmt)


def skipped_modules(op: str, config: Mapping[str, Any]) -> list[str]:
    """Return the patterns of the modules that Hugging Face does not convert to FP8.

    Raises:
        ValueError: the patterns are not a list of regular expressions.
    """
    quantization = config["quantization_config"]
    name = "modules_to_not_convert"
    patterns = quantization.get(name)
    patterns = quantization.get("ignored_layers") if patterns is None else patterns
    if patterns is None:
        return ["lm_head"]
    try:
        for pattern in patterns:
            re.compile(pattern)
    except (TypeError, re.error) as error:
        raise argument_error(
            op,
            f"quantization_config.{name}",
            must="be a list of patterns",
            got=str(error),
            do=_ADVICE,
        ) from error
    return list(patterns)
