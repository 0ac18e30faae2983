"""The demo's model and its text."""

import sys
from itertools import islice

import pytest
import torch
from hypothesis import given, strategies as st

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.testing import models, text
from examples.demo.run import main

LM_HEAD = [0.14174489676952362, 0.026493901386857033, -0.1491500437259674]
SINKS = [5.1950483322143555, 4.153304576873779, 6.6722941398620605, 2.263639450073242]
EXPERTS = [[6, 5], [5, 4], [6, 3]]
NEUTRAL_ONE = ("scale", "norm.weight")
REDRAWN = (
    *("sinks", "position_bias", "correction_bias", "norm.weight", "tid2eid"),
    *("hc.base", "hc.scale", "hc.fn", "hc_base", "hc_scale", "hc_fn"),
    "indexer.q_b_proj.weight",
)


@pytest.fixture(scope="module")
def small():
    return models.small_model(eos_token_id=None)


@torch.no_grad()
def logits_of(small, num_tokens=150, last=20):
    ids = torch.tensor(text.prompts(1, num_tokens))
    return small(ids, use_cache=False).logits[:, -last:]


def test_the_small_model_has_all_types_of_layers_with_the_released_sizes(small):
    config = small.config
    assert config.layer_types == [models.SLIDING, models.SPARSE, models.HEAVY]
    assert config.mlp_layer_types == ["hash_moe", "moe", "moe"]
    assert config.compress_rates == {models.SPARSE: 4, models.HEAVY: 128}
    sizes = (config.sliding_window, config.head_dim, config.qk_rope_head_dim, config.index_head_dim)
    assert sizes == (128, 512, 64, 128)
    ropes = config.rope_parameters
    assert ropes["main"]["rope_type"] == "default"
    assert {**models.YARN, "attention_factor": 1.0}.items() <= ropes["compress"].items()
    assert ropes["compress"]["rope_theta"] == 160000
    assert config.vocab_size == text.VOCAB_SIZE
    assert not small.training


def test_layers_repeat_the_three_types_and_fields_can_be_replaced():
    config = models.small_config(num_hidden_layers=5, index_topk=7)
    assert config.layer_types == [*models.LAYER_TYPES, models.SLIDING, models.SPARSE]
    assert config.index_topk == 7
    assert models.small_config(layer_types=[models.HEAVY]).num_hidden_layers == 1


@pytest.mark.parametrize("make", [models.small_mla_config, models.small_mla_model])
@pytest.mark.parametrize("version", [1, 4])
def test_small_models_of_dense_mla_are_v2_and_v3(make, version):
    with pytest.raises(ValueError, match=f"^{make.__name__}: version must be 2 or 3, got"):
        make(version)


@pytest.mark.parametrize("make", [models.small_dsa_config, models.small_dsa_model])
def test_small_models_of_sparse_attention_are_v32_and_glm(make):
    with pytest.raises(ValueError, match=f"^{make.__name__}: family must be 'V3.2' or 'GLM-5'"):
        make("V3")


def test_logits_spread_by_about_one(small):
    logits = logits_of(small)
    assert 0.8 < logits.std() < 1.25
    assert logits.std(-1).min() > 0.5


def test_whatever_hugging_face_leaves_neutral_shows_in_the_logits(small):
    """If one of these weights has the value of Hugging Face's initialisation, the logits change."""
    expected, tested = logits_of(small), 0
    for name, weight in small.state_dict().items():
        if name.endswith(REDRAWN):
            sampled = weight.clone()
            weight.fill_(1 if name.endswith(NEUTRAL_ONE) else 0)
            change = (logits_of(small) - expected).square().mean().sqrt()
            weight.copy_(sampled)
            assert change > 0.005, name
            tested += 1
    assert tested > 40
    assert torch.equal(logits_of(small), expected)


