"""Routed experts in FP4, FP8 and bf16: routing, the plan of row blocks, and the products."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import ACTIVATION_BLOCK, FP4_BLOCK, WEIGHT_BLOCK
from dsv4_ops.core.registry import AUTO, KERNEL_ON_CUDA, REFERENCE, TRITON
from dsv4_ops.core.types import INT32_MAX, ExpertPlan, Routing
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op

PROVIDERS = (TRITON, REFERENCE)

_ACTIVATIONS = ("bf16", "fp8")
_WEIGHTS = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bfloat16)

_BLOCKS = {torch.float8_e4m3fn: (ACTIVATION_BLOCK, 1), torch.bfloat16: (1, 1)}
"""How many values of a row share a scale, and how many values an element holds. Weight dtypes that
are not listed hold FP4."""

_route = define_op(
    "experts",
    "route(Tensor hidden, Tensor weight, Tensor? bias=None, Tensor? table=None, "
    "Tensor? token_ids=None, *, int top_k, float scale) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="DeepSeek-V4 inference/model.py, Gate",
)
_grouped_topk = define_op(
    "experts",
    "grouped_topk(Tensor logits, Tensor? bias=None, *, int top_k, int num_groups, "
    "int kept_groups, float scale, bool normalize) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="DeepSeek-V3 inference/model.py, Gate",
)
_expert_plan = define_op(
    "experts",
    "expert_plan(Tensor topk_ids, *, int num_experts, int block_size) -> (Tensor, Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="vLLM 0.33 moe_align_block_size, with bounds",
    gradient="integers",
)
_experts = define_op(
    "experts",
    "experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor gate_up, "
    "Tensor? gate_up_scale, Tensor down, Tensor? down_scale, Tensor? shared=None, *, "
    "float swiglu_limit, str activations, str impl='auto') -> Tensor",
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens",),
    source="DeepSeek-V4 inference/model.py, Expert and MoE",
    providers=PROVIDERS,
)


def route(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    top_k: int,
    scale: float = 1.0,
) -> Routing:
    """Choose the experts of every token and their weights.

    Args:
        hidden: Hidden states, [num_tokens, hidden_size], bfloat16, any strides.
        weight: Weight of the router, [num_experts, hidden_size], bfloat16.
        bias: Added to the scores only to choose experts, not to compute the weights, [num_experts],
            float32, or None.
        table: Experts of every token id, [vocab_size, top_k], int64, which replace the experts with
            the best scores; requires ``token_ids`` [num_tokens], int64.
        top_k: Experts per token. At least 1, at most num_experts.
        scale: Sum of a token's weights. Above 0.

    Returns:
        ``Routing(ids, weights)``, [num_tokens, top_k], int32 and float32, dense. With scores s =
        sqrt(softplus(hidden weight^T)) in float32, ids are the experts with the largest s + bias in
        descending order; ties go to the lower id, and NaN counts as the smallest. weights = scale *
        s / (sum of s + 1e-20). With a table, ids are the entries of the token's row in the table;
        an id is -1 with weight 0 if the token id or the expert id is out of range.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, a number out of range, or one of
            ``table`` and ``token_ids`` without the other.
        TypeError: a dtype other than those above.

    Compile: on a GPU two kernels: split-K products, then one program per token that selects its
        experts; on a CPU a product, a sort and a few reductions. Dynamic in num_tokens; CUDA graphs
        and export: yes.

    Source: DeepSeek-V4's router.

    Example:
        >>> import torch, dsv4_ops
        >>> hidden = torch.tensor([[2.0, 1.0]]).bfloat16()
        >>> weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).bfloat16()
        >>> found = dsv4_ops.route(hidden, weight, top_k=2)
        >>> found.ids.tolist(), found.weights.sum().item()
        ([[1, 2]], 1.0)
    """
    checks = Checks("route")
    checks.at_least(1, top_k=top_k)
    checks.tensor("hidden", hidden, torch.bfloat16, "num_tokens", "hidden_size")
    checks.tensor("weight", weight, torch.bfloat16, "num_experts", "hidden_size")
    checks.at_most("top_k", top_k, "num_experts", int(weight.shape[0]))
    checks.optional("bias", bias, torch.float32, "num_experts")
    checks.all_or_none(table=table, token_ids=token_ids)
    checks.optional("table", table, torch.int64, "vocab_size", top_k)
    checks.optional("token_ids", token_ids, torch.int64, "num_tokens")
    checks.above(0, scale=scale)
    return Routing(*_route(hidden, weight, bias, table, token_ids, top_k=top_k, scale=scale))


def grouped_topk(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    num_groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.0,
    normalize: bool = True,
) -> Routing:
    """Choose every token's experts within its best groups, and their weights.

    Args:
        logits: Logits of the router, [num_tokens, num_experts], float32, any strides.
        bias: Added to the scores only to choose groups and experts, not to compute the weights,
            [num_experts], float32, or None.
        top_k: Experts per token. At least 1, at most the number of experts in ``kept_groups``
            groups.
        num_groups: Number of groups: 1, or at most num_experts / 2. A group consists of consecutive
            experts, and all groups have the same size.
        kept_groups: Number of groups that a token's experts may come from. At least 1, at most
            num_groups.
        scale: Factor of the weights. Above 0.
        normalize: Whether to divide a token's weights by their sum.

    Returns:
        ``Routing(ids, weights)``, [num_tokens, top_k], int32 and float32, dense. Scores are s =
        sigmoid(logits). A group's score is the sum of its two largest s + bias. ids are the experts
        with the largest s + bias in the ``kept_groups`` groups with the largest scores, in
        descending order. Ties go to the first group or expert, and NaN counts as the smallest.
        weights = scale * s, with ``normalize`` divided by (sum of s + 1e-20).

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, or a number out of range.
        TypeError: a dtype other than those above.

    Compile: on a GPU one kernel with one program per token; on a CPU sorts and a few reductions.
        Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V3's router; Kimi-K2 uses it with one group.

    Example:
        >>> import torch, dsv4_ops
        >>> bias = torch.tensor([0.0, 1.0, 0.75, 0.75])
        >>> settings = {"top_k": 1, "num_groups": 2, "scale": 2.5}
        >>> found = dsv4_ops.grouped_topk(torch.zeros(1, 4), bias, **settings)
        >>> found.ids.tolist(), found.weights.tolist()  # 1.25 + 1.25 are more than 0.5 + 1.5
        ([[2]], [[2.5]])
    """
    checks = Checks("grouped_topk")
    checks.at_least(1, top_k=top_k, num_groups=num_groups, kept_groups=kept_groups)
    checks.flag("normalize", normalize)
    checks.tensor("logits", logits, torch.float32, "num_tokens", "num_experts")
    checks.optional("bias", bias, torch.float32, "num_experts")
    num_experts = int(logits.shape[1])
    size = num_experts // num_groups
    if num_groups > 1 and (num_experts % num_groups or size < 2):
        raise checks.error(
            "num_groups",
            must=f"part num_experts = {num_experts} into groups of as many, at least 2",
            got=num_groups,
            do="Pass the router's own n_group",
        )
    checks.at_most("kept_groups", kept_groups, "num_groups", num_groups)
    checks.at_most("top_k", top_k, "the experts of kept_groups", kept_groups * size)
    checks.above(0, scale=scale)
    return Routing(
        *_grouped_topk(
            logits,
            bias,
            top_k=top_k,
            num_groups=num_groups,
            kept_groups=kept_groups,
            scale=scale,
            normalize=normalize,
        )
    )


def expert_plan(topk_ids: Tensor, *, num_experts: int, block_size: int) -> ExpertPlan:
    """Sort the rows of all experts into blocks, each with rows of a single expert.

    Row ``token * topk + k`` is the pair of a token and its expert ``topk_ids[token, k]``.

    Args:
        topk_ids: Experts of every token, [num_tokens, topk], int32, any strides. Rows with ids
            outside 0..num_experts-1 (padding, or an expert on another device) are in no block.
        num_experts: Experts on this device. At least 1.
        block_size: Rows per block. At least 1.

    Returns:
        ``ExpertPlan(sorted_rows, expert_of_block, num_blocks)``, int32, dense:

        - sorted_rows [max_blocks * block_size]: the rows of the first expert in ascending order,
          padded with -1 to whole blocks, then the rows of the next expert that has rows.
        - expert_of_block [max_blocks]: the expert of each block, -1 after the last used block.
        - num_blocks [1]: the number of used blocks.

        max_blocks = (num_rows + min(num_experts, num_rows) * (block_size - 1)) // block_size, an
        upper bound for any routing.

    Mutates: nothing.

    Raises:
        ValueError: ``topk_ids`` that is not two-dimensional, a number out of range, or blocks with
            more than 2^31 - 1 rows in total.
        TypeError: a dtype other than int32.

    Compile: on a GPU one kernel with a program per expert, or two kernels if the number of rows is
        fixed and above 512; on a CPU a sort and a few reductions. Dynamic in num_tokens; CUDA
        graphs and export: yes. The number of blocks stays on the device.

    Source: vLLM's moe_align_block_size, with bounds.

    Example:
        >>> import torch, dsv4_ops
        >>> ids = torch.tensor([[2, 0], [2, -1]], dtype=torch.int32)
        >>> plan = dsv4_ops.expert_plan(ids, num_experts=3, block_size=2)
        >>> plan.sorted_rows.tolist(), plan.expert_of_block.tolist(), plan.num_blocks.tolist()
        ([1, -1, 0, 2, -1, -1], [0, 2, -1], [2])
    """
    checks = Checks("expert_plan")
    checks.at_least(1, num_experts=num_experts, block_size=block_size)
    checks.tensor("topk_ids", topk_ids, torch.int32, "num_tokens", "topk")
    if not torch.compiler.is_compiling():  # a symbolic size would be guarded
        num_rows = topk_ids.shape[0] * topk_ids.shape[1]
        capacity = num_rows + min(num_experts, num_rows) * (block_size - 1)
        if capacity > INT32_MAX:
            raise checks.error(
                "block_size",
                must=f"leave at most {INT32_MAX} rows of all blocks",
                got=capacity,
                do="Lower it; rows are int32",
            )
    return ExpertPlan(*_expert_plan(topk_ids, num_experts=num_experts, block_size=block_size))


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    shared: Tensor | None = None,
    *,
    swiglu_limit: float,
    activations: str = "bf16",
    impl: str = AUTO,
) -> Tensor:
    """Run the routed experts of every token and sum their weighted results.

    The dtype of the weights determines their format. int8 and uint8 hold pairs of FP4 (e2m1) codes,
    the first code in the low half of a byte, and have a scale per 32 values of a row. float8_e4m3fn
    has a scale per 128 x 128 block; bfloat16 has no scales.

    Args:
        x: Hidden states, [num_tokens, hidden_size], bfloat16, any strides.
        topk_weights: Routing weights, [num_tokens, topk], float32.
        topk_ids: Experts of every token, [num_tokens, topk], int32. Ids outside 0..num_experts-1
            (padding, or an expert on another device) add nothing.
        gate_up: FP4 [num_experts, 2 * size, hidden_size / 2], or FP8 or bfloat16 [num_experts, 2 *
            size, hidden_size]. The rows of the gate come first.
        gate_up_scale: FP4 [num_experts, 2 * size, hidden_size / 32], uint8 with UE8M0 bytes; FP8
            [num_experts, 2 * size / 128, hidden_size / 128], float32 or uint8; None for bfloat16.
        down: FP4 [num_experts, hidden_size, size / 2], or FP8 or bfloat16 [num_experts,
            hidden_size, size].
        down_scale: As ``gate_up_scale``, for ``down``.
        shared: Values added to every token's sum, such as the output of shared experts,
            [num_tokens, hidden_size], bfloat16, any strides; None adds nothing.
        swiglu_limit: Upper limit of the gate and of the up projection's absolute value. Above 0.
        activations: Format of the activations in both products: "bf16" (W4A16, W8A16, W16A16), or
            "fp8" (W4A8, W8A8), quantised by ``quantize_rows`` with its defaults.
        impl: "auto", "triton" or "reference".

    Returns:
        bfloat16 [num_tokens, hidden_size], dense: the sum over a token's experts of weight * (a
        W_down^T), plus ``shared``, where a = bf16(silu(min(g, limit)) * clamp(u, -limit, limit))
        and (g, u) = x W_gate_up^T. Products, SwiGLU and sum are in float32; a and the result are
        cast once. Where kernels multiply codes (see Compile), sums of 128 products are accurate to
        about 14 bits, and the products a W_down^T are also cast to bfloat16.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes that are not multiples of a block, a transposed
            scale, several devices, or an unknown setting.
        TypeError: a dtype other than those above.
        NotImplementedError: activations in FP8 with weights in bfloat16.

    Compile: on a GPU our kernels for the plan, for gate and up with SwiGLU, for quantising FP8
        activations, for down and for the weighted sum. Both products read an expert's weights once
        per block of 16 to 128 rows; the size depends on the mean number of rows per expert. Two
        blocks of an expert share a read if they have 16 rows; so do blocks of 32 rows, unless the
        weights are FP8. With FP8 activations, FP4 weights are multiplied as codes on Hopper if
        experts have more than 13 rows on average, or if the number of rows is symbolic. Otherwise
        codes are converted to bf16. In this conversion, an FP4 scale above 2^9 becomes infinite, an
        FP4 scale below 2^-117 may round, and the FP8 code for NaN reads as 480; released
        checkpoints have no such values. On a CPU, Inductor generates two reductions, which gather
        and dequantise as they multiply; eager code dequantises one expert for every block of 16
        rows. Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V4's MoE; like Hugging Face's MoE, the op applies the routing weights after
        ``down``.

    Example:
        >>> import torch, dsv4_ops
        >>> x = torch.ones(1, 32, dtype=torch.bfloat16)
        >>> gate_up = torch.full((1, 64, 16), 0x22, dtype=torch.uint8)  # code 2 is 1.0
        >>> down = torch.full((1, 32, 16), 0x11, dtype=torch.uint8)  # code 1 is 0.5
        >>> scale = torch.full((1, 64, 1), 127, dtype=torch.uint8)  # 2^0
        >>> weight, expert = torch.tensor([[0.5]]), torch.zeros(1, 1, dtype=torch.int32)
        >>> out = dsv4_ops.experts(
        ...     x, weight, expert, gate_up, scale, down, scale[:, :32], swiglu_limit=10.0
        ... )
        >>> out[0, 0].item()  # 0.5 * 32 * 0.5 * silu(10) * 10, 100 in bf16
        800.0
    """
    checks = Checks("experts")
    checks.tensor("x", x, torch.bfloat16, "num_tokens", "hidden_size")
    checks.tensor("topk_weights", topk_weights, torch.float32, "num_tokens", "topk")
    checks.tensor("topk_ids", topk_ids, torch.int32, "num_tokens", "topk")
    checks.floats("gate_up", gate_up, *_WEIGHTS)
    kind = gate_up.dtype
    whole, packing = _BLOCKS.get(kind, (FP4_BLOCK, 2))
    whole = max(whole, ACTIVATION_BLOCK) if activations == "fp8" else whole
    width = int(x.shape[1])  # sizes of weights are configuration, so constants in compiled code
    checks.divides("the values of a block", whole, "hidden_size", width)
    checks.tensor("gate_up", gate_up, kind, "num_experts", "gate_up_size", width // packing)
    rows = int(gate_up.shape[1])
    pair = "gate and up" if whole == 1 else "two blocks"
    checks.divides(pair, 2 * whole, "gate_up_size", rows)
    checks.at_least(1, num_experts=int(gate_up.shape[0]))
    size = rows // 2
    _check_scale(checks, "gate_up_scale", gate_up_scale, kind, rows, width)
    checks.tensor("down", down, kind, "num_experts", "hidden_size", size // packing)
    _check_scale(checks, "down_scale", down_scale, kind, width, size)
    checks.optional("shared", shared, torch.bfloat16, "num_tokens", "hidden_size")
    checks.above(0, swiglu_limit=swiglu_limit)
    checks.one_of("activations", activations, *_ACTIVATIONS, belongs_to="the recipe has")
    if kind == torch.bfloat16 and activations != "bf16":
        raise checks.error(
            "activations",
            must="be 'bf16' with bfloat16 weights",
            got=repr(activations),
            do="Only codes are multiplied by codes",
            kind=NotImplementedError,
        )
    check_impl(checks.op, PROVIDERS, impl, x.device, {})
    weights = (gate_up, gate_up_scale, down, down_scale)
    settings = {"swiglu_limit": swiglu_limit, "activations": activations, "impl": impl}
    return _experts(x, topk_weights, topk_ids, *weights, shared, **settings)


def _check_scale(
    checks: Checks, name: str, scale: Tensor | None, kind: torch.dtype, rows: int, columns: int
) -> None:
    if kind == torch.bfloat16:
        if scale is not None:
            raise checks.error(
                name,
                must="be None with bfloat16 weights",
                got="a tensor",
                do="Only codes have scales",
            )
    elif kind == torch.float8_e4m3fn:
        blocks = rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK
        checks.tensor(name, scale, (torch.float32, torch.uint8), "num_experts", *blocks)
    else:
        checks.tensor(name, scale, torch.uint8, "num_experts", rows, columns // FP4_BLOCK)
