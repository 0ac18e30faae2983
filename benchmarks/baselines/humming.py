"""Humming (humming-kernels) as a baseline: FP4 experts with bf16 activations.

Humming launches two GEMMs for all experts, which dequantise as they multiply, and a kernel for an
activation that the caller writes in CUDA. Humming neither sorts nor sums rows, because engines have
kernels for that. Here our ``expert_plan`` sorts rows, and Inductor's code sums them.
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
"""Maximum error relative to the norm of the result. Humming rounds four values to bf16: gate and
up, the activation, an expert's result, and the sum. Stream-K also adds partial sums in bf16."""

_INDEXED = {"gemm_type": "indexed"}
"""Rows stay in place, and the GEMM reads them by index: the default in vLLM and SGLang."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of hidden states, routing weights and ids that returns the experts' results."""


def load() -> Any:
    """Import the package; raise a BenchError with the reason if that fails."""
    try:
        importlib.import_module("humming.layer")
        return importlib.import_module("humming")
    except (ImportError, OSError) as error:
        raise BenchError(f"--humming: cannot import humming-kernels: {error}") from error


def make_layer(library: Any, codes: Tensor, scale: Tensor) -> Any:
    """Make a layer in Humming's weight order from a checkpoint's FP4 codes [num_experts, n, k / 2]
    and UE8M0 bytes [num_experts, n, k / 32]."""
    num_experts, rows, packed = codes.shape
    with torch.device(codes.device):  # else the layer makes its parameters on the CPU
        layer = library.layer.HummingLayer(
            shape_n=rows, shape_k=2 * packed, weight_config={"quant_method": "mxfp4"},
            num_experts=num_experts, torch_dtype=torch.bfloat16,
        )  # fmt: skip
    layer.load_from_tensors({"weight": codes, "weight_scale": scale})
    layer.transform()
    return layer


def choose(table: Sequence[tuple[int, int, dict[str, Any]]], num_rows: int) -> dict[str, Any]:
    """Return the entry of Humming's heuristics that Humming uses for ``num_rows`` rows."""
    for above, most, entry in table:
        if above < num_rows and (num_rows <= most or most <= 0):
            return entry
    raise BenchError(f"--humming: its heuristics have no entry for {num_rows} rows")


def activation(limit: float) -> str:
    """Return CUDA code for the bounded SwiGLU of gate ``a`` and up ``b``."""
    bound = f"{limit!r}f"
    gate, up = f"fminf(a, {bound})", f"fminf(fmaxf(b, -{bound}), {bound})"
    return f"{gate} / (1.0f + __expf(-{gate})) * {up}"


def experts_step(library: Any, layers: Sequence[Any], num_rows: int, *, limit: float) -> Step:
    """Return a step for ``num_rows`` pairs (token, expert), from the layers gate_up and down."""
    method, impl = library.layer.HummingMethod, activation(limit)
    tables = [method.get_default_tuning_configs(each, **_INDEXED) for each in layers]
    tunings = [choose(table, num_rows) for table in tables]
    blocks = [int(entry["block_shape"][0]) for entry in tunings]
    compute = json.dumps(_INDEXED)
    add_up = torch.compile(weighted_sum, dynamic=False)

    def multiply(index: int, rows: Tensor, plan: tuple[Tensor, Tensor, Tensor], topk: int) -> Any:
        sorted_ids, expert_ids, num_padded = plan
        return layers[index](
            rows, sorted_ids=sorted_ids, expert_ids=expert_ids, num_tokens_padded=num_padded,
            top_k=topk, valid_shape_m=num_rows, compute_config=compute,
            tuning_config=json.dumps(tunings[index]),
        )  # fmt: skip

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
    """Sum the results of each token's experts in float32."""
    terms = out.view(*weights.shape, -1).float() * weights[..., None]
    return terms.sum(1).bfloat16()


def _plan(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted rows, the expert of each block, and the number of rows in all blocks.

    Humming reads row numbers as unsigned and skips numbers out of range, such as our padding, -1.
    """
    plan = ops.expert_plan(ids, num_experts=num_experts, block_size=block)
    return plan.sorted_rows, plan.expert_of_block, plan.num_blocks * block