def test_biases_and_sinks_differ_from_head_to_head_and_expert_to_expert(small):
    for name, weight in small.state_dict().items():
        if name.endswith(("sinks", "correction_bias")):
            assert weight.float().std() > 0.1, name


def test_hash_routing_sends_a_token_to_different_experts_and_uses_all(small):
    table = small.model.layers[0].mlp.gate.tid2eid
    assert table.shape == (260, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.flatten().tolist()) == set(range(8))


def test_a_seed_decides_the_weights_and_other_layers_do_not_change_them(small):
    state = small.state_dict()
    again = models.small_model().state_dict()
    more = models.small_model(num_hidden_layers=4).state_dict()
    other = models.small_model(seed=1).state_dict()
    for name, weight in state.items():
        assert torch.equal(weight, again[name]), name
        assert torch.equal(weight, more[name]), name
        assert not torch.equal(weight, other[name]), name


def test_weights_have_the_same_bits_on_every_machine(small):
    """Uniform samples are products of integers, so their bits do not depend on the machine."""
    state = small.state_dict()
    assert state["lm_head.weight"][0, :3].tolist() == LM_HEAD
    assert state["model.layers.0.self_attn.sinks"].tolist() == SINKS
    assert state["model.layers.0.mlp.gate.tid2eid"][:3].tolist() == EXPERTS


def test_dtypes_are_those_that_from_pretrained_gives(small, tmp_path):
    small.save_pretrained(tmp_path)
    loaded = type(small).from_pretrained(tmp_path, dtype=torch.bfloat16)
    made = models.small_model(dtype=torch.bfloat16)
    expected = {name: weight.dtype for name, weight in loaded.state_dict().items()}
    assert {name: weight.dtype for name, weight in made.state_dict().items()} == expected
    assert set(expected.values()) == {torch.bfloat16, torch.float32, torch.int64}
    assert made.model.rotary_emb.compress_inv_freq.dtype == torch.float32


def test_without_transformers_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[transformers\]'"):
        models.small_model()
    assert main([]) == 2
    assert ".[transformers]" in capsys.readouterr().err


@given(st.text(), st.booleans())
def test_text_survives_the_tokenizer(words, bos):
    tokenizer = text.ByteTokenizer()
    tokens = tokenizer.encode(words, bos=bos)
    assert tokenizer.decode([*tokens, text.EOS, text.PAD]) == words
    assert len(tokens) == bos + len(words.encode())
    assert all(0 <= token < text.VOCAB_SIZE for token in tokens)


@given(st.lists(st.integers(0, text.VOCAB_SIZE - 1)))
def test_any_tokens_of_the_vocabulary_decode(tokens):
    assert isinstance(text.ByteTokenizer().decode(tokens), str)


@pytest.mark.parametrize("token", [-1, 260, 2**63])
def test_other_tokens_are_refused(token):
    with pytest.raises(ValueError, match=r"tokens must be 0 to 259, got -?\d+\. Pass ids"):
        text.ByteTokenizer().decode([65, token])


def test_text_is_real_the_same_every_time_and_a_prefix_of_more():
    longest = text.real_text(20000)
    assert longest.startswith("The Zen of Python, by Tim Peters")
    assert longest.isascii()
    assert len(set(longest.split())) > 500
    for size in (0, 1, 40, 856, 857, 5000):
        assert text.real_text(size) == longest[:size]


def test_a_python_without_documentation_repeats_what_it_has(monkeypatch):
    monkeypatch.setattr(text, "_sources", lambda: islice(["Now.\n"], 1))
    assert text.real_text(12) == "Now.\nNow.\nNo"
    monkeypatch.setattr(text, "_sources", lambda: iter(()))
    assert len(text.real_text(500)) == 500


def test_prompts_are_of_one_length_and_differ():
    found = text.prompts(4, 90)
    assert [len(prompt) for prompt in found] == [90] * 4
    assert len({tuple(prompt) for prompt in found}) == 4
    assert {prompt[0] for prompt in found} == {text.BOS}
