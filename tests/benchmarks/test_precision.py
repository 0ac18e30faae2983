"""``bench precision``: its model, its text, what it compares, and a short run."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from benchmarks import precision
from benchmarks.cases import trained_model as training
from benchmarks.run import main
from dsv4_ops.testing.models import small_model


def test_the_held_out_text_is_never_read():
    text = training.manual()
    assert 8 * len(text.held_out) < len(text.train)
    windows = text.windows(4, 705)
    assert windows.shape == (4, 705)
    assert len({tuple(window.tolist()) for window in windows}) == 4
    read = bytes(text.train.tolist())
    assert not any(bytes(window.tolist()) in read for window in windows)
    assert text == text
    assert len(text.hash) == 16


def test_losses_by_frequency_are_those_of_the_text():
    """Of a text of two bytes in turns each comes half of the time, and always behind the other;
    what is added to every count is in the figures too."""
    text = training.Text(torch.tensor([65, 66] * 5000), torch.tensor([65, 66] * 50), "")
    assert training.bigram_loss(text) == pytest.approx(0, abs=0.01)


def test_training_learns_and_is_the_same_again():
    text = training.Text(torch.tensor([65, 66, 67, 68] * 100), torch.tensor([65, 66] * 50), "")
    losses: list[list[float]] = [[], []]
    for found in losses:
        before = torch.random.get_rng_state()
        model, last = training.trained_model(
            text,
            [training.Stage(10, 1, 16)],
            report=lambda _, loss, found=found: found.append(loss),
        )
        assert torch.equal(torch.random.get_rng_state(), before)
        assert last == found[-1]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 1
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


def test_what_is_compared():
    expected = torch.tensor([[[0.0, 2.0], [0.0, -2.0]]], dtype=torch.float64)
    same = precision.compare(expected, expected)
    assert (same["rms_pct"], same["max_std"], same["argmax_pct"]) == (0, 0, 100)
    assert same["kl_millinats"] == pytest.approx(0, abs=1e-12)
    other = precision.compare(torch.tensor([[[0.0, 2.0], [0.0, 2.0]]]).double(), expected)
    deviation = float(torch.tensor([0.0, 2.0, 0.0, -2.0]).double().std())
    assert other["rms_pct"] == pytest.approx(100 * 2 / deviation)  # one value of four, by 4
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


def test_smoke_leaves_rows_of_both_models_and_paths(tmp_path, capsys):
    arguments = ["precision", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "held-out text" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "precision.jsonl").read_text().splitlines()]
    assert [(row["model"], row["runs"], row["case"]) for row in rows] == [
        (model, runs, case)
        for model in ("random", "trained")
        for runs in ("Hugging Face", "patched")
        for case in ("prefill", "decode")
    ]
    assert {row["error"] for row in rows} == {None}
    assert all(0 < row["median_pct"] <= 30 for row in rows)
    assert all(row["argmax_pct"] > 50 for row in rows)
    fp8 = [row for row in rows if row["kv"] == "fp8"]
    assert {(row["weights"], row["precision"]) for row in fp8} == {("bf16", "serve")}
    assert [row["perplexity_pct"] is None for row in rows] == [True] * 4 + [False] * 4
    assert rows[0]["transformers"]


def test_a_mode_that_fails_says_so():
    model = precision.round_weights(small_model())
    sizes = precision._Sizes(requests=1, prefill=2, decode=1)
    judge = precision._Judge(
        model, torch.ones(1, 4, dtype=torch.int64), sizes,
        {"model": "random", "text": "", "bigram_loss": 0.0},
    )  # fmt: skip
    rows = list(judge.rows(model, ("patched", "fp32", "int3", "serve")))
    assert [row.error[:10] for row in rows] == ["ValueError", "ValueError"]
    rows = list(judge.rows(model, ("patched", "fp32", "fp32", "reference")))
    assert [row.error for row in rows] == [None, None]
    assert max(row.max_std for row in rows) < 1e-4  # nothing of the failed mode is left
    assert main(["precision", "--models", "mine"]) == 2
