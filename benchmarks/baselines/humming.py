"""Humming (humming-kernels) as a baseline: FP4 experts with bf16 activations.

Humming has the products of all experts, each a launch that dequantises as it multiplies, and an
elementwise kernel that takes an activation as source. It sorts no rows and adds none up: engines
bring kernels for both. Here our ``expert_plan`` sorts, and Inductor's loop adds up.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from benchmarks.run import BenchError

MOST_ERROR = 4 * 2**-9
"""Largest error over the size of the result: four roundings to bf16, of gate and up, of the
activation, of what an expert returns, and of the sum. Stream-K also adds its parts in bf16."""

_INDEXED = {"gemm_type": "indexed"}
"""Rows stay where they are and are read by index: the default of vLLM and SGLang."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states, routing weights and ids to what the experts return."""


def load() -> Any:
    """The package. Raises BenchError with what stands in the way."""
    try:
        importlib.import_module("humming.layer")
        return importlib.import_module("humming")
    except (ImportError, OSError) as error:
        raise BenchError(f"--humming: cannot import humming-kernels: {error}") from error


def make_layer(library: Any, codes: Tensor, scale: Tensor) -> Any:
    """A layer of FP4 codes [num_experts, n, k / 2] and UE8M0 bytes [num_experts, n, k / 32], as
    the checkpoint has them, in Humming's order."""
    num_experts, rows, packed = codes.shape
    with torch.device(codes.device):  # else it makes its parameters on the CPU
        layer = library.layer.HummingLayer(
            shape_n=rows,
            shape_k=2 * packed,
            weight_config={"quant_method": "mxfp4"},
            num_experts=num_experts,
            torch_dtype=torch.bfloat16,
        )
    layer.load_from_tensors({"weight": codes, "weight_scale": scale})
    layer.transform()
    return layer


def choose(table: Sequence[tuple[int, int, dict[str, Any]]], num_rows: int) -> dict[str, Any]:
    """The entry of a table of Humming's heuristics that its launcher takes for so many rows."""
    for above, most, entry in table:
        if above < num_rows and (num_rows <= most or most <= 0):
            return entry
    raise BenchError(f"--humming: its heuristics have no entry for {num_rows} rows")


def activation(limit: float) -> str:
    """SwiGLU of gate ``a`` and up ``b`` with its bounds, as CUDA."""
    bound = f"{limit!r}f"
    gate, up = f"fminf(a, {bound})", f"fminf(fmaxf(b, -{bound}), {bound})"
    return f"{gate} / (1.0f + __expf(-{gate})) * {up}"


def experts_step(library: Any, layers: Sequence[Any], num_rows: int, *, limit: float) -> Step:
    """Experts of ``num_rows`` pairs of a token and its expert; every id is one of the experts.

    Args:
        layers: Of gate and up, and of down.
    """
    method, impl = library.layer.HummingMethod, activation(limit)
    tables = [method.get_default_tuning_configs(each, **_INDEXED) for each in layers]
    tunings = [choose(table, num_rows) for table in tables]
    blocks = [int(entry["block_shape"][0]) for entry in tunings]
    compute = json.dumps(_INDEXED)
    add_up = torch.compile(weighted_sum, dynamic=False)

    def multiply(index: int, rows: Tensor, plan: tuple[Tensor, Tensor, Tensor], topk: int) -> Any:
        sorted_ids, expert_ids, num_padded = plan
        return layers[index](
            rows,
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=num_padded,
            top_k=topk,
            valid_shape_m=num_rows,
            compute_config=compute,
            tuning_config=json.dumps(tunings[index]),
        )

    def step(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        plans = {each: _plan(ids, layers[0].num_experts, each) for each in sorted(set(blocks))}
        hidden = multiply(0, x, plans[blocks[0]], ids.shape[1])
        act = library.ops.process_input(
            hidden, activation_type="binary_split", activation_impl=impl
        )[0]
        out = multiply(1, act, plans[blocks[1]], 1)
        return add_up(out, weights)

    return step


def weighted_sum(out: Tensor, weights: Tensor) -> Tensor:
    """Add up what the experts of a token return, in float32."""
    terms = out.view(*weights.shape, -1).float() * weights[..., None]
    return terms.sum(1).bfloat16()


def _plan(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted rows, experts of blocks, and how many rows all blocks hold. Humming takes a row as
    unsigned and skips one that is out of range: -1, our padding, is."""
    plan = ops.expert_plan(ids, num_experts=num_experts, block_size=block)
    return plan.sorted_rows, plan.expert_of_block, plan.num_blocks * block
