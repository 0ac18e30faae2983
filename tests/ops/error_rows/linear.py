"""Rows of the FP8 linear layers, and valid calls of these ops."""

from collections.abc import Iterator

import torch

from tests.ops.error_rows import wording as says
from tests.ops.error_rows.rope import bf16
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
    "fp8_linear": {**WEIGHT, "x": Valid(codes(5, 128), "[num_tokens, in_features]"),
     "x_scale": Valid(torch.ones(5, 1), "[num_tokens, 1]")},
    "fp8_linear_norms": {**WEIGHT, "x": Valid(bf16(5, 128), "[num_tokens, in_features]"),
     "first_norm": Valid(torch.ones(192), "[first_features]"),
     "second_norm": Valid(torch.ones(64), "[64]")},
    "fp8_linear_swiglu": {**WEIGHT, "x": Valid(bf16(5, 128), "[num_tokens, in_features]")},
    "fp8_grouped_linear": {**WEIGHT,
     "x": Valid(codes(2, 5, 128), "[num_groups, num_tokens, in_features]"),
     "x_scale": Valid(torch.ones(2, 5, 1), "[num_groups, num_tokens, 1]")},
}  # fmt: skip
NUMBERS |= {"block": 128, "min_amax": 1e-4, "activations": "fp8", "out_dtype": torch.float32}
COUNTS |= {
    "in_features": "the values of a row that is multiplied",
    "out_features": "the values of a product",
    "num_groups": "the groups of a row",
}


def recipe_rows(name: str, *allowed: str) -> Iterator[says.Entry]:
    unknown = ("", allowed[0].upper(), "int4")
    return says.word_rows(name, "the recipe has", *allowed, unknown=unknown)


def weight_rows(op: str) -> Iterator[says.Entry]:
    groups = op == "fp8_grouped_linear"
    for shape in ((1, 2), (256, 1)):
        yield says.exactly("scale", "[2, 1]", torch.ones(shape), 0)
    given, both = "be given with x of torch.float8_e4m3fn", "Pass both results of quantize_rows"
    yield says.wrong("x_scale", given, None, both)
    narrow = {"x": codes(*((2,) if groups else ()), 5, 64), "weight": codes(256, 64)}
    yield says.multiple("in_features", "the columns of a block", 128, 64, 128, **narrow)
    what, size = ("the rows of a block" + " in every group" * groups, 256 if groups else 128)
    use = 512 if groups else 384
    yield says.multiple("out_features", what, size, 320, use, weight=codes(320, 128))
    for value in (torch.float16, "float32", None):
        must, cast = "be torch.bfloat16 or torch.float32", "Cast the result to another dtype"
        yield says.wrong("out_dtype", must, value, cast, TypeError)
    if groups:
        yield says.at_least("num_groups", 1, 0, x=codes(0, 5, 128))
    yield from recipe_rows("activations", "bf16", "fp8")


ROWS_OF_BOTH = [
    *[says.exactly("scale", "[2, 1]", torch.ones(shape), 0) for shape in ((1, 2), (256, 1))],
    *recipe_rows("activations", "bf16", "fp8"),
]

TABLE: dict[str, list[says.Entry]] = {
    "quantize_rows": [*says.float_rows("min_amax", 0), *recipe_rows("scale", "pow2", "float32"),
     *says.word_rows("scale_layout", "the matrix product takes", "row", "column_padded"),
     says.multiple("in_features", "block", 96, 256, 288, block=96)],
    "fp8_linear_swiglu": [*says.float_rows("swiglu_limit", 0), *ROWS_OF_BOTH],
    "fp8_linear_norms": [*says.float_rows("eps", 0), *ROWS_OF_BOTH,
     says.at_least("first_features", 1, 0, first_norm=torch.ones(0)),
     says.at_least("second_features", 1, 0, first_norm=torch.ones(256))],
    **{op: list(weight_rows(op)) for op in LINEARS},
}  # fmt: skip
