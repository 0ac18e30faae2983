"""Every combination of a layer's settings works, or is refused before anything is written."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_ops import attention
from dsv4_ops.attention import ContextParallel, MlaCache, MlaInputs, MlaSpec, MlaWeights, mla_layer
from dsv4_ops.dispatch import choice, limits
from tests.attention.test_mla_layers import run
from tests.helpers import NIGHTLY, i32
from tests.support import layers

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
TOKENS = 20


def refused_by(error: Exception, *names: str) -> str:
    """Check the form of an error; return what raised the error, and the argument that it names."""
    op, _, rest = str(error).partition(": ")
    assert op in names, error
    assert " must " in rest, error
    assert ", got " in rest, error
    return " ".join((op, rest.partition(" must ")[0]))


# Layers of DeepSeek-V4

SETTINGS: dict[str, tuple[Any, ...]] = {
    "layout": ("v4_fp8", "plain"),
    "indexer_layout": ("v4_indexer_fp8", "plain"),
    "dtype": (BF16, F32, torch.float16),
    "scale_layout": (None, "row", "ue8m0_packed", "bogus"),
    "head_dim": (512, 64),
    "rope_dim": (64, 32),
}


def of_groups(found: Any) -> Tensor:
    """Return the output of a layer, quantised or not, as float64."""
    if isinstance(found, Tensor):
        return found.double()
    scales = found.scales
    if scales.dtype == torch.int32:  # four scale bytes of a head, the first in the lowest byte
        packed = scales.permute(0, 2, 1)[:, : found.values.shape[1]].contiguous()
        scales = torch.exp2(packed.view(torch.uint8).double() - 127)
    values = found.values.double().unflatten(-1, (-1, 128)) * scales[..., None]
    return values.flatten(-2).transpose(0, 1)


@pytest.mark.parametrize("kind", layers.KINDS)
def test_every_layer_of_v4_is_right_or_refused(kind: str) -> None:
    """Results equal the formulas; refusals come from the spec, before anything is written."""
    outcomes: Counter[str] = Counter()
    hidden = layers.hidden_states(1, TOKENS)
    for values in product(*SETTINGS.values()):
        chosen = dict(zip(SETTINGS, values, strict=True))
        try:
            spec = replace(layers.SPEC, **chosen)
        except (ValueError, TypeError) as error:
            outcomes[refused_by(error, "LayerSpec")] += 1
            continue
        layer = layers.SmallLayer(kind, spec)
        (inputs,) = layers.projected(layer, hidden)
        batch = layers.Engine(layer, 1).batch([TOKENS])
        exact = spec.layout == "plain" and spec.dtype == F32
        budget = 3e-6 if exact else 0.01 if spec.scale_layout is None else 0.08
        found = {}
        ways = [*product(("decode", "prefill"), (False, True))]
        for layer.schedule, layer.state_rings in ways if NIGHTLY else ways[::3]:
            for cache in layers.caches_of(layer).values():
                cache.view(torch.uint8).fill_(0xFF)
            out = of_groups(layer.attend(inputs, *batch))
            assert out.isfinite().all(), chosen
            found[layer.schedule, layer.state_rings] = out
            amax = out.abs().amax((1, 2))
            first = found["decode", False]
            assert ((out - first).abs().amax((1, 2)) <= budget * amax).all(), chosen
        if spec.rope_dim == 64:  # the oracle rotates 64 values
            want = layers.oracle(layer, inputs)
            sure = want.margin > 1e-3
            error = (first - want.out).abs().amax((1, 2))[sure]
            assert (error <= budget * want.out.abs().amax((1, 2))[sure]).all(), (chosen, error)
        outcomes["right"] += 1
    # for each of 2 indexer layouts: v4_fp8 with 3 scale_layouts; plain rows with 2 dtypes x 2 x 2
    # sizes, and with 2 more scale_layouts in bfloat16
    assert outcomes["right"] == 2 * (2 * 3 + (2 * 4 + 2)), outcomes
    others = (f"LayerSpec {name}" for name in ("dtype", "scale_layout", "head_dim", "rope_dim"))
    assert set(outcomes) == {"right", *others}


# Dense layers

HEADS, NOPE, VALUE, BLOCK = 2, 4, 3, 4
SIZES = {"plain": (16, 4), "mla_fp8": (12, 4), "mla_ds_fp8": (512, 64)}
"""Number of latent values and of rotated values."""
DENSE: dict[str, tuple[Any, ...]] = {
    "dtype": (BF16, F32, torch.float16),
    "layout": tuple(SIZES),
    "query": (None, "fp8", "int8"),
    "context": ("absorbed", "chunked"),
    "chunk_plan": ("packed", "equal"),
    "next_n": (1, 3) if NIGHTLY else (3,),
    "batch_invariant": (False, True) if NIGHTLY else (False,),
    "impl": ("auto", "triton", "flash_mla", "deep_gemm", "reference"),
}


def dense_spec(**chosen: Any) -> MlaSpec:
    rank, rope = SIZES.get(chosen["layout"], SIZES["plain"])
    sizes: dict[str, Any] = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    sizes["softmax_scale"] = (NOPE + rope) ** -0.5
    sizes |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "block_size": BLOCK}
    sizes |= {"max_decode_tokens": 4, "workspace_rows": 13, "max_chunks": 4}
    return MlaSpec(**{**sizes, **chosen})


BUDGETS = {("plain", F32): 2e-6, ("plain", BF16): 0.012}
"""Rows of codes have 0.06, or 0.09 with queries in codes; test_mla_layers.py has V3's sizes."""


