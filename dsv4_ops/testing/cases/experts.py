"""Cases and strategies of routed experts and the plan of their blocks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, Exact, OpTesting, i32
from dsv4_ops.testing.cases.linear import activation_values
from dsv4_ops.testing.float64.experts import exact_terms, expert_values, fp4_weight, routing
from dsv4_ops.testing.float64.linear import activations as sampled_activations, fp8_weight
from dsv4_ops.testing.strategies.draw import Draw

INF, NAN = math.inf, math.nan


def _plan_cases() -> list[Case]:
    ids = i32([[2, 0], [2, -1], [2, 4]])
    pairs = {"num_experts": 4, "block_size": 2}
    none = i32([]).view(0, 2)
    return [
        # six rows and four experts: (6 + 4) // 2 = 5 blocks
        Case(
            "pairs", (ids,), pairs, ([1, -1, 0, 2, 4, -1, -1, -1, -1, -1], [0, 2, 2, -1, -1], [3])
        ),
        Case(
            "rows",
            (ids,),
            {**pairs, "block_size": 1},
            ([1, 0, 2, 4, -1, -1], [0, 2, 2, 2, -1, -1], [4]),
        ),
        Case(
            "one block",
            (ids[:1],),
            {"num_experts": 3, "block_size": 3},
            ([1, -1, -1, 0, -1, -1], [0, 2], [2]),
        ),
        Case("nowhere", (i32([[-1], [7]]),), pairs, ([-1] * 4, [-1] * 2, [0])),
        Case("no token", (none,), pairs, ([], [], [0])),
    ]


def _plan_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(5, 0, 1, 2, 3, 9, 40), min_size)
    topk = 3 if min_size else draw.one_of(2, 1, 3, 6)
    _, ids = routing(draw, num_tokens, topk, settings["num_experts"])
    return Case("sampled", (ids,), settings)


expert_plan = OpTesting(
    cases=_plan_cases,
    settings=(
        {"num_experts": 4, "block_size": 16},
        {"num_experts": 7, "block_size": 1},
        {"num_experts": 1, "block_size": 3},
        {"num_experts": 40, "block_size": 4},
    ),
    make=_plan_call,
)

W4A16 = {"swiglu_limit": 10.0, "activations": "bf16", "impl": "auto"}
W4A8 = {**W4A16, "activations": "fp8"}


def _fp4_case() -> tuple[Tensor, ...]:
    """Make two experts with 32 gate and 32 up rows for 64 inputs. Every second input is 1.

    The first expert's gate value is 3 (16 / 16 + 16 / 8), and its up value is -2. The second
    expert's values are 32 and -32.
    """
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[:, ::2] = 1
    gate_up = torch.zeros(2, 64, 32, dtype=torch.uint8)
    gate_up[:, :32], gate_up[:, 32:] = 0x42, 0x9A  # 1 and 2; -1 and -0.5
    gate_up_scale = torch.full((2, 64, 2), 127, dtype=torch.uint8)
    gate_up_scale[0] = 123
    gate_up_scale[0, :32, 1] = 124
    down = torch.full((2, 64, 16), 0x21, dtype=torch.uint8)  # 0.5 and 1; 16 of each sum to 24
    down_scale = torch.full((2, 64, 1), 127, dtype=torch.uint8)
    down_scale[0, 32:], down_scale[1] = 128, 120
    weights = torch.tensor([[0.5, 0.25], [1.0, torch.nan], [1.0, torch.inf]])
    ids = i32([[0, 1], [1, -1], [2, 2**31 - 1]])
    return x, weights, ids, gate_up, gate_up_scale, down, down_scale


def _tiny_case() -> tuple[Tensor, ...]:
    """Make ``_fp4_case``, but with up values and results near the smallest float32. A kernel that
    divides its sums by 2^32 would lose these values."""
    x, weights, ids, gate_up, *rest = _fp4_case()
    x[:, 32:] *= 2.0**-122
    gate_up[:, 32:, :16] = 0
    return (x, weights, ids, gate_up, *rest)


def _fp8_case() -> tuple[Tensor, ...]:
    """Make one expert: gate 128 / 64 = 2 and up 64 / 32 = 2; silu(2) * 2 is 3.515625 in bf16."""
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    gate_up = torch.ones(1, 256, 128)
    gate_up[:, 128:] = 0.5
    gate_up_scale = torch.tensor([[[121], [122]]], dtype=torch.uint8)
    down = torch.ones(1, 128, 128).to(torch.float8_e4m3fn)
    down_scale = torch.tensor([[[2.0**-7]]])
    codes = gate_up.to(torch.float8_e4m3fn)
    routed = torch.ones(1, 1), i32([[0]])
    return x, *routed, codes, gate_up_scale, down, down_scale


def _bf16_case() -> tuple[Tensor | None, ...]:
    """Make an unused expert, and one with 10 gate and 10 up rows for 48 inputs: gate 48 / 16 = 3
    and up -48 / 32 = -1.5; silu(3) * -1.5 is -4.28125 in bf16."""
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    gate_up = torch.full((2, 20, 48), torch.inf, dtype=torch.bfloat16)
    gate_up[0, :10], gate_up[0, 10:] = 2.0**-4, -(2.0**-5)
    down = torch.full((2, 48, 10), torch.nan, dtype=torch.bfloat16)
    down[0], down[0, 0] = 0.5, 0.0
    return x, torch.tensor([[0.5], [1.0]]), i32([[0], [2]]), gate_up, None, down, None


def _experts_cases() -> list[Case]:
    fp4, fp8 = _fp4_case(), _fp8_case()
    # the first 32 results are -5.71875 * 24 / 2 - 100 * 24 / 128 / 4 = -73.3125; the other results
    # have twice the first term and are -141.9375
    out = [[-73.5] * 32 + [-142.0] * 32, [-18.75] * 64, [0.0] * 64]
    shared = [[-73.0] * 32 + [-142.0] * 32, [-18.625] * 64, [0.125] * 64]
    signed = (*fp4[:3], fp4[3].view(torch.int8), fp4[4], fp4[5].view(torch.int8), fp4[6])
    none = tuple(tensor[:0] for tensor in fp4[:3])
    nan = fp4[4].clone()
    nan[0, 0, 0] = 255
    return [
        Case("fp4", fp4, W4A16, (out,)),
        # -73.1875 rounds to -73, but bf16(-73.5 + 0.125) would be -73.5
        Case("shared", (*fp4, torch.full((3, 64), 0.125).bfloat16()), W4A16, (shared,)),
        Case("int8", signed, W4A16, (out,)),
        Case("fp8", fp8, W4A16, ([[3.515625] * 128],)),
        Case("quantised", fp8, W4A8, ([[3.5] * 128],)),  # 225 / 64 becomes 224 / 64
        # -4.28125 * 10 / 4 = -10.703125, which rounds to -10.6875 in bf16
        Case("bf16", _bf16_case(), W4A16, ([[0.0, *[-10.6875] * 47], [0.0] * 48],)),
        Case("tiny", _tiny_case(), W4A16),
        Case("a byte of 255", (*fp4[:4], nan, *fp4[5:]), W4A16),
        Case("no token", (*none, *fp4[3:]), W4A16, ([],)),
        Case(
            "no expert of a token",
            (fp4[0], fp4[1][:, :0], fp4[2][:, :0], *fp4[3:]),
            W4A16,
            ([[0.0] * 64] * 3,),
        ),
    ]


def expert_weights(
    seed: torch.Generator, num_experts: int, width: int, size: int, bits: int, ue8m0: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Sample gate_up and down with weights of ``bits`` bits, each followed by its scale (None for
    16 bits)."""
    if bits == 16:
        shapes = (num_experts, 2 * size, width), (num_experts, width, size)
        gate_up, down = (torch.randn(shape, generator=seed).to(torch.bfloat16) for shape in shapes)
        return gate_up, None, down, None
    if bits == 8:
        up = fp8_weight(seed, num_experts, 2 * size, width, ue8m0=ue8m0)
        return *up, *fp8_weight(seed, num_experts, width, size, ue8m0=ue8m0)
    up = fp4_weight(seed, num_experts, 2 * size, width // 2)
    return *up, *fp4_weight(seed, num_experts, width, size // 2)


def _experts_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 20), min_size)
    topk = 3 if min_size else draw.one_of(2, 1, 3)
    num_experts = 4 if min_size else draw.one_of(4, 1, 6)
    quantised = settings["activations"] == "fp8"
    bits = 4 if min_size else draw.one_of(*((4, 8) if quantised else (4, 8, 16)))
    sizes: tuple[tuple[int, int], ...] = ((128, 64), (64, 32), (32, 96))
    if bits == 8 or quantised:
        sizes = (128, 128), (256, 128)
    elif bits == 16:
        sizes = (128, 64), (136, 72), (40, 5), (33, 130)
    width, size = sizes[0] if min_size else draw.one_of(*sizes)
    ue8m0 = draw.flag()
    weights = expert_weights(draw.generator(), num_experts, width, size, bits, ue8m0)
    x = sampled_activations(draw, num_tokens, width, infinite=False)
    x = x * 2.0**-8 if bits == 8 else x  # FP8 codes of weights reach 448, so x is small
    has_shared = min_size or draw.flag()  # a compiled function takes a fixed number of tensors
    shared = sampled_activations(draw, num_tokens, width, infinite=False) if has_shared else None
    routed = routing(draw, num_tokens, topk, num_experts)
    return Case("sampled", (x, *routed, *weights, shared), settings)


