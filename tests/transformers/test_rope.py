"""Rotary embeddings of configurations: a cache's tables equal Hugging Face's, or are refused."""

import math
from random import Random

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_config, small_model
from tests.support.hf_models import new_cache, text

MAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}
COMPRESS = {**MAIN, "rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0}
COMPRESS |= {"original_max_position_embeddings": 65536, "attention_factor": 1.0}
LENGTH, EPS = 140, torch.finfo(torch.float32).eps

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of some configurations


def rope(main=None, compress=None):
    """Return rotary parameters by label, without values that are None."""
    made = {"main": {**MAIN, **(main or {})}, "compress": {**COMPRESS, **(compress or {})}}
    return {
        label: {name: value for name, value in values.items() if value is not None}
        for label, values in made.items()
    }


def sampled(rng):
    """Sample two sets of parameters, most of which are valid."""
    main = {
        "rope_type": rng.choice(["default"] * 8 + ["linear", "yarn", "proportional"]),
        "rope_theta": rng.choice([100.0, 10000.0, 500000.0]),
        "partial_rotary_factor": rng.choice([0.125] * 9 + [0.25, None]),
        "factor": rng.choice([None, 8.0]),
    }
    if main["rope_type"] != "default":
        main = {**main, "factor": 8.0, "original_max_position_embeddings": 4096}
    compress = {
        "rope_type": rng.choice(["yarn"] * 8 + ["default", "linear"]),
        "rope_theta": rng.choice([1.5, 100.0, 10000.0, 160000.0]),
        "partial_rotary_factor": rng.choice([0.125] * 9 + [0.25]),
        "factor": rng.choice([1.0, 1.5, 16.0, 1000.0]),
        "original_max_position_embeddings": rng.choice([1, 3, 500, 4096, 65536, 10**9]),
        "beta_fast": rng.choice([None, 0, 4, 32, 1000.0]),
        "beta_slow": rng.choice([None, 0, 0.5, 1, 3.0]),
        "attention_factor": rng.choice([1.0] * 6 + [None, 0.5]),
        "truncate": rng.choice([None, None, True, False]),
    }
    if compress["attention_factor"] is None:
        factors = rng.choice([(None, None), (1.0, 1.0), (1.0, 0.7)])
        compress = {**compress, **dict(zip(("mscale", "mscale_all_dim"), factors, strict=True))}
    return rope(main, compress)


def test_tables_are_hugging_faces_or_refused():
    """For any parameters, cosines and sines differ only by float32's rounding."""
    rng, accepted, refused = Random(24), 0, 0
    for _ in range(250):
        config = small_config(rope_parameters=sampled(rng))
        sizes = {"max_batch_size": 1, "max_cache_len": LENGTH, "kv": "fp32"}
        try:
            recipes = ("serve", "reference")
            caches = {each: v4.PagedCache(config, precision=each, **sizes) for each in recipes}
        except NotImplementedError as error:
            assert str(error).startswith("PagedCache: config.rope_parameters['")  # noqa: PT017
            refused += 1
            continue
        accepted += 1
        rotary, place = DeepseekV4RotaryEmbedding(config), torch.arange(LENGTH)[None]
        for kind, label in (("window", "main"), ("compressed", "compress")):
            want = torch.cat(rotary(torch.zeros(1), place, layer_type=label), -1)[0]
            params = config.rope_parameters[label]
            steps = math.log(params["rope_theta"]) + params.get("factor", 1.0) + 16
            angles = place.T * getattr(rotary, f"{label}_inv_freq").repeat(2)
            for cache in caches.values():
                error = (getattr(cache.tensors.rope, kind) - want).abs()
                assert (error <= EPS * (steps * angles + 1)).all(), config.rope_parameters
    assert accepted > 60, accepted
    assert refused > 60, refused


YARN = "be 'default', or 'yarn' with attention_factor 1.0"
REFUSED = {
    "type": ({"main": {"rope_type": "linear", "factor": 8.0}}, "main", "be 'default'"),
    "factor": ({"main": {"rope_type": "yarn", "factor": 8.0}}, "main", "be 'default'"),
    "size of main": ({"main": {"partial_rotary_factor": 0.25}}, "main", "be 'default'"),
    "size of compress": ({"compress": {"partial_rotary_factor": 0.25}}, "compress", YARN),
    "mscale": ({"compress": {"attention_factor": None}}, "compress", YARN),
    "bounds": ({"compress": {"beta_fast": 1.0, "beta_slow": 4.0}}, "compress", YARN),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    given, label, rule = REFUSED[case]
    if given.get("main", {}).get("rope_type") == "yarn":
        given = {"main": {**given["main"], "original_max_position_embeddings": 4096}}
    config = small_config(rope_parameters=rope(**given))
    with pytest.raises(NotImplementedError) as raised:
        v4.PagedCache(config, max_batch_size=1, max_cache_len=64, kv="fp32")
    start = f"PagedCache: config.rope_parameters['{label}'] must {rule}, got "
    assert str(raised.value).startswith(start)
    assert str(raised.value).endswith("Other rotary embeddings are unknown to this version.")


@pytest.mark.parametrize(
    "given",
    [
        {"compress": {"original_max_position_embeddings": 3}},  # the ramp ends before pair 0
        {"main": {"rope_theta": 100.0}, "compress": {"rope_type": "default"}},
    ],
)
def test_logits_are_hugging_faces(given):
    model, tokens = small_model(rope_parameters=rope(**given)), text()[:1, :LENGTH]
    want = model(tokens).logits
    v4.patch(model, kv="fp32", precision="reference")
    got = model(tokens, cache=new_cache(model, max_batch_size=1, max_cache_len=LENGTH)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=3e-5)


def test_buffers_that_are_not_the_configurations():
    """A user changed the model, or its configuration, after the model was made."""
    model = small_model()
    model.config.rope_parameters["main"]["rope_theta"] = 20000.0
    name = "patch: model.layers.1.self_attn.compressor.rotary_emb must be that of config"
    with pytest.raises(ValueError, match=f"^{name}.*got {{'frequency of pair 1': 0.74989"):
        v4.patch(model)
    model = small_model()
    model.model.layers[1].self_attn.compressor.indexer.rotary_emb.compress_inv_freq *= 0.5
    name = r"model.layers.1.self_attn.compressor.indexer.rotary_emb must be that of"
    with pytest.raises(ValueError, match=name):
        v4.patch(model)
    for dtype in (torch.bfloat16, torch.float16):  # this casts buffers, too
        v4.patch(small_model().to(dtype))
