"""Rows of ``error_rows.TABLE`` for routed experts, and valid calls."""

from collections.abc import Iterator

import torch

from tests.helpers import i32, i64
from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.linear import codes, word_rows
from tests.ops.error_rows.rope import bf16, float_rows
from tests.ops.error_rows.valid import COUNTS, NUMBERS, OWN, Valid

WEIGHTS = "torch.int8 or torch.uint8 or torch.float8_e4m3fn or torch.bfloat16"
IDS = Valid(i32([[0, 1]] * 5), "[num_tokens, topk]")


def packed(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x22, dtype=torch.int8)


def powers(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


# three experts of 128 values for 256
OWN |= {
    "route": {
        "hidden": Valid(bf16(5, 8), "[num_tokens, hidden_size]"),
        "weight": Valid(bf16(3, 8), "[num_experts, hidden_size]"),
        "bias": Valid(torch.ones(3), "[num_experts]"),
        "table": Valid(i64([[0, 1]] * 9), "[vocab_size, 2]"),
        "token_ids": Valid(i64([0] * 5), "[num_tokens]"),
    },
    "grouped_topk": {
        "logits": Valid(torch.zeros(5, 12), "[num_tokens, num_experts]"),
        "bias": Valid(torch.ones(12), "[num_experts]"),
    },
    "expert_plan": {"topk_ids": IDS},
    "experts": {
        "x": Valid(bf16(5, 256), "[num_tokens, hidden_size]"),
        "topk_weights": Valid(torch.ones(5, 2), "[num_tokens, topk]"),
        "topk_ids": IDS,
        "gate_up": Valid(packed(3, 256, 128), "[num_experts, gate_up_size, 128]", WEIGHTS),
        "gate_up_scale": Valid(powers(3, 256, 8), "[num_experts, 256, 8]"),
        "down": Valid(packed(3, 256, 64), "[num_experts, hidden_size, 64]"),
        "down_scale": Valid(powers(3, 256, 4), "[num_experts, 256, 4]"),
    },
}
NUMBERS |= {"num_experts": 3, "top_k": 2, "swiglu_limit": 10.0}
NUMBERS |= {"num_groups": 4, "kept_groups": 2, "normalize": True}
BF16 = {
    "gate_up": bf16(3, 256, 256),
    "gate_up_scale": None,
    "down": bf16(3, 256, 128),
    "down_scale": None,
}
COUNTS |= {
    "topk": "the selected rows of a token",
    "hidden_size": "the values of a token's hidden state",
    "num_experts": "the experts on this device",
}


def size_rows() -> Iterator[Entry]:
    yield (
        "no whole block of 32",
        {"x": bf16(5, 48), "activations": "bf16"},
        ValueError,
        "hidden_size must be a multiple of the values of a block = 32, got 48. "
        "Use hidden_size = 64.",
    )
    yield (
        "no whole block of quantised activations",
        {"x": bf16(5, 64)},
        ValueError,
        "hidden_size must be a multiple of the values of a block = 128, got 64. "
        "Use hidden_size = 128.",
    )
    yield (
        "a gate without up",
        {"gate_up": packed(3, 128, 128)},
        ValueError,
        "gate_up_size must be a multiple of two blocks = 256, got 128. Use gate_up_size = 256.",
    )
    yield (
        "no expert",
        {"gate_up": packed(0, 256, 128)},
        ValueError,
        "num_experts must be at least 1, got 0. Pass 1 or more.",
    )
    yield (
        "codes that are not packed",
        {"gate_up": packed(3, 256, 256)},
        ValueError,
        "gate_up must have shape [num_experts, gate_up_size, 128], got [3, 256, 256]. "
        "Pass exactly 128 entries in dimension 2.",
    )
    yield (
        "FP8 codes beside FP4",
        {"down": codes(3, 256, 128)},
        TypeError,
        "down must be torch.int8, got torch.float8_e4m3fn. Cast it with .to(torch.int8).",
    )
    yield (
        "a transposed scale",
        {"down_scale": powers(3, 4, 256)},
        ValueError,
        "down_scale must have shape [num_experts, 256, 4], got [3, 4, 256]. "
        "Pass exactly 256 entries in dimension 1.",
    )
    yield (
        "codes without a scale",
        {"down_scale": None},
        TypeError,
        "down_scale must be a tensor, got NoneType. Pass a torch.uint8 tensor.",
    )
    yield (
        "a scale of bf16",
        {"gate_up": bf16(3, 256, 256), "activations": "bf16"},
        ValueError,
        "gate_up_scale must be None with bfloat16 weights, got a tensor. Only codes have scales.",
    )
    yield (
        "quantised activations for bf16",
        {**BF16, "activations": "fp8"},
        NotImplementedError,
        "activations must be 'bf16' with bfloat16 weights, got 'fp8'. Only codes are multiplied by "
        "codes.",
    )
    yield (
        "a gate in bf16 without up",
        {**BF16, "gate_up": bf16(3, 5, 256), "activations": "bf16"},
        ValueError,
        "gate_up_size must be a multiple of gate and up = 2, got 5. Use gate_up_size = 6.",
    )
    yield (
        "the scale of FP4 for FP8",
        {"gate_up": codes(3, 256, 256)},
        ValueError,
        "gate_up_scale must have shape [num_experts, 2, 2], got [3, 256, 8]. "
        "Pass exactly 2 entries in dimension 1.",
    )


EXPERTS_TABLE: dict[str, list[Entry]] = {
    "route": [
        *float_rows("scale", 0),
        (
            "more experts of a token than there are",
            {"top_k": 4},
            ValueError,
            "top_k must be at most num_experts = 3, got 4. Lower top_k, or raise num_experts.",
        ),
        (
            "a table without tokens",
            {"token_ids": None},
            ValueError,
            "table must be None without token_ids, got a tensor. Pass both or neither.",
        ),
        (
            "tokens without a table",
            {"table": None},
            ValueError,
            "token_ids must be None without table, got a tensor. Pass both or neither.",
        ),
    ],
    "grouped_topk": [
        *float_rows("scale", 0),
        (
            "groups of unlike sizes",
            {"num_groups": 5},
            ValueError,
            "num_groups must part num_experts = 12 into groups of as many, at least 2, got 5. "
            "Pass the router's own n_group.",
        ),
        (
            "groups of one expert",
            {"num_groups": 12},
            ValueError,
            "num_groups must part num_experts = 12 into groups of as many, at least 2, got 12. "
            "Pass the router's own n_group.",
        ),
        (
            "more groups than there are",
            {"kept_groups": 5},
            ValueError,
            "kept_groups must be at most num_groups = 4, got 5. Lower kept_groups, or raise "
            "num_groups.",
        ),
        (
            "more experts than groups that are kept have",
            {"top_k": 7},
            ValueError,
            "top_k must be at most the experts of kept_groups = 6, got 7. Lower top_k, or raise "
            "the experts of kept_groups.",
        ),
        (
            "no flag",
            {"normalize": 1},
            TypeError,
            "normalize must be a bool, got int. Pass True or False.",
        ),
    ],
    "expert_plan": [
        (
            "more rows than int32 counts",
            {"block_size": 2**31 - 1},
            ValueError,
            "block_size must leave at most 2147483647 rows of all blocks, got 6442450948. "
            "Lower it; rows are int32.",
        ),
    ],
    "experts": [
        *size_rows(),
        *float_rows("swiglu_limit", 0),
        *word_rows("activations", "bf16", "fp8", belongs_to="the recipe has"),
    ],
}
