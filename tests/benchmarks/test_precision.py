"""``python -m benchmarks precision``: its models, its comparisons, and a short run."""

import math

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from benchmarks import precision
from dsv4_ops.testing.models import small_model


def test_what_is_compared():
    expected = torch.tensor([[[0.0, 2.0], [0.0, -2.0]]], dtype=torch.float64)
    same = precision.compare(expected, expected)
    assert (same["rms_pct"], same["max_std"], same["argmax_pct"]) == (0, 0, 100)
    assert same["kl_millinats"] == pytest.approx(0, abs=1e-12)
    other = precision.compare(torch.tensor([[[0.0, 2.0], [0.0, 2.0]]]).double(), expected)
    deviation = float(torch.tensor([0.0, 2.0, 0.0, -2.0]).double().std())
    assert other["rms_pct"] == pytest.approx(100 * 2 / deviation)  # one value of four is off by 4
    assert other["median_pct"] == 0
    assert other["max_std"] == pytest.approx(4 / deviation)
    assert other["argmax_pct"] == 50
    mean = 0.5 * (1 / (1 + math.exp(-2)) * 2 - 1 / (1 + math.exp(2)) * 2)
    assert other["kl_millinats"] == pytest.approx(1e3 * mean)


def test_both_models_have_the_same_weights():
    wide = precision.round_weights(small_model())
    narrow = precision.in_bfloat16(wide)
    state = narrow.state_dict()
    assert torch.bfloat16 in {weight.dtype for weight in state.values()}
    assert all(torch.equal(weight.float(), state[name].float())
               for name, weight in wide.state_dict().items())  # fmt: skip
    assert wide.model.embed_tokens.weight.dtype == torch.float32
    assert state["model.layers.0.self_attn.sinks"].dtype == torch.float32


def test_a_run_has_rows_of_both_paths(smoke):
    status, rows = smoke("precision", "--threads", "1")
    assert status == 0
    assert [(row["runs"], row["case"]) for row in rows] == [
        (runs, case) for runs in ("Hugging Face", "patched") for case in ("prefill", "decode")
    ]
    assert {row["error"] for row in rows} == {None}
    assert all(0 < row["median_pct"] <= 30 for row in rows)
    assert all(row["argmax_pct"] > 50 for row in rows)
    fp8 = [row for row in rows if row["kv"] == "fp8"]
    assert {(row["weights"], row["precision"]) for row in fp8} == {("bf16", "serve")}
    assert rows[0]["transformers"]