def _experts_precise(
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
    activations: str,
    **settings: Any,
) -> tuple[Exact | None, ...]:
    rows = activation_values(x, None, activations)
    value = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    error, fp8 = value.clone(), activations == "fp8"
    for token, experts in enumerate(topk_ids.tolist()):
        for place, expert in enumerate(experts):
            if not 0 <= expert < gate_up.shape[0]:
                continue
            scales = [
                None if each is None else each[expert] for each in (gate_up_scale, down_scale)
            ]
            up = expert_values(gate_up[expert], scales[0])
            gate, up = (rows[token] @ up.t()).chunk(2)
            gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
            act = (gate * torch.sigmoid(gate) * up)[None].to(torch.bfloat16)
            act = activation_values(act, None, activations)
            product = exact_terms(act, expert_values(down[expert], scales[1]), fp8)
            weight = topk_weights[token, place].to(torch.float64)
            value[token] += weight * product.value[0]
            error[token] += weight.abs() * product.magnitude[0]
    if shared is not None:
        value += shared
    return (Exact(value, error + value.abs()),)


experts = OpTesting(
    cases=_experts_cases,
    settings=(W4A16, W4A8, {**W4A16, "swiglu_limit": 0.75}),
    make=_experts_call,
    precise=_experts_precise,
)


