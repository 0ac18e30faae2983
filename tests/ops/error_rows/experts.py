"""Rows of routed experts, and valid calls."""

import torch

from tests.helpers import i32, i64
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.linear import codes, recipe_rows
from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import COUNTS, NUMBERS, OWN, Valid

WEIGHTS = "torch.int8 or torch.uint8 or torch.float8_e4m3fn or torch.bfloat16"
IDS = Valid(i32([[0, 1]] * 5), "[num_tokens, topk]")


def packed(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x22, dtype=torch.int8)


def powers(*shape: int) -> torch.Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


# three experts of intermediate size 128 and hidden size 256
OWN |= {
    "route": {"hidden": Valid(bf16(5, 8), "[num_tokens, hidden_size]"),
     "weight": Valid(bf16(3, 8), "[num_experts, hidden_size]"),
     "bias": Valid(torch.ones(3), "[num_experts]"),
     "table": Valid(i64([[0, 1]] * 9), "[vocab_size, 2]"),
     "token_ids": Valid(i64([0] * 5), "[num_tokens]")},
    "grouped_topk": {"logits": Valid(torch.zeros(5, 12), "[num_tokens, num_experts]"),
     "bias": Valid(torch.ones(12), "[num_experts]")},
    "expert_plan": {"topk_ids": IDS},
    "experts": {"x": Valid(bf16(5, 256), "[num_tokens, hidden_size]"),
     "topk_weights": Valid(torch.ones(5, 2), "[num_tokens, topk]"), "topk_ids": IDS,
     "gate_up": Valid(packed(3, 256, 128), "[num_experts, gate_up_size, 128]", WEIGHTS),
     "gate_up_scale": Valid(powers(3, 256, 8), "[num_experts, 256, 8]"),
     "down": Valid(packed(3, 256, 64), "[num_experts, hidden_size, 64]"),
     "down_scale": Valid(powers(3, 256, 4), "[num_experts, 256, 4]"),
     "shared": Valid(bf16(5, 256), "[num_tokens, hidden_size]")},
}  # fmt: skip
NUMBERS |= {"num_experts": 3, "top_k": 2, "swiglu_limit": 10.0}
NUMBERS |= {"num_groups": 4, "kept_groups": 2, "normalize": True}
BF16 = dict.fromkeys(("gate_up_scale", "down_scale"))
BF16 |= {"gate_up": bf16(3, 256, 256), "down": bf16(3, 256, 128)}
COUNTS |= {
    "topk": "the selected rows of a token",
    "hidden_size": "the values of a token's hidden state",
    "num_experts": "the experts on this device",
}
BLOCK, BF16_WEIGHTS = "the values of a block", "with bfloat16 weights"

TABLE: dict[str, list[says.Entry]] = {
    "route": [
        *says.float_rows("scale", 0),
        says.at_most("top_k", "num_experts", 3, 4),
        says.alone("table", "token_ids"),
        says.alone("token_ids", "table"),
    ],
    "grouped_topk": [
        *says.float_rows("scale", 0),
        *[says.wrong("num_groups", "part num_experts = 12 into groups of as many, at least 2",
         groups, "Pass the router's own n_group") for groups in (5, 12)],
        says.at_most("kept_groups", "num_groups", 4, 5),
        says.at_most("top_k", "the experts of kept_groups", 6, 7),
        *says.flag_rows("normalize"),
    ],
    "expert_plan": [
        says.wrong("block_size", "leave at most 2147483647 rows of all blocks",
         6442450948, "Lower it; rows are int32", block_size=2**31 - 1),
    ],
    "experts": [
        says.multiple("hidden_size", BLOCK, 32, 48, 64, x=bf16(5, 48), activations="bf16"),
        says.multiple("hidden_size", BLOCK, 128, 64, 128, x=bf16(5, 64)),
        says.multiple("gate_up_size", "two blocks", 256, 128, 256, gate_up=packed(3, 128, 128)),
        says.at_least("num_experts", 1, 0, gate_up=packed(0, 256, 128)),
        says.exactly("gate_up", "[num_experts, gate_up_size, 128]", packed(3, 256, 256), 2),
        says.dtype("down", "torch.int8", codes(3, 256, 128)),
        says.exactly("down_scale", "[num_experts, 256, 4]", powers(3, 4, 256), 1),
        says.no_tensor("down_scale", None, "Pass a torch.uint8 tensor"),
        says.wrong("gate_up_scale", f"be None {BF16_WEIGHTS}",
         "a tensor", "Only codes have scales", gate_up=bf16(3, 256, 256), activations="bf16"),
        says.wrong("activations", f"be 'bf16' {BF16_WEIGHTS}",
         "'fp8'", "Only codes are multiplied by codes", NotImplementedError, **BF16,
         activations="fp8"),
        says.multiple("gate_up_size", "gate and up", 2, 5, 6,
         **{**BF16, "gate_up": bf16(3, 5, 256), "activations": "bf16"}),
        says.exactly("gate_up_scale", "[num_experts, 2, 2]", powers(3, 256, 8), 1,
         gate_up=codes(3, 256, 256)),
        *says.float_rows("swiglu_limit", 0),
        *recipe_rows("activations", "bf16", "fp8"),
    ],
}  # fmt: skip
