"""The draft layers of DeepSeek-V3, V3.2 and GLM-5 equal their formula, over whole sequences without
a cache, and drafts do not change the text.

    x[i] = eh_proj([enorm(embed(t[i + 1])), hnorm(h[i])]), embed 0 at i = 0, h normed by the model
    logits = head(norm(Layer(x)))
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.mla_checkpoint import random_model, write_model
from tests.oracles.mtp import normed
from tests.support import v3_checkpoint
from tests.transformers.test_deepseek_v32 import EXACT, ordered_ties, small
from tests.transformers.test_mtp import greedy_text, oracle_drafts, speculate

LAYERS, VOCAB = 2, 3  # few tokens, so that random drafts are sometimes accepted
FAMILIES = ("V3", "V3.2", "GLM-5")


def of_layers(family, layers, **changed):
    """Return a model; if it has more than LAYERS layers, the last one is the draft layer."""
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    sizes = {"num_hidden_layers": layers, "vocab_size": VOCAB, **special, **changed}
    return small(family, **sizes)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    for family in FAMILIES:
        of_layers(family, LAYERS + 1).save_pretrained(folder / family)
        v3_checkpoint.add_draft(folder / family, LAYERS)
    return folder


def drafting(paths, family):
    model = v4.patch(of_layers(family, LAYERS), **EXACT)
    return v4.load_mtp(model, paths / family)


class Oracle:
    """The draft layer as the only layer of a Hugging Face model, which reads embeddings."""

    def __init__(self, path, family):
        files = load_file(path / "model.safetensors")
        self.trunk = of_layers(family, LAYERS)
        self.block = of_layers(family, 1, first_k_dense_replace=0)
        prefix, whole = f"model.layers.{LAYERS}.", of_layers(family, LAYERS + 1).state_dict()
        names = [name for name in whole if name.startswith(prefix)]
        state = {name.replace(prefix, "model.layers.0."): whole[name] for name in names}
        around = (files[f"{prefix}{name}.weight"] for name in v3_checkpoint.AROUND)
        self.eh, self.e, self.h, norm = around
        trunk = self.trunk.state_dict()
        kept = {name: trunk[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
        self.block.load_state_dict({**state, **kept, "model.norm.weight": norm})

    def streams(self, tokens):
        with ordered_ties():
            return self.trunk.model(tokens, use_cache=False).last_hidden_state

    def draft(self, states, following):
        embedded = self.trunk.model.embed_tokens.weight[following].clone()
        embedded[:, 0] = 0
        eps = self.trunk.config.rms_norm_eps
        parts = normed(embedded, self.e, eps), normed(states, self.h, eps)
        x = torch.cat(parts, -1) @ self.eh.mT
        with ordered_ties():
            out = self.block.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return out @ self.trunk.lm_head.weight.mT, out


@pytest.fixture
def text():
    return torch.randint(0, VOCAB, (3, 120), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_greedy_and_drafts_are_those_of_the_formula(paths, family, text):
    """Contexts have fewer and more tokens than the 16 that are selected."""
    model, oracle = drafting(paths, family), Oracle(paths / family, family)
    want, counts = greedy_text(model, text), set()
    for index, (known, found) in enumerate(speculate(model, text, 2)):
        drafts = found.batch.tokens.view(3, -1)
        for request, each in enumerate(known):
            length = min(len(each), len(want[request]))
            assert torch.equal(each[:length], want[request][:length])
            if index % 3 == request:
                assert torch.equal(drafts[request, 1:], oracle_drafts(oracle, each, 2))
        counts |= set(found.num_accepted.tolist()) if index else set()
    assert len(counts) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_formula(paths, family, text, monkeypatch):
    """The first draft after a prompt, in float32."""
    model, oracle = drafting(paths, family), Oracle(paths / family, family)
    ids, seen = text[:1, :60], []
    monkeypatch.setattr(
        type(model.dsv4_ops_spec), "normed", lambda _, __, it, *rest: seen.append(it) or it
    )
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=128, next_n=2)
    ints = [torch.tensor(each, dtype=torch.int32) for each in ([0, 60], [60], [cache.add(0, 64)])]
    found = v4.speculative_prefill(model, v4.StepBatch(ids[0], *ints), cache, num_drafts=1)
    following = torch.cat([ids[:, 1:], found.tokens[:, :1]], 1)
    want, _ = oracle.draft(oracle.streams(ids), following)
    got = model.lm_head(seen[-1])[0, 0]
    torch.testing.assert_close(got, want[0, -1], rtol=0, atol=1e-5)
    assert cache.memory()["draft"] == cache.memory()["latents"] // LAYERS + (
        0 if family == "V3" else 2 * 64 * 128 * 4
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_writes_the_same_text(paths, family, text):
    model = drafting(paths, family)
    ids, mask = text[:2, :40].clone(), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :31] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, num_draft_tokens=2, **settings), want)
    chunks = {"prefill_chunk_size": 16, "num_draft_tokens": 1}
    assert torch.equal(model.generate(ids, **chunks, **settings), want)


def test_a_step_is_one_graph(paths, text):
    model, counter = drafting(paths, "GLM-5"), CompileCounter()
    compiled = torch.compile(v4.speculative_step, backend=counter, fullgraph=True)
    pairs = zip(speculate(model, text, 1), speculate(model, text, 1, compiled), strict=True)
    for (_, want), (_, found) in list(pairs)[:4]:
        assert torch.equal(found.batch.tokens, want.batch.tokens)
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", ["v3", "v32", "glm5"])
def test_fp8_files(family, tmp_path):
    """Draft weights are codes where the model has codes, with the same values."""
    types = {"indexer_types": ["full", "shared", "full"]} if family == "glm5" else {}
    whole = random_model(family, num_hidden_layers=3, **types)
    state = write_model(tmp_path, whole)
    v3_checkpoint.add_draft(tmp_path, LAYERS)
    model = v4.load_mtp(v4.patch(v4.load_quantized(tmp_path), kv="bf16"), tmp_path)
    layer, prefix = model.mtp.layers[0], f"model.layers.{LAYERS}."
    kinds = {str(each.dtype) for each in layer.self_attn.parameters() if each.dim() == 2}
    assert "torch.float8_e4m3fn" in kinds
    assert layer.mlp.experts.down_proj.dtype == torch.float8_e4m3fn
    assert not any(each.is_meta for each in model.mtp.state_dict().values())
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    ids = torch.arange(20)[None] * 7 % 250
    want = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, num_draft_tokens=1, **settings), want)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    dense = v4.load_mtp(v4.patch(type(whole)(config).eval(), kv="bf16"), tmp_path)
    found = dense.mtp.state_dict()
    for name, value in state.items():
        if name.startswith(prefix):
            got = found[f"layers.0.{name.removeprefix(prefix)}"]
            assert torch.equal(got, value.to(got.dtype)), name
    name = f"{prefix}self_attn.o_proj"
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config["quantization_config"]
    kept = quantization.get("modules_to_not_convert", ["lm_head"])
    quantization["modules_to_not_convert"] = [*kept, name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = load_file(tmp_path / "model.safetensors")
    files[f"{name}.weight"] = files[f"{name}.weight"].bfloat16()
    del files[f"{name}.weight_scale_inv"]
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = v4.patch(v4.load_quantized(tmp_path), kv="bf16")
    with pytest.raises(NotImplementedError, match=rf"^load_mtp: {name}.weight must be quantised"):
        v4.load_mtp(plain, tmp_path)


def test_what_cannot_be_loaded_is_refused(paths, tmp_path):
    model = v4.patch(of_layers("V3.2", LAYERS), **EXACT)
    for message, path, changed in (
        ("model_type must be 'deepseek_v32', got 'glm_moe_dsa'", paths / "GLM-5", model),
        ("path must have the model's index_n_heads, 8, got 16", paths / "V3.2",
         v4.patch(of_layers("V3.2", LAYERS, index_n_heads=8), **EXACT)),
        ("path must hold a draft layer, model.layers.1, got no ten", tmp_path / "none", None),
        ("path must hold model.layers.2.self_attn.indexer.wk.weight", tmp_path / "lost", model),
        ("parallel must be None with a draft layer, got ranks", paths / "V3.2", None),
    ):  # fmt: skip
        if path.parent == tmp_path:
            of_layers("V3.2", 1 if path.name == "none" else 3).save_pretrained(path)
            if path.name == "lost":
                v3_checkpoint.add_draft(path, LAYERS)
                files = load_file(path / "model.safetensors")
                del files["model.layers.2.self_attn.indexer.wk.weight"]
                save_file(files, path / "model.safetensors", metadata={"format": "pt"})
            else:
                changed = v4.patch(of_layers("V3.2", 1), **EXACT)
        if changed is None:
            ranks = ContextParallel(group="0", world_size=2)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(ContextParallel, "agree", lambda *_, **__: None)
                changed = v4.patch(of_layers("V3.2", LAYERS), **EXACT, parallel=ranks)
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            v4.load_mtp(changed, path)
        assert str(raised.value).startswith(f"load_mtp: {message}"), raised.value
        assert not hasattr(changed, "mtp")
