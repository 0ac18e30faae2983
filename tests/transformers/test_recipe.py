"""Differences between the official recipe and Hugging Face, one by one, and stages of a quantised
model against Hugging Face's modules to which this file applies the recipe."""

from dataclasses import asdict
from functools import lru_cache, partial

import pytest
import torch
import transformers
from torch.nn.functional import linear

import dsv4_ops
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.cache.paged_cache import cache_argument
from dsv4_ops.integrations.transformers.steps.padded import padded_step
from dsv4_ops.integrations.transformers.steps.step import LayerContext
from dsv4_ops.testing.models import small_model
from tests.support.hf_models import new_cache, text

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LENGTH, SHORT = 36, 12
# all experts and rows are selected, so that no choice can flip
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
FORCED = {"mlp_layer_types": ["hash_moe"] * 3, "index_topk": 64, "sliding_window": 16}
FORCED |= {"compress_rates": RATES}
OFF = asdict(v4.Recipe.reference())
PRECISIONS = [name for name in OFF if name.endswith("float32")]


def ids():
    return text()[:2, :LENGTH]


def only(flag, value=True):
    return v4.Recipe(**{**OFF, flag: value})


def run(model, length=LENGTH):
    tokens = ids()[:, :length]
    return model(tokens, cache=new_cache(model, max_batch_size=2, max_cache_len=64)).logits


@lru_cache
def patched(flag, on, dtype=BF16, kv="bf16"):
    """Return a model with at most one flag on."""
    return v4.patch(small_model(dtype=dtype), kv=kv, precision=only(flag, on))


def values(*shape, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * scale).to(BF16)


def rounded_once(got, exact):
    """Return the share of values that equal the exact values, rounded to nearest."""
    assert got.dtype == BF16
    assert exact.dtype == F64
    return float((got == exact.to(BF16)).float().mean())


def test_names_are_recipes():
    words = {"activations": "bf16", "activation_scale": "pow2", "expert_activations": "bf16"}
    on, off = (dict.fromkeys(PRECISIONS, value) | {"shared_expert_clamp": True} | words
               for value in (True, False))  # fmt: skip
    assert asdict(v4.Recipe.serve()) == on
    assert off | {"activations": "fp8", "activation_scale": "float32"} == OFF
    official = asdict(v4.Recipe.serve(activations="fp8"))
    assert official == on | {"activations": "fp8", "expert_activations": "fp8"}
    with pytest.raises(ValueError, match=r"^Recipe: activations must be 'bf16' or 'fp8', got"):
        v4.Recipe.serve(activations="fp4")


@pytest.mark.parametrize("flag", PRECISIONS)
def test_in_float32_a_precision_changes_nothing(flag):
    want = small_model()(ids()[:, :SHORT]).logits
    found = run(patched(flag, True, F32, "fp32"), SHORT)
    torch.testing.assert_close(found, want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "top-k"])
def test_router(layer):
    x = values(1, 50, 128)
    for on, dtype in ((True, F32), (False, BF16)):
        model = patched("router_float32", on)
        gate = model.model.layers[layer].mlp.gate
        logits, weights, chosen = gate(x, ids()[:, :25]) if layer == 0 else gate(x)
        assert logits.dtype == weights.dtype == dtype
        want = linear(x[0].to(F64), gate.weight.to(F64))
        scores = torch.nn.functional.softplus(want).sqrt()
        if layer == 0:
            assert torch.equal(chosen, gate.tid2eid[ids()[:, :25].flatten()])
        elif on:
            best = (scores + gate.e_score_correction_bias.to(F64)).topk(2).indices
            assert torch.equal(chosen.sort().values, best.sort().values)
        taken = scores.gather(1, chosen)
        taken = taken / taken.sum(-1, keepdim=True) * model.config.routed_scaling_factor
        errors = [(logits - want).abs().max(), (weights - taken).abs().max()]
        assert all(error < 1e-5 if on else error > 1e-4 for error in errors)


