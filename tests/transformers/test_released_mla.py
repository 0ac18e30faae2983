"""FP8 files of DeepSeek-V3, R1, V3.2, V2 and GLM-5 are checked before any weight is loaded."""

import json
import re

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

from dsv4_ops.__main__ import main
from dsv4_ops.checkpoint.format import check_checkpoint
from dsv4_ops.checkpoint.mla_format import mla_tensors
from dsv4_ops.integrations import transformers as hf
from dsv4_ops.testing.mla_checkpoint import random_model, save_tensors, write_model
from tests.helpers import NIGHTLY, nightly
from tests.support.mutated import accepts, mutated, restored
from tests.support.v3_checkpoint import dense_model

E4M3 = torch.float8_e4m3fn
ATTENTION = "model.layers.0.self_attn"
FILE = "model.safetensors"


@pytest.fixture(
    scope="module", params=["v3", *nightly("tests with all_versions", "v2", "v32", "glm5")]
)
def released(request, tmp_path_factory):
    """Write a folder; return it and the state of the same model with dequantised values."""
    path = tmp_path_factory.mktemp(request.param)
    return path, write_model(path, random_model(request.param))


all_versions = pytest.mark.parametrize("released", ["v3", "v2", "v32", "glm5"], indirect=True)


@pytest.fixture
def copied(released, tmp_path):
    """Return the folder's tensors and config, and a function that writes changed ones."""
    files = load_file(released[0] / FILE)
    config = json.loads((released[0] / "config.json").read_text())

    def write(shards=1):
        save_tensors(tmp_path, files, shards)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return files, config, write


def refused(path, message, monkeypatch, capsys, kind=ValueError):
    """Check that the command and ``load_quantized`` refuse, before Hugging Face opens a file."""
    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "from_pretrained", None)
        with pytest.raises(kind) as caught:
            hf.load_quantized(path)
    messages = (message,) if isinstance(message, str) else message
    assert any(each in str(caught.value) for each in messages), caught.value
    assert main(["checkpoint", str(path), "--check"]) == 1
    assert capsys.readouterr().err == f"{caught.value}\n"


