"""Rows of ``error_rows.TABLE`` for the FP8 linear layers, and valid calls of them."""

from collections.abc import Iterator

import torch

from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.rope import bf16, float_rows
from tests.ops.error_rows.valid import COUNTS, NUMBERS, OWN, Valid

LINEARS = ("fp8_linear", "fp8_grouped_linear")
E4M3 = torch.float8_e4m3fn


def codes(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(E4M3)


WEIGHT = {
    "weight": Valid(codes(256, 128), "[out_features, in_features]"),
    "scale": Valid(torch.ones(2, 1), "[2, 1]", "torch.float32 or torch.uint8"),
}
OWN |= {
    "quantize_rows": {"x": Valid(bf16(5, 256), "[num_tokens, in_features]")},
    "fp8_linear": {
        **WEIGHT,
        "x": Valid(codes(5, 128), "[num_tokens, in_features]"),
        "x_scale": Valid(torch.ones(5, 1), "[num_tokens, 1]"),
    },
    "fp8_grouped_linear": {
        **WEIGHT,
        "x": Valid(codes(2, 5, 128), "[num_groups, num_tokens, in_features]"),
        "x_scale": Valid(torch.ones(2, 5, 1), "[num_groups, num_tokens, 1]"),
    },
}
NUMBERS |= {"block": 128, "min_amax": 1e-4, "activations": "fp8", "out_dtype": torch.float32}
COUNTS |= {
    "in_features": "the values of a row that is multiplied",
    "out_features": "the values of a product",
    "num_groups": "the groups of a row",
}


def word_rows(name: str, *allowed: str, belongs_to: str) -> Iterator[Entry]:
    known = " or ".join(map(repr, allowed))
    advice = f"Pass the {name} that {belongs_to}."
    for value in ("", allowed[0].upper(), "int4"):
        text = f"{name} must be {known}, got {value!r}. {advice}"
        yield f"{name} {value!r}", {name: value}, ValueError, text
    for other in (None, 1):
        kind = type(other).__name__
        text = f"{name} must be a str, got {kind}. {advice}"
        yield f"{name} is {kind}", {name: other}, TypeError, text


def weight_rows(op: str) -> Iterator[Entry]:
    groups = op == "fp8_grouped_linear"
    yield (
        "the scale of the transposed weight",
        {"scale": torch.ones(1, 2)},
        ValueError,
        "scale must have shape [2, 1], got [1, 2]. Pass exactly 2 entries in dimension 0.",
    )
    yield (
        "a scale for every row",
        {"scale": torch.ones(256, 1)},
        ValueError,
        "scale must have shape [2, 1], got [256, 1]. Pass exactly 2 entries in dimension 0.",
    )
    yield (
        "no scales of the codes",
        {"x_scale": None},
        ValueError,
        "x_scale must be given with x of torch.float8_e4m3fn, got None. "
        "Pass both results of quantize_rows.",
    )
    narrow = {"x": codes(*((2,) if groups else ()), 5, 64), "weight": codes(256, 64)}
    yield (
        "half a block of columns",
        narrow,
        ValueError,
        "in_features must be a multiple of the columns of a block = 128, got 64. "
        "Use in_features = 128.",
    )
    what, size = (
        ("the rows of a block in every group", 256) if groups else ("the rows of a block", 128)
    )
    yield (
        "rows of no whole block",
        {"weight": codes(320, 128)},
        ValueError,
        f"out_features must be a multiple of {what} = {size}, got 320. "
        f"Use out_features = {512 if groups else 384}.",
    )
    for value in (torch.float16, "float32", None):
        yield (
            f"out_dtype {value}",
            {"out_dtype": value},
            TypeError,
            f"out_dtype must be torch.bfloat16 or torch.float32, got {value}. "
            "Cast the result to another dtype.",
        )
    if groups:
        yield (
            "no group",
            {"x": codes(0, 5, 128)},
            ValueError,
            "num_groups must be at least 1, got 0. Pass 1 or more.",
        )
    yield from word_rows("activations", "bf16", "fp8", belongs_to="the recipe has")


LINEAR_TABLE: dict[str, list[Entry]] = {
    "quantize_rows": [
        *float_rows("min_amax", 0),
        *word_rows("scale", "pow2", "float32", belongs_to="the recipe has"),
        *word_rows("scale_layout", "row", "column_padded", belongs_to="the matrix product takes"),
        (
            "no whole block",
            {"block": 96},
            ValueError,
            "in_features must be a multiple of block = 96, got 256. Use in_features = 288.",
        ),
    ],
    **{op: list(weight_rows(op)) for op in LINEARS},
}