def _route_cases() -> list[Case]:
    hidden = torch.tensor([[2.0, 1.0], [0.0, 1.0]]).bfloat16()
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).bfloat16()
    best = {"top_k": 1, "scale": 1.5}
    table = torch.tensor([[3, 3], [2, 4], [-1, 7], [0, 0]])
    both = torch.tensor([[0, 2], [0, 0]]).float()
    named = {"top_k": 2, "scale": 2.0}
    ids, none = torch.tensor([1, 0]), torch.tensor([-1, 2])
    return [
        # the logits are 0, 2, 1, 1 and 0, 0, 1, 1; the first of two equal logits wins
        Case("best", (hidden, weight), best, ([[1], [2]], [[1.5], [1.5]])),
        Case("order", (hidden, weight), {"top_k": 4, "scale": 1.0}),
        # scores are at most 1.46, so a bias of 10 decides the order
        Case(
            "bias",
            (hidden, weight, torch.tensor([10.0, 0.0, 0.0, 10.0])),
            best,
            ([[3], [3]], [[1.5], [1.5]]),
        ),
        Case(
            "table",
            (hidden, weight, None, table, ids),
            named,
            ([[2, -1], [3, 3]], [[2.0, 0.0], [1.0, 1.0]]),
        ),
        Case(
            "no id", (hidden, weight, None, table, none), named, ([[-1, -1]] * 2, [[0.0, 0.0]] * 2)
        ),
        Case("no token", (hidden[:0], weight), best, ([], [])),
        Case(
            "two experts", (both.bfloat16(), weight[:2]), named, ([[0, 1], [0, 1]], [[1.0] * 2] * 2)
        ),
    ]