def test_v3_has_the_tensors_that_its_headers_were_seen_with():
    """Count and bytes are from DeepSeek-V3's headers. Layer 61 has a layer with experts, copies of
    embedding and head, eh_proj and three norms."""
    config = transformers.DeepseekV3Config(num_hidden_layers=62).to_dict()
    found = dict(mla_tensors("test", {**config, "quantization_config": {}}))
    width, vocabulary = 7168, 129280
    draft = [(vocabulary, width)] * 2 + [(width, 2 * width)] + [(width,)] * 3
    assert len(found) + len(draft) == 91_991
    sizes = {"F8_E4M3": 1, "F32 or F8_E8M0": 4, "BF16 or F16 or F32": 2}
    total = sum(2 * torch.Size(shape).numel() for shape in draft)
    for name, info in found.items():
        size = 4 if name.endswith("e_score_correction_bias") else sizes[info.dtype]
        total += size * torch.Size(info.shape).numel()
    assert total == 688_574_839_360
    assert found["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 56)
    assert found["model.layers.2.mlp.down_proj.weight_scale_inv"].shape == (56, 144)


def test_glm_5_has_as_many_tensors_as_its_index():
    """GLM-5.2-FP8 has 118,629. Layer 78 has an indexer, eh_proj and three norms. Indexers are in
    layers 0, 1, 2, 6, 10 and so on, up to 74."""
    indexed = {0, 1, *range(2, 78, 4)}
    types = ["full" if layer in indexed else "shared" for layer in range(78)]
    settings = {"quantization_config": {}, "num_hidden_layers": 78}
    config = {**transformers.GlmMoeDsaConfig().to_dict(), **settings}
    config.pop("indexer_types")
    more = {"num_hidden_layers": 79, "indexer_types": [*types, "full"]}
    found = dict(mla_tensors("test", config | more))
    assert len(found) + 4 == 118_629
    repeated = {**config, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    pattern = {**config, "index_topk_pattern": "".join(each[0].upper() for each in types)}
    want = [name for name in found if not name.startswith("model.layers.78.")]
    for each in (repeated, pattern):
        assert list(dict(mla_tensors("test", each))) == want
    with pytest.raises(ValueError, match=r"config\.indexer_types must be 'full' or 'shared'"):
        next(iter(mla_tensors("test", {**config, "indexer_types": ["full", "other"]})))


@all_versions
@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_checkpoint_is_what_it_says(copied, shards, capsys):
    files, config, write = copied
    path = write(shards)
    kind, size = config["model_type"], sum(value.nbytes for value in files.values())
    want = (len(files), size, "fp8", "F32", "none", False, kind)
    assert check_checkpoint(path, codes=True) == want
    assert main(["checkpoint", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert f"{kind}, {len(files)} tensors" in shown
    assert "Hugging Face takes fp8" not in shown
    assert type(hf.load_quantized(path)).__name__ in config["architectures"]


@all_versions
@pytest.mark.parametrize("tokens", [20, 190])
def test_what_is_loaded_multiplies_by_the_values_of_the_codes(released, tokens):
    """Errors relative to float32 are those of equal values in bf16; short prompts are absorbed."""
    path, _ = released
    ids = torch.arange(tokens)[None] * 7 % 250
    exact = dense_model(*released, torch.float32)(ids).logits.double()
    errors = []
    bf16 = dense_model(*released, torch.bfloat16)
    for model in (hf.load_quantized(path), bf16):
        hf.patch(model, kv="bf16")
        # V3.2 and GLM-5 select the whole prompt, but a cache may have more rows
        cache = hf.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
        found = model(ids, cache=cache).logits.double()
        errors.append((found - exact).norm() / exact.norm())
    assert 0 < errors[0] <= 1.5 * errors[1], errors


@pytest.mark.parametrize("released", ["v32", "glm5"], indirect=True)
def test_projections_of_the_indexer_are_quantised(released):
    """The codes of projections have effect; the head weights are not quantised."""
    path, state = released
    model = hf.patch(hf.load_quantized(path))
    indexer = model.model.layers[0].self_attn.indexer
    for name, layer in (("wk", indexer.wk), ("wq_b", indexer.wq_b)):
        assert layer.weight.dtype == E4M3
        values = state[f"model.layers.0.self_attn.indexer.{name}.weight"].double()
        x = torch.randn(5, values.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        error = (layer(x).double() - x.double() @ values.T).abs()
        assert (error <= 2**-8 * (x.double().abs() @ values.T.abs())).all()
    assert indexer.weights_proj.weight.dtype in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"q_lora_rank": None}, "q_proj"),
        ({"first_k_dense_replace": 0}, "mlp.experts.3.up_proj"),
        ({"n_shared_experts": 2}, "mlp.shared_experts.up_proj"),
    ],
)
def test_other_sizes(tmp_path, changed, expected):
    write_model(tmp_path, random_model(**changed))
    files = load_file(tmp_path / FILE)
    assert any(expected in name for name in files)
    assert check_checkpoint(tmp_path).num_tensors == len(files)
    hf.patch(hf.load_quantized(tmp_path))


def test_a_draft_layer_and_what_is_computed_are_skipped(copied):
    """V3's draft layer comes last, V2 has none; engines also store scales of their caches."""
    files, config, write = copied
    layer = config["num_hidden_layers"]
    for name in ("rotary_emb.inv_freq", "k_scale", "v_scale"):
        files[f"{ATTENTION}.{name}"] = torch.ones(1)
    assert check_checkpoint(write()).draft == "none"
    config["num_nextn_predict_layers"] = 1
    files[f"model.layers.{layer}.eh_proj.weight"] = torch.ones(3)
    assert check_checkpoint(write()).draft == "mtp"
    files[f"model.layers.{layer + 1}.eh_proj.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match="hold no tensor that the config has no place for, got "):
        check_checkpoint(write())


def test_modules_that_are_not_converted(copied):
    files, config, write = copied
    held = config["quantization_config"]
    held["modules_to_not_convert"] = ["lm_head", "o_proj", r"model.layers.1.mlp.shared.*"]
    plain = [name for name in files if re.search(r"o_proj|layers\.1\.mlp\.shared", name)]
    with pytest.raises(ValueError, match=r"o_proj\.weight must be BF16 or F16 or F32"):
        check_checkpoint(write())
    for name in plain:
        if name.endswith("_scale_inv"):
            del files[name]
        else:
            files[name] = files[name].bfloat16()
    path = write()
    check_checkpoint(path)
    model = hf.patch(hf.load_quantized(path))
    assert model.model.layers[1].mlp.shared_experts.up_proj.weight.dtype == torch.bfloat16
    held["modules_to_not_convert"] = ["("]
    with pytest.raises(ValueError, match=r"modules_to_not_convert must be a list of patterns, got"):
        check_checkpoint(write())


@all_versions
def test_every_tensor_is_required_by_name(copied):
    """Norms are required, too; without them, Hugging Face would make random norms."""
    files, _, write = copied
    for name in list(files):
        kept = files.pop(name)
        with pytest.raises(ValueError, match=rf"path must hold {re.escape(name)}, .*no such tens"):
            check_checkpoint(write(), scales=False)
        files[name] = kept
    check_checkpoint(write())


SCALE, CODES = f"{ATTENTION}.o_proj.weight_scale_inv", f"{ATTENTION}.o_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NORM, None, f"path must hold {NORM}, BF16 or F16 or F32 [256], got no such tensor"),
        (SCALE, None, f"path must hold {SCALE}, F32 or F8_E8M0 [2, 2], got no such tensor"),
        (CODES, None, f"path must hold {CODES}, F8_E4M3 [256, 256], got no such tensor"),
        (f"{ATTENTION}.kv_a_proj_with_mqa.weight_scale_inv", lambda held: held.T.contiguous(),
         "must be F32 or F8_E8M0 [5, 2], got F32 [2, 5]. It is transposed"),
        (SCALE, lambda _: torch.ones(4, 2), f"{SCALE} must be F32 or F8_E8M0 [2, 2], got F32 [4"),
        (SCALE, lambda held: held.double(), "must be F32 or F8_E8M0 [2, 2], got F64 [2, 2]"),
        (CODES, lambda held: held.bfloat16(), f"{CODES} must be F8_E4M3 [256, 256], got BF16 ["),
        (NORM, lambda held: held.to(E4M3), "must be BF16 or F16 or F32 [256], got F8_E4M3 [256]"),
        ("model.layers.0.engram.weight", lambda _: torch.ones(1), "the config has no place for"),
        *((SCALE, lambda held, value=value: held.fill_(value), "must hold finite numbers of 0 or")
         for value in (float("nan"), float("inf"), -1.0)),
    ],
)  # fmt: skip
def test_what_is_not_as_released_is_refused(copied, name, change, message, monkeypatch, capsys):
    files, _, write = copied
    held = files.pop(name, None)
    if change is not None:
        files[name] = change(held)
    refused(write(), message, monkeypatch, capsys)


