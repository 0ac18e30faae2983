"""Steps of whole models: the filled cache equals that of a real prefill; rows and kernel names."""

import functools
import json

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

import transformers

from benchmarks import model as model_bench
from benchmarks.baselines.stock_model import filled_cache, flash_shaped, same_again
from benchmarks.harness.steps import fill, step_batch
from benchmarks.run import main
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.generation import decoding
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.released_model import keep_float32

SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 250}
SMALL |= {"num_attention_heads": 4, "o_groups": 2, "index_n_heads": 16}
SMALL |= {"q_lora_rank": 32, "o_lora_rank": 16}


def shapes(cache):
    """Return the shapes of all tensors of every layer's cache, and its other values."""
    found = []
    for layer in cache.layers:
        for name, value in vars(layer).items():
            entries = value if isinstance(value, dict) else {"": value}
            for entry, kept in entries.items():
                shown = tuple(kept.shape) if isinstance(kept, torch.Tensor) else kept
                if not isinstance(kept, (torch.dtype, torch.device)):
                    found.append((type(layer).__name__, name, entry, shown))
    return sorted(found, key=str)


def test_the_filled_cache_is_as_a_prefill_leaves_it():
    model = small_model()
    cache = transformers.DynamicCache(config=model.config)
    model(torch.arange(256).repeat(2, 1), cache=cache, use_cache=True)
    assert shapes(filled_cache(model, batch=2, context=256)) == shapes(cache)


def test_a_step_leaves_the_cache_that_was_copied():
    model = small_model()
    cache = filled_cache(model, batch=2, context=256)
    before, token = shapes(cache), torch.zeros(2, 1, dtype=torch.int64)
    logits = [model(token, cache=same_again(cache), use_cache=True).logits for _ in range(2)]
    assert torch.equal(*logits)
    assert shapes(cache) == before
    model(token, cache=cache, use_cache=True)
    assert shapes(cache) != before


def test_one_row_is_measured():
    model = flash_shaped(num_experts=8, device=torch.device("cpu"), **SMALL)
    kept = set(model._keep_in_fp32_modules_strict)  # transformers 5.24 makes these in float32
    products = [w for name, w in model.named_parameters() if kept.isdisjoint(name.split("."))]
    assert {weight.dtype for weight in products} == {torch.bfloat16}
    row = model_bench._row(model, 2, 256)
    model_bench._measure_stock(row, model)
    assert row.stock_error is None
    assert row.stock_ms > 0
    assert str(row) == "2 x 256 tokens"
    v4.patch(keep_float32(model))
    assert model.model.layers[0].self_attn.sinks.dtype == torch.float32
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=300, max_chunk=64)
    fill(cache)
    cache.seq_lens.fill_(256)
    batch = step_batch([1] * 2, [257] * 2, model.device)
    logits = v4.decode_step(model, batch, cache.tensors)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


@pytest.mark.slow
def test_a_run_has_a_row(smoke, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    status, rows = smoke("model", "--batches", "2", "--contexts", "256", "--stock-compiled")
    assert status == 0
    (row,) = rows
    assert row["error"] is row["stock_error"] is None
    assert min(row[name] for name in ("stock_ms", "stock_compiled_ms", "eager_ms", "step_ms")) > 0
    assert row["max_diff"] == 0


def test_a_run_in_released_precision_has_a_row(smoke, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    sizes = ["--batches", "2", "--contexts", "256", "--experts", "8"]
    assert smoke("model", *sizes, "--precision", "released")[0] == 0
    (row,) = map(json.loads, (tmp_path / "model_released.jsonl").read_text().splitlines())
    assert row["error"] is row["stock_ms"] is None
    assert row["step_ms"] > 0


def test_dense_models_have_rows_of_steps(smoke, monkeypatch):
    compile_nothing = functools.wraps(torch.compile)(lambda function, **_: function)
    monkeypatch.setattr(torch, "compile", compile_nothing)
    status, rows = smoke("mla_model", "--contexts", "64,128", "--batches", "2")
    assert status == 0
    steps, first = rows[1:5], rows[5:]
    assert [(row["case"], row["context"]) for row in rows[:5]] == [
        ("memory", 256), ("decode", 64), ("decode", 128), ("selected", 64), ("selected", 128),
    ]  # fmt: skip
    assert all(row["stock_ms"] > 0 and row["step_ms"] > 0 for row in steps)
    assert [(row["batch"], row["tokens"]) for row in first] == [(1, 16), (4, 16)] * 2
    assert all(row["context_ms"] > 0 and row["step_ms"] > 0 for row in first)
    # steps of so few tokens are the same with and without contexts
    assert all(row["error"] < 1e-3 for row in first)


def test_clients_stream_from_a_server(smoke):
    for package in ("fastapi", "uvicorn", "pydantic", "openai"):
        pytest.importorskip(package, reason="needs the extra serve")
    status, (row,) = smoke(
        "serve", "--layers", "2", "--clients", "2", "--prompt", "9", "--new", "3"
    )
    assert (status, row["requests"], row["context"], row["graphs"]) == (0, 2, 9, False)
    assert all(row[name] > 0 for name in ("start_s", "first_ms", "token_ms", "tokens_per_s"))


def test_a_start_has_a_row_of_every_phase(monkeypatch, capsys):
    """The steps run in this process and are not compiled."""
    monkeypatch.setattr(v4, "compile_step", lambda model, step, **_: functools.partial(step, model))
    sizes = ["--layers", "3", "--prefills", "9", "--batches", "2"]
    assert main(["start", "--smoke", "--child", "cold", *sizes]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["phase"] for row in rows] == ["build and patch", "prefill of 9", "decode of 2"]
    assert all(row["start"] == "cold" and row["seconds"] > 0 for row in rows)
    eager = lambda model, *_: functools.partial(v4.decode_step, model)  # noqa: E731
    monkeypatch.setattr(decoding, "_compiled", eager)
    assert main(["start", "--smoke", "--child", "cold", *sizes, "--generate", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["phase"] for row in rows[1:]] == ["generate of 2", "generate of 2 again"]