def test_every_dense_layer_is_right_or_refused() -> None:
    outcomes: Counter[str] = Counter()
    for values in product(*DENSE.values()):
        chosen = dict(zip(DENSE, values, strict=True))
        try:
            spec = dense_spec(**chosen)
        except (ValueError, TypeError, NotImplementedError) as error:
            outcomes[refused_by(error, "MlaSpec")] += 1
            continue
        cache = MlaCache.allocate(spec, 20)
        try:
            errors, want = run(spec, 2, 7, cache)
        except RuntimeError as refused:
            outcomes[refused_by(refused, "mla_layer")] += 1
            unwritten = cache.kv.isnan() if spec.layout == "plain" else cache.kv == 0x7F
            assert unwritten.all(), chosen
            continue
        error = float(errors.square().mean().sqrt() / want.square().mean().sqrt())
        budget = BUDGETS.get((spec.layout, spec.dtype), 0.06 if spec.query is None else 0.09)
        assert budget / 40 < error < budget, (chosen, error)
        outcomes["right"] += 1
    each = math.prod(
        len(DENSE[name]) for name in ("context", "chunk_plan", "next_n", "batch_invariant")
    )
    # 2 dtypes x (3 layouts + one with queries as codes) x each x 2 (auto and reference)
    assert outcomes["right"] == 2 * (3 + 1) * each * 2, outcomes
    refused = {"MlaSpec dtype", "MlaSpec impl", "MlaSpec query", "mla_layer impl"}
    assert set(outcomes) == {"right", *refused}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"layout": "mla_fp8"},
         "layout must be another than 'mla_fp8' unless kv_lora_rank + qk_rope_head_dim is a "
         "multiple of 16, got 'mla_fp8' with 20. Pass 'plain'."),
        ({"dtype": F32, "context": "chunked", "impl": "triton"},
         "impl must be 'auto' or 'reference' with torch.float32, got 'triton'. "
         "Our kernel takes bfloat16 or float16."),
        ({"layout": "mla_fp8", "qk_rope_head_dim": 16, "dtype": F32, "impl": "triton"},
         "impl must be 'auto', 'flash_mla' or 'reference' with layout 'mla_fp8' and "
         "torch.float32 queries, got 'triton'. "
         "Our kernels read codes for bfloat16 queries, or for codes."),
        ({"kv_lora_rank": 12, "impl": "triton"},
         "impl must be 'auto', 'flash_mla' or 'reference' with rows of 16 values, of which 12 "
         "are the latent, got 'triton'. Our kernels take a latent of a power of two from 16 on, "
         "followed by rotated values."),
        ({"context": "chunked", "impl": "triton", "v_head_dim": 129},
         "impl must be 'auto' or 'reference' with keys of 8, of which 4 are not rotated, and "
         "values of 129 columns, got 'triton'. Our kernel takes up to 128 of each kind."),
        ({"impl": "flash_mla"},
         "impl must be 'auto', 'triton' or 'reference' with rows of 20 values, of which 16 are "
         "the latent, got 'flash_mla'. FlashMLA takes rows of 576, of which 512 are the latent."),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_size": 64, "impl": "flash_mla"}
         | {"batch_invariant": True},
         "impl must be 'auto', 'triton' or 'reference' with num_splits or batch_invariant, got "
         "'flash_mla'. FlashMLA decides itself what it splits."),
        ({"query": "fp8"},
         "query must be None with layout 'plain', got 'fp8'. Codes meet the codes of 'mla_fp8'."),
        ({"query": "int8"}, "query must be 'fp8', got 'int8'."),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim must be a multiple of a pair = 2, got 3."),
        ({"parallel": 2}, "parallel must be a ContextParallel or None, got int."),
        ({"parallel": ContextParallel(group="0", world_size=2, interleave=3)},
         "parallel.interleave must divide block_size, got 3 of blocks"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"softmax_scale": 0.0}, "softmax_scale must be above 0"),
        ({"context": "auto"}, "context must be 'absorbed' or 'chunked', got 'auto'"),
        ({"layout": "v4_fp8"}, "layout must be 'plain' or 'mla_fp8' or 'mla_ds_fp8'"),
        ({"layout": "mla_ds_fp8"}, "layout must be another than 'mla_ds_fp8'"),
        ({"dtype": torch.float16}, "dtype must be torch.bfloat16 or torch.float32"),
    ],
)  # fmt: skip
def test_what_a_dense_spec_refuses(chosen: dict[str, Any], message: str) -> None:
    usual = {"layout": "plain", "dtype": BF16, "impl": "auto"}
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 4}
    with pytest.raises((NotImplementedError, ValueError, TypeError)) as caught:
        dense_spec(**{**usual, **sizes, **chosen})
    assert str(caught.value).startswith(f"MlaSpec: {message}")