QUANTIZATION = ("quant_method", "weight_block_size", "activation_scheme", "scale_fmt")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_lora_rank", None, "config must have kv_lora_rank, got 1 missing. "),
        ("kv_lora_rank", "512", "config.kv_lora_rank must be an integer of at least 1, got '512'."),
        ("n_routed_experts", 0, "config.n_routed_experts must be an integer of at least 1, got 0."),
        ("n_routed_experts", 10**12,
         "model.layers.1.mlp.gate.weight must be BF16 or F16 or F32 [1000000000000, 256], got"),
        ("num_hidden_layers", 10**12, ("path must hold model.layers.2.input_", "each of 1000000")),
        ("v_head_dim", 64, f"{ATTENTION}.kv_b_proj.weight must be F8_E4M3 [384, 512], got "),
        ("attention_bias", True, "config.attention_bias must be false, got True. "),
        ("num_nextn_predict_layers", "1", "num_nextn_predict_layers must be an integer of at"),
        ("quantization_config", None, "config.quantization_config must say how weights are"),
        ("quant_method", "awq", "quantization_config.quant_method must be 'fp8', got 'awq'. "),
        ("weight_block_size", [64, 128], "weight_block_size must be [128, 128], got [64, 128]. "),
        ("activation_scheme", "static", "activation_scheme must be 'dynamic', got 'static'. "),
        ("scale_fmt", "bytes", "scale_fmt must be one of float, ue8m0, got 'bytes'. "),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused(copied, name, value, message, monkeypatch, capsys):
    _, config, write = copied
    quantization = config["quantization_config"]
    (quantization if name in QUANTIZATION else config)[name] = value
    refused(write(), message, monkeypatch, capsys)