def test_logits():
    x = values(2, 5, 128)
    head = patched("logits_float32", True).lm_head
    want = linear(x.to(F64), head.weight.to(F64)).float()
    torch.testing.assert_close(head(x), want, rtol=0, atol=1e-5)
    out = run(patched("logits_float32", True), SHORT)
    assert not torch.equal(out, out.to(BF16).float())


def swiglu(gate, up, limit):
    gate, up = gate.to(F64).clamp(max=limit), up.to(F64).clamp(-limit, limit)
    return gate * gate.sigmoid() * up


def test_swiglu():
    both, x = values(64, 128, scale=8.0), values(40, 128, scale=4.0)
    for on in (True, False):
        mlp = patched("swiglu_float32", on).model.layers[1].mlp
        clamped = swiglu(*both.chunk(2, -1), mlp.experts.limit)
        share = rounded_once(mlp.experts._apply_gate(both), clamped)
        assert share > 0.999 if on else share < 0.95
        shared, seen = mlp.shared_experts, []
        handle = shared.down_proj.register_forward_pre_hook(lambda _, args, s=seen: s.append(args))
        shared(x)
        handle.remove()
        want = swiglu(shared.gate_proj(x), shared.up_proj(x), shared.limit)
        share = rounded_once(seen[0][0], want)
        assert share > 0.999 if on else share < 0.95


@pytest.mark.parametrize("precise", [False, True])
def test_clamp_of_shared_experts(precise):
    """This is the only flag with an effect in float32, because activations exceed the limit."""
    x = values(40, 128, scale=3.0).float()
    for clamp in (True, False):
        recipe = v4.Recipe(**{**OFF, "swiglu_float32": precise, "shared_expert_clamp": clamp})
        model = v4.patch(small_model(swiglu_limit=1.0), kv="fp32", precision=recipe)
        shared = model.model.layers[2].mlp.shared_experts
        gate, up = shared.gate_proj(x), shared.up_proj(x)
        assert (gate > 1).any()
        assert (up < -1).any()
        want = shared.down_proj(swiglu(gate, up, 1.0 if clamp else torch.inf).float())
        torch.testing.assert_close(shared(x), want, rtol=0, atol=1e-5)
        stock = type(shared).forward(shared, x)
        assert (stock - want).abs().max() < 1e-5 if clamp else (stock - want).abs().max() > 0.1


def test_streams():
    for on in (True, False):
        model = patched("streams_float32", on)
        layer, seen = model.model.layers[1], {}

        def keep(name, _, args, out, seen=seen):
            seen[name] = (args[0] if args else None, out)

        handles = [
            getattr(layer, name).register_forward_hook(partial(keep, name))
            for name in ("attn_hc", "self_attn", "ffn_hc", "mlp")
        ]
        handles.append(layer.register_forward_hook(partial(keep, "layer")))
        run(model, SHORT)
        for handle in handles:
            handle.remove()
        halves = [
            ("attn_hc", seen["self_attn"][1][0], seen["ffn_hc"][0]),
            ("ffn_hc", seen["mlp"][1], seen["layer"][1]),
        ]
        for connection, out, got in halves:
            streams, (post, mix, _) = seen[connection]
            kept = mix.to(F64).transpose(-1, -2) @ streams.to(F64)
            share = rounded_once(got, post.to(F64)[..., None] * out.to(F64)[..., None, :] + kept)
            assert share > 0.999 if on else share < 0.95


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_rotations(kind):
    """Rounded tables have Hugging Face's bits."""
    rotary = small_model().model.rotary_emb
    place = torch.arange(3000)[None]
    name = "main" if kind == "window" else "compress"
    for on, dtype in ((True, F32), (False, BF16)):
        cache = new_cache(patched("rope_float32", on), max_batch_size=1, max_cache_len=3000)
        got = getattr(cache.tensors.rope, kind)
        want = torch.cat(rotary(torch.zeros(1, dtype=dtype), place, layer_type=name), -1)[0]
        assert got.dtype == F32
        if on:
            torch.testing.assert_close(got, want, rtol=0, atol=5e-4)  # angles are rounded at 3000
            assert not torch.equal(got, got.to(BF16).float())
        else:
            assert torch.equal(got, want.float())


