"""Humming's products and its elementwise kernel, in PyTorch: what its CUDA sources read and write.

A row is taken as unsigned, read if its token exists, and written if the result has it. A block is
of the expert that is named for it; blocks behind the padded rows do nothing. Results are in bf16.
"""

import json
import re
from types import SimpleNamespace

import torch

from dsv4_ops.reference.experts import fp4_values

CUDA = {
    "fminf": lambda a, b: torch.clamp(a, max=b),
    "fmaxf": lambda a, b: torch.clamp(a, min=b),
    "__expf": torch.exp,
}


class HummingLayer:
    """Calls take what the launcher takes, and check what it checks."""

    def __init__(self, shape_n, shape_k, weight_config, num_experts, torch_dtype):
        assert weight_config == {"quant_method": "mxfp4"}
        assert torch_dtype == torch.bfloat16
        self.shape_n, self.shape_k, self.num_experts = shape_n, shape_k, num_experts
        self.values = None

    def load_from_tensors(self, tensors):
        self.codes, self.scale = tensors["weight"], tensors["weight_scale"]
        assert self.codes.shape == (self.num_experts, self.shape_n, self.shape_k // 2)
        assert self.scale.shape == (self.num_experts, self.shape_n, self.shape_k // 32)

    def transform(self):
        self.values = fp4_values(self.codes, self.scale)

    def __call__(
        self, inputs, *, sorted_ids, expert_ids, num_tokens_padded, top_k, valid_shape_m,
        compute_config, tuning_config,
    ):  # fmt: skip
        assert json.loads(compute_config) == {"gemm_type": "indexed"}
        assert {sorted_ids.dtype, expert_ids.dtype, num_tokens_padded.dtype} == {torch.int32}
        size = json.loads(tuning_config)["block_shape"][0]
        rows, shape = sorted_ids.long() % 2**32, inputs.shape[0]
        assert valid_shape_m == shape * top_k
        out = inputs.new_full((shape * top_k, self.shape_n), float("nan"))
        for block in range(-(-int(num_tokens_padded) // size)):
            some = rows[block * size : (block + 1) * size]
            some = some[(some // top_k < shape) & (some < shape * top_k)]
            weight = self.values[int(expert_ids[block])]
            out[some] = (inputs[some // top_k].float() @ weight.T).bfloat16()
        return out


def process_input(inputs, *, activation_type, activation_impl):
    """Both halves of a row through an expression of CUDA, in float32."""
    assert activation_type == "binary_split"
    a, b = inputs.float().chunk(2, -1)
    expression = re.sub(r"(?<=\d)f\b", "", activation_impl)
    return eval(expression, {**CUDA, "a": a, "b": b}).to(inputs.dtype), None, None


def library(*blocks):
    """The package, of which the heuristics of each layer that is asked give one of ``blocks``."""
    sizes = iter(blocks)

    class HummingMethod:
        @staticmethod
        def get_default_tuning_configs(layer, *, gemm_type):
            assert gemm_type == "indexed"
            size = next(sizes)
            return [(0, 4, {"block_shape": [1, 1, 1]}), (4, 1 << 30, {"block_shape": [size, 1, 1]})]

    layer = SimpleNamespace(HummingLayer=HummingLayer, HummingMethod=HummingMethod)
    return SimpleNamespace(layer=layer, ops=SimpleNamespace(process_input=process_input))