@given(data=st.data())
@settings(max_examples=60 if NIGHTLY else 20, deadline=None)
def test_any_config_and_header_are_accepted_or_refused_clearly(released, data):
    for name in ("config.json", FILE):
        with restored(released[0] / name) as whole:
            start = 8 if name == FILE else 0
            stop = 8 + int.from_bytes(whole[:8], "little") if start else len(whole)
            text = json.dumps(data.draw(mutated(json.loads(whole[start:stop])))).encode()
            size = len(text).to_bytes(8, "little")[:start]
            (released[0] / name).write_bytes(size + text + whole[stop:])
            accepts(check_checkpoint, released[0])


def test_scales_that_bytes_cannot_hold_are_refused(released, tmp_path, monkeypatch, capsys):
    """``scale_fmt="ue8m0"`` stores float32 scales as bytes: 0.75 becomes 1 or 0.5."""
    save_tensors(tmp_path, load_file(released[0] / FILE))
    config = json.loads((released[0] / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "must hold powers of two only, as loaders make bytes of them, got"
    refused(tmp_path, message, monkeypatch, capsys)
    check_checkpoint(tmp_path, scales=False)


@pytest.mark.parametrize("stored", ["F32", "F8_E8M0"])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", "float"])
def test_powers_of_two_are_loaded_exactly(tmp_path, stored, scale_fmt):
    """V3.1's scales are float32 or bytes; Hugging Face keeps either form."""
    state = write_model(tmp_path, random_model(), scale_fmt="ue8m0")
    files = load_file(tmp_path / FILE)
    if stored == "F8_E8M0":
        for name in [name for name in files if name.endswith("_scale_inv")]:
            files[name] = files[name].to(torch.float8_e8m0fnu)
        save_tensors(tmp_path, files)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = scale_fmt
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(tmp_path).scale_dtype == stored
    layer = hf.patch(hf.load_quantized(tmp_path)).model.layers[0].self_attn.o_proj
    wanted = {"ue8m0": torch.float8_e8m0fnu, "float": torch.float32}[scale_fmt]
    assert layer.weight_scale_inv.dtype == wanted
    found = layer(torch.eye(256, dtype=torch.bfloat16)).T
    assert torch.equal(found, state[CODES].bfloat16())


@pytest.mark.parametrize(
    "setting",
    [{"variant": "fp16"}, {"subfolder": "sub"}, {"use_safetensors": False}, {"state_dict": {1: 1}}],
)
def test_settings_that_read_other_files_are_refused(released, setting):
    (name,) = setting
    with pytest.raises(ValueError, match=rf"^load_quantized: {name} must not be given, as path is"):
        hf.load_quantized(released[0], **setting)


def test_a_config_of_another_architecture_is_refused(released):
    with pytest.raises(ValueError, match=r"^load_quantized: config.model_type must be '(deep|glm)"):
        hf.load_quantized(released[0], config=transformers.LlamaConfig())


@pytest.mark.parametrize("name", ["float8_e4m3fn", None])
def test_other_names_of_the_codes_format(copied, name):
    """Loaders do not read this name."""
    files, config, write = copied
    config["quantization_config"]["fmt"] = name
    assert check_checkpoint(write()).num_tensors == len(files)
    config["quantization_config"]["fmt"] = "e5m2"
    with pytest.raises(ValueError, match=r"quantization_config\.fmt must be 'e4m3', got 'e5m2'"):
        check_checkpoint(write())


@all_versions
def test_shared_experts_have_hugging_faces_default(copied):
    """The default is 1 for V3, V3.2 and GLM-5, and 2 for V2, whose files here have 1."""
    _, config, write = copied
    assert config.pop("n_shared_experts") == 1
    if config["model_type"] != "deepseek_v2":
        check_checkpoint(write())
        return
    with pytest.raises(ValueError, match=r"gate_proj.weight must be .* .256, 256., got .* .128"):
        check_checkpoint(write())