@pytest.mark.parametrize("layer", [1, 2], ids=["c4", "c128"])
def test_compressor_projections(layer):
    """The states in a cache are the projections: keys, then gates with their biases."""
    for on in (True, False):
        model = patched("compressor_float32", on)
        cache = new_cache(model, max_batch_size=1, max_cache_len=8, max_chunk=8)
        model(ids()[:1, :3], cache=cache)
        width = 2 * model.model.layers[layer].self_attn.compressor.kv_proj.out_features
        rows = cache.tensors.layers[layer].states.flatten(1)[0, : 3 * width].view(3, width)
        keys = rows[:, : width // 2]
        assert keys.ne(0).all()
        share = float((keys == keys.to(BF16).float()).float().mean())
        assert share < 0.1 if on else share == 1.0


def test_norms():
    x = values(1, 50, 128, scale=5.0)
    norm = patched("norms_float32", True).model.layers[1].input_layernorm
    exact = x.to(F64) * (x.to(F64).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert rounded_once(norm(x), exact * norm.weight.to(F64)) > 0.999


def quantised(keys):
    """Simulate the official quantisation: 448 channels in blocks of 64, e4m3, with power-of-two
    scales; the rotated channels stay in bfloat16."""
    kept, rotated = keys[..., :448].to(BF16).float(), keys[..., 448:].to(BF16).float()
    blocks = kept.unflatten(-1, (7, 64))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    blocks = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([blocks.flatten(-2), rotated], -1).to(keys.dtype)


def simulated_cache(model, written=None):
    """Hugging Face's cache, but keys are quantised when they are stored and read."""
    cache = transformers.DynamicCache(config=model.config)
    written = {} if written is None else written
    for index, layer in enumerate(cache.layers):

        def update(keys, *_, index=index, before=layer.update, **__):
            written["swa", index] = quantised(keys)
            return before(written["swa", index], written["swa", index])

        def compressed(name, keys, index=index, layer=layer):
            if name == "compressor":
                written["compressed", index] = keys = quantised(keys)
            return type(layer).update_compressor_states(layer, name, keys)

        layer.update = update
        if hasattr(layer, "update_compressor_states"):
            layer.update_compressor_states = compressed
    return cache


@lru_cache
def truth():
    """Return Hugging Face's model in float32, with weights that bfloat16 represents."""
    return small_model(dtype=BF16, **FORCED).float()


def rms(got, want):
    return float((got.float() - want.float()).square().mean().sqrt())


def attentions(model, cache):
    """Record input, keyword arguments and output of every attention layer."""
    seen = []
    handles = [
        layer.self_attn.register_forward_hook(
            lambda _, args, rest, out: seen.append((args[0], rest, out[0])), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(ids(), cache=cache)
    for handle in handles:
        handle.remove()
    return seen


def in_bfloat16(rest, cache):
    given = {name: (cos.to(BF16), sin.to(BF16)) for name, (cos, sin) in rest.items()}
    return {"position_embeddings": given, cache_argument(): cache}


@pytest.mark.parametrize(
    ("dtype", "kv", "precision", "budget"),
    [
        (BF16, "bf16", "reference", 1.0),
        (BF16, "bf16", "serve", 1.0),
        (BF16, "fp8", "serve", 1.2),
        (F32, "fp8", "serve", 0.6),
    ],
)
def test_drift_of_attention_layers(dtype, kv, precision, budget, record_property):
    """Errors relative to float32 with equally rounded stored keys are below ``budget`` times those
    of Hugging Face's bfloat16 layer. Every layer gets the inputs of the float32 model."""
    simulated = kv == "fp8"
    hf = small_model(dtype=BF16, **FORCED)
    model = v4.patch(small_model(dtype=BF16, **FORCED).to(dtype), kv=kv, precision=precision)
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    spec = model.dsv4_ops_spec
    step = padded_step(spec, (2, LENGTH), None, None, None, cache, 0).step

    def their_cache(of):
        return simulated_cache(of) if simulated else transformers.DynamicCache(config=of.config)

    own_cache = their_cache(hf)
    for index, (x, rest, want) in enumerate(attentions(truth(), their_cache(truth()))):
        caches, rope = cache.tensors.layers[index], cache.tensors.rope.of(spec.kinds[index])
        context = LayerContext(step, caches, rope, "prefill", True)
        flat = x.to(dtype).flatten(0, 1)[None]
        got = model.model.layers[index].self_attn(flat, dsv4_ops=context)[0].view_as(want)
        rest = {**rest, **in_bfloat16(rest["position_embeddings"], own_cache)}
        rest["attention_mask"] = rest["attention_mask"].to(BF16)
        own = hf.model.layers[index].self_attn(x.to(BF16), **rest)[0]
        drift = rms(got, want) / rms(own, want)
        record_property(f"layer {index}", f"{drift:.2f} of Hugging Face's {rms(own, want):.4f}")
        assert drift < budget, f"layer {index}: {drift:.3f}"


@pytest.mark.parametrize("precision", ["reference", "serve"])
def test_drift_of_a_model_in_bfloat16(precision, record_property):
    want = truth()(ids()).logits
    own = rms(small_model(dtype=BF16, **FORCED)(ids()).logits, want)
    model = v4.patch(small_model(dtype=BF16, **FORCED), kv="bf16", precision=precision)
    drift = rms(run(model), want)
    record_property("drift", f"{drift:.4f}, Hugging Face's {own:.4f}")
    assert drift < own


def test_stored_keys_are_the_official_recipes():
    """Quantised channels have equal bits, unless the last bits of a projection decide. Every layer
    gets the inputs of the quantised float32 model."""
    written = {}
    truth()(ids(), None, None, simulated_cache(truth(), written))
    model = v4.patch(small_model(dtype=BF16, **FORCED).float(), kv="fp8", precision="serve")
    cache = new_cache(model, max_batch_size=2, max_cache_len=64)
    step = padded_step(model.dsv4_ops_spec, (2, LENGTH), None, None, None, cache, 0).step
    tables, inputs = cache.tensors.tables, attentions(truth(), simulated_cache(truth()))
    for index, kind in enumerate(model.dsv4_ops_spec.kinds):
        caches, rope = cache.tensors.layers[index], cache.tensors.rope.of(kind)
        context = LayerContext(step, caches, rope, "prefill", True)
        model.model.layers[index].self_attn(inputs[index][0].flatten(0, 1)[None], dsv4_ops=context)
        read = [(caches.swa, tables.swa, 64, 1, written["swa", index][:, 0])]
        if kind != "window":
            ratio = 4 if kind == "c4" else 16
            want = written["compressed", index]
            read.append((caches.compressed, tables.compressed, 256 // ratio, ratio, want))
        for stored, table, rows, ratio, want in read:
            sizes = {"block_size": rows, "num_rows": LENGTH // ratio}
            got = dsv4_ops.gather_k_cache(stored, cache.seq_lens // ratio, None, table, **sizes)
            assert rounded_once(got[..., :448], want[..., :448].to(F64)) > 0.998
            # ours and official keys are rounded before the rotation, these only after it
            close = 2.0**-8 * float(want.abs().max())
            tail = got[..., 448:].float()
            torch.testing.assert_close(tail, want[..., 448:], rtol=2.0**-8, atol=close)


def test_half_precision():
    """``model.half()`` runs after ``patch``; keys are stored in bfloat16."""
    want = small_model(dtype=BF16, **FORCED).float()(ids()).logits
    model = v4.patch(small_model(dtype=BF16, **FORCED), kv="bf16", precision="reference").half()
    assert rms(run(model), want) < 0.03