def test_what_only_a_step_shows_is_refused_before_the_insert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too many tokens for FlashMLA's planner, absent ranks, and implementations that need a GPU."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_size": 64}
    spec = dense_spec(layout="plain", dtype=BF16, **sizes)
    cache, rank, rope = MlaCache.allocate(spec, 1), spec.kv_lora_rank, spec.qk_rope_head_dim
    shapes = (2, HEADS, NOPE + rope), (2, rank), (2, rope)
    inputs = MlaInputs(*(torch.ones(shape, dtype=BF16) for shape in shapes))
    shapes = (HEADS, NOPE, rank), (HEADS, rank, VALUE)
    halves = (torch.ones(shape, dtype=BF16) for shape in shapes)
    weights = MlaWeights(torch.ones(2, rope), *halves)
    step = attention.build_mla_step(spec, i32([0, 2]), i32([2]), i32([[0]]), num_tokens=2)

    def refusal_of(changed: MlaSpec) -> str:
        with pytest.raises((NotImplementedError, RuntimeError, ValueError)) as caught:
            mla_layer(changed, inputs, weights, cache, step)
        assert not cache.kv.any()
        return str(caught.value)

    absent = ContextParallel(group="none", world_size=2)
    assert refusal_of(replace(spec, parallel=absent)).startswith(
        "mla_layer: group must be the name of an initialised process group, got 'none'."
    )
    assert refusal_of(replace(spec, impl="flash_mla")).startswith(
        "mla_layer: impl must be 'auto' or 'reference' on cpu, got 'flash_mla'."
    )
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    monkeypatch.setattr(limits, "FLASH_MLA_TOKENS", 1)
    assert refusal_of(replace(spec, impl="flash_mla")).startswith(
        "mla_layer: impl must be 'auto', 'triton' or 'reference' with 2 tokens, got 'flash_mla'."
    )