def _route_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    """Sample products of small integers, which are exact, so that all implementations see the same
    ties."""
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 20), min_size)
    width = 130 if min_size else draw.one_of(130, 1, 16, 300)
    num_experts = 40 if min_size else draw.one_of(40, 8, 11)
    seed, top_k = draw.generator(), settings["top_k"]
    hidden = torch.randint(-2, 3, (num_tokens, width), generator=seed).bfloat16()
    weight = torch.randint(-2, 3, (num_experts, width), generator=seed).bfloat16() / 4
    if hidden.numel() and draw.flag():
        hidden[draw.integer(0, num_tokens - 1), 0] = torch.nan
    if not min_size and draw.flag():
        table = torch.randint(-1, num_experts + 1, (9, top_k), generator=seed)
        ids = torch.randint(-1, 10, (num_tokens,), generator=seed)
        return Case("sampled", (hidden, weight, None, table, ids), settings)
    bias = torch.randint(0, 9, (num_experts,), generator=seed) / 4
    return Case("sampled", (hidden, weight, bias), settings)


def _route_precise(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    *,
    top_k: int,
    scale: float,
) -> tuple[Exact | None, ...]:
    logits, ids = hidden.double() @ weight.double().t(), []
    for token, row in enumerate(logits.tolist()):
        if table is not None and token_ids is not None:
            word = int(token_ids[token])
            listed = table[word].tolist() if 0 <= word < len(table) else [-1] * top_k
            ids.append([expert if 0 <= expert < len(row) else -1 for expert in listed])
            continue
        scores = (torch.tensor(row).exp().log1p()).sqrt()  # in float32, as in the op
        ranked = scores if bias is None else scores + bias.cpu()
        values = [-math.inf if math.isnan(value) else value for value in ranked.tolist()]
        ids.append(sorted(range(len(row)), key=lambda expert: (-values[expert], expert))[:top_k])
    chosen = torch.tensor(ids, dtype=torch.int64, device=hidden.device).view(-1, top_k)
    exists = chosen >= 0
    of_chosen = torch.where(exists, logits.gather(1, chosen.clamp(min=0)), 0.0)
    scores = torch.where(exists, torch.nn.functional.softplus(of_chosen).sqrt(), 0.0)
    value = scores / (scores.sum(1, keepdim=True) + 1e-20) * scale
    # the absolute error of a logit becomes a relative error of its exponential, in a score and in
    # the sum of scores; the sums add few roundings
    reach = 8 + of_chosen.abs().nan_to_num(0.0).amax(1, keepdim=True)
    return None, Exact(value, value * reach)


