"""Steps of a patched model under Dynamo and torch.export. Examples (``test_examples.py``) and GPU
tests (``tests/gpu/test_model.py``) run Inductor's code."""

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dsv4_ops.core.versions import release, supported
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import HEAVY, small_mla_model, small_model
from tests.helpers import EVERY, SMOKE
from tests.support.hf_models import REQUESTS, Engine, new_cache, reference, text

OLDEST, _ = supported("torch")


@pytest.mark.smoke
@pytest.mark.skipif(not SMOKE, reason="`make smoke` runs it; `make demo` packages a step")
@pytest.mark.parametrize("family", ["v3", "v4"])
def test_inductors_code_of_hugging_faces_form(family):
    """All steps are one graph, because their lengths are on the device, and have Hugging Face's
    logits. The model has all types of layers in `make lanes`, but one in `make smoke`: test_cli.py
    traces all types, and the contract compiles the ops."""
    is_oldest = release(torch.__version__) == release(OLDEST)  # of CI's lanes: it compiles V4
    if not EVERY and (family == "v4") != is_oldest:
        pytest.skip("another lane of CI compiles this family, `make lanes` both")
    one = {"layer_types": [HEAVY], "mlp_layer_types": ["moe"]}
    if family == "v3":
        stock = small_mla_model(num_hidden_layers=2 if EVERY else 1)
    else:
        stock = small_model(**({} if EVERY else one))
    tokens, counter = text()[:, :132], CompileCounterWithBackend("inductor")
    expected = stock(tokens).logits
    model = v4.patch(stock, kv="fp32", precision="reference")
    cache = new_cache(model)
    model(tokens[:, :120], cache=cache)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for place in range(120, 132):  # past the end of a window
        step = slice(place, place + 1)
        logits = compiled(tokens[:, step], cache=cache).logits
        torch.testing.assert_close(logits, expected[:, step], rtol=0, atol=1e-4)
    assert counter.frame_count == 1
    assert cache.seq_lens.tolist() == [132] * REQUESTS


def test_inputs_of_a_package_have_names():
    cache = new_cache()
    batch = Engine(reference(), cache, text()).batch({0: 1})
    names, tensors = v4.input_names(cache), v4.decode_inputs(batch, cache)
    assert len(names) == len(tensors)
    want = ("tokens", "query_start_loc", "seq_lens", "rows", "tables.swa", "tables.compressed")
    assert names[:6] == want
    found = dict(zip(names, tensors, strict=True))
    assert found["dropped"] is cache.tensors.dropped
    assert found["cache.seq_lens"] is cache.seq_lens
    assert found["layers.1.indexer"] is cache.tensors.layers[1].indexer
    assert "layers.0.compressed" not in names
    dense = new_cache(v4.patch(small_mla_model(), kv="fp32", precision="reference"))
    want = ("tables.blocks", "dropped", "cache.seq_lens", "cache.written")
    assert v4.input_names(dense)[4:8] == want


@pytest.mark.parametrize(
    ("export", "changed", "message"),
    [
        ("export_decode", {"path": "decode.so"}, 'path must end in ".pt2", got '),
        ("export_decode", {"path": "missing/step.pt2"}, "path must be in a folder that is there"),
        ("export_decode", {"num_reqs": 0}, "num_reqs must be at least 1, got 0"),
        ("export_decode", {"tokens_per_request": 0}, "tokens_per_request must be at least 1"),
        ("export_prefill", {"path": "prefill"}, 'path must end in ".pt2", got '),
        ("export_prefill", {"num_reqs": 0}, "num_reqs must be at least 1, got 0"),
        ("export_prefill", {"max_tokens": 1}, "max_tokens must be at least 2, got 1"),
    ],
)
def test_errors_of_export(tmp_path, export, changed, message):
    settings = {"path": tmp_path / "step.pt2", **changed}
    with pytest.raises(ValueError, match=f"{export}: {message}"):
        getattr(v4, export)(reference(), new_cache(), **settings)
    with pytest.raises(ValueError, match=f"{export}: model must be patched"):
        getattr(v4, export)(torch.nn.Linear(1, 1), new_cache(), path=tmp_path / "step.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", ["export_decode", "export_prefill"])
def test_exports_of_other_objects(tmp_path, export):
    path, cache = tmp_path / "step.pt2", new_cache()
    for other in (None, cache.tensors):  # only the cache knows some of the package's metadata
        found = type(other).__name__
        with pytest.raises(TypeError, match=f"^{export}: cache must be a PagedCache, got {found}"):
            getattr(v4, export)(reference(), other, path=path)
    for other in (None, 3, b"step.pt2"):
        found = type(other).__name__
        with pytest.raises(TypeError, match=f"^{export}: path must be a str or .*, got {found}"):
            getattr(v4, export)(reference(), cache, path=other)
    assert not list(tmp_path.iterdir())


def test_inputs_of_other_objects():
    cache = new_cache()
    batch = Engine(reference(), cache, text()).batch({0: 1})
    with pytest.raises(TypeError, match=r"^decode_inputs: batch must be a StepBatch, got tuple"):
        v4.decode_inputs((batch,), cache)
    with pytest.raises(TypeError, match=r"^decode_inputs: cache must be a PagedCache, got None"):
        v4.decode_inputs(batch, None)
    with pytest.raises(TypeError, match=r"^input_names: cache must be a PagedCache, got Cache"):
        v4.input_names(cache.tensors)


def test_experts_that_need_python_are_refused(tmp_path, capsys, monkeypatch):
    """A package would be built, but fail when it runs. A terminal shows the phases."""
    model = v4.patch(
        small_model(experts_implementation="grouped_mm", num_hidden_layers=1),
        kv="fp32",
        precision="reference",
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(NotImplementedError, match="must be made of ops that exist without Python"):
        v4.export_decode(model, new_cache(model), path=tmp_path / "decode.pt2")
    assert capsys.readouterr().err == "export_decode: tracing the step\n"