def _grouped_cases() -> list[Case]:
    half, bias = torch.zeros(1, 4), torch.tensor([0.0, 1.0, 0.75, 0.75])
    two = {"num_groups": 2, "kept_groups": 1, "scale": 2.5, "normalize": True}
    one = {**two, "num_groups": 1, "top_k": 1}
    nan, least = torch.tensor([[NAN, 0.0, 0.0, 0.0]]), torch.full((1, 4), -INF)
    return [
        # the first group has the sum 0.5 + 1.5, the second group has 1.25 + 1.25
        Case("groups", (half, bias), {**two, "top_k": 1}, ([[2]], [[2.5]])),
        Case("one group", (half, bias), one, ([[1]], [[2.5]])),
        Case("no sum", (half, bias), {**one, "normalize": False}, ([[1]], [[1.25]])),
        Case("equal", (half,), {**two, "top_k": 2}, ([[0, 1]], [[1.25, 1.25]])),
        Case(
            "both groups",
            (half, bias),
            {**two, "kept_groups": 2, "top_k": 4, "scale": 4.0},
            ([[1, 2, 3, 0]], [[1.0] * 4]),
        ),
        # the sum of the first group is NaN
        Case("NaN", (nan,), {**two, "top_k": 2}, ([[2, 3]], [[1.25, 1.25]])),
        Case("no score", (least,), {**two, "top_k": 2}, ([[0, 1]], [[0.0, 0.0]])),
        Case("no token", (half[:0],), one, ([], [])),
    ]


def _grouped_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    """Sample logits that are integers of at least 0, so that sums of two scores are equal only if
    the scores are equal."""
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5, 20), min_size)
    size = 5 if min_size else draw.one_of(5, 4, 8)
    seed, experts = draw.generator(), size * settings["num_groups"]
    wide = torch.randint(0, 5, (num_tokens, experts + 2), generator=seed).float()
    apart = not min_size and draw.flag()
    logits = wide[:, 1 : experts + 1] if apart else wide[:, :experts].contiguous()
    if logits.numel() and draw.flag():
        logits[draw.integer(0, num_tokens - 1), draw.integer(0, experts - 1)] = draw.one_of(
            NAN, -INF
        )
    if not min_size and draw.flag():
        return Case("sampled", (logits,), settings)
    bias = torch.randint(0, 9, (experts,), generator=seed) / 4
    return Case("sampled", (logits, bias), settings)


def _grouped_precise(
    logits: Tensor, bias: Tensor | None = None, **settings: Any
) -> tuple[Exact | None, ...]:
    groups, num_kept = settings["num_groups"], settings["kept_groups"]
    size, ids = logits.shape[1] // groups, []
    for row in logits.tolist():
        scores = torch.tensor(row).sigmoid()  # in float32, as in the op
        biased = scores if bias is None else scores + bias.cpu()
        values = [-INF if math.isnan(value) else value for value in biased.tolist()]
        sums = [
            sum(sorted(values[first : first + size])[-2:]) for first in range(0, len(row), size)
        ]
        best = sorted(range(groups), key=lambda group: (-sums[group], group))[:num_kept]
        candidates = [expert for expert in range(len(row)) if groups == 1 or expert // size in best]
        ordered = sorted(candidates, key=lambda expert: (-values[expert], expert))
        ids.append(ordered[: settings["top_k"]])
    chosen = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    scores = logits.double().gather(1, chosen.view(-1, settings["top_k"])).sigmoid()
    value = scores * settings["scale"]
    if settings["normalize"]:
        value = value / (scores.sum(1, keepdim=True) + 1e-20)
    # the absolute error of a logit becomes a relative error of its exponential, at most 4, in a
    # score and in the sum of scores; eight more roundings follow
    return None, Exact(value, value * 16)


grouped_topk = OpTesting(
    cases=_grouped_cases,
    settings=(
        {"top_k": 4, "num_groups": 8, "kept_groups": 4, "scale": 2.5, "normalize": True},
        {"top_k": 3, "num_groups": 1, "kept_groups": 1, "scale": 1.0, "normalize": False},
        {"top_k": 4, "num_groups": 3, "kept_groups": 1, "scale": 1.5, "normalize": True},
    ),
    make=_grouped_call,
    precise=_grouped_precise,
)
route = OpTesting(
    cases=_route_cases,
    settings=({"top_k": 6, "scale": 1.5}, {"top_k": 1, "scale": 1.0}, {"top_k": 3, "scale": 2.5}),
    make=_route_call,
    precise=_route_precise,
)
