"""``bench quality``: its sequences, its training, what it scores, and a short run."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from benchmarks import copying, quality, reading, training
from benchmarks.run import main
from dsv4_ops.checkpoint.format import released_tensors


def sampled(count=6):
    return copying.sequences(count, torch.Generator().manual_seed(0))


def test_a_sequence_ends_as_it_starts_beyond_the_window():
    tokens = sampled()
    assert tokens.shape == (6, 72)
    assert torch.equal(tokens[:, :24], tokens[:, -24:])
    assert not torch.equal(tokens[:, :24], tokens[:, 24:48])
    assert torch.equal(copying.targets(tokens), tokens[:, 1:24])
    assert tokens.min() >= 2
    assert tokens.max() < copying.CONFIG["vocab_size"]
    assert copying.CONFIG["sliding_window"] < 48


def test_scores_of_predictions_by_hand():
    """Targets 0 and 2 of logits (2, 0, 0) and (0, ln 2, 0): right by 2, wrong by ln 2."""
    logits = torch.tensor([[[2.0, 0.0, 0.0], [0.0, math.log(2), 0.0]]])
    correct, nll, margin = quality.judged(logits, torch.tensor([[0, 2]]))
    assert correct.tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(margin, torch.tensor([[2.0, -math.log(2)]]).double())
    wanted = torch.tensor([[math.log(1 + 2 * math.exp(-2)), math.log(4)]]).double()
    torch.testing.assert_close(nll, wanted, rtol=1e-6, atol=0)
    # sequences that differ by 1 and 3 on average: 2 +- 1.96 * sqrt(2) / sqrt(2)
    assert quality.paired(torch.tensor([[0.0, 2.0], [3.0, 3.0]])) == pytest.approx((2, 1.96))


def test_dense_experts_are_those_of_hugging_face():
    module = copying.new_model().model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 128, generator=generator)
    indices = torch.rand(7, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(7, 2, generator=generator)
    with torch.no_grad():
        found = copying.dense_experts(module, hidden, indices, weights)
        torch.testing.assert_close(found, module(hidden, indices, weights))


def test_the_indexer_learns_where_attention_went():
    """Of two rows visible from each target, attention has a quarter and three quarters: the loss is
    the cross entropy, least where scores differ by ln 3."""
    weights = torch.zeros(1, 2, 33, 40 + 2)
    weights[..., -2], weights[..., -1] = 0.125, 0.375  # the rest went to the window
    best = torch.tensor([0.0, math.log(3)]).expand(1, 33, 2)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(copying.indexer_loss(best, weights)) == pytest.approx(entropy)
    assert float(copying.indexer_loss(best.flip(-1), weights)) > entropy + 0.5


def test_training_gives_the_indexer_a_gradient_of_its_own_only():
    recipe = copying.Recipe(steps=1, indexer=2, batch=2)
    without = copying.Recipe(steps=1, indexer=0, batch=2)
    changed, same = copying.train("cpu", recipe), copying.train("cpu", without)
    differing = {
        name
        for (name, left), right in zip(changed.named_parameters(), same.parameters(), strict=True)
        if not torch.equal(left, right)
    }
    assert differing
    assert all(".compressor.indexer." in name for name in differing)


def test_weights_have_the_names_of_released_files(tmp_path):
    wanted = released_tensors(copying.CONFIG, expert_dtype="fp4", scale_dtype="F8_E8M0")
    trunk = {name for name in wanted if not name.endswith(".scale") and not name.startswith("mtp.")}
    assert copying.released_weights(copying.new_model(), tmp_path).keys() == trunk


@pytest.mark.parametrize("name", quality.SELECTIONS)
def test_a_selection_changes_which_rows_are_read(name):
    """Shuffled and opposite keys select others; rounded ones mostly the same."""
    model = copying.new_model()
    indexer = copying.csa_attention(model).compressor.indexer
    indexer.index_topk = 4
    found = []
    hook = indexer.register_forward_hook(lambda module, inputs, output: found.append(output))
    with torch.no_grad():
        model(sampled())
        with quality.changed_scores(model, quality.SELECTIONS[name]):
            model(sampled())
    hook.remove()
    plain, other = (each[:, -copying.SEGMENT :].sort(-1).values for each in found)
    kept = (plain.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).double().mean()
    assert kept > 0.75 if name in ("FP8", "FP4") else kept < 0.5


@pytest.mark.nightly("trains a model: minutes on a GPU, half an hour on two cores")
def test_what_breaks_the_selection_breaks_the_score():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = copying.train(device)
    judge = quality.Judge(quality.copy_task(sampled(96)), device)
    with torch.no_grad():
        rows = {row.selection: row for row in judge.selections(model)}
    best = f"best {quality.SELECTED}"
    whole = rows[best].accuracy_pct
    assert whole > 30  # a random token is right by 1.6 %, one of a row's four by 25
    for name in ("of shuffled keys", "of opposite keys"):
        assert rows[f"{best}, {name}"].accuracy_pct < whole - 10


@pytest.mark.nightly("the parts are checked one by one; the whole takes minutes")
def test_a_short_run_scores_everything(tmp_path, capsys):
    assert main(["quality", "--cases", "copy", "--smoke", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "quality.jsonl").read_text().splitlines()]
    assert len(rows) == 9 + 2 + len(quality.SELECTIONS)
    assert not [row for row in rows if row["error"]]
    assert all(row["targets"] == 6 * 23 for row in rows)
    exact = rows[1]  # patched, in float32 with a float32 cache
    assert exact["changed_pct"] == 0
    assert abs(exact["nll_change"]) < 1e-5
    assert "of opposite keys" in capsys.readouterr().out


def test_a_task_scores_what_it_says():
    """Logits of a position predict the token behind it; every scored one of text has the window and
    more in front of it."""
    tokens = torch.arange(10)[None]
    task = quality.Task({}, tokens, prompt=6, least=7)
    assert task.targets.tolist() == [[7, 8, 9]]
    assert task.scored(tokens[..., None]).flatten().tolist() == [6, 7, 8]
    copy = quality.copy_task(sampled())
    assert torch.equal(copy.targets, copying.targets(copy.tokens))
    assert copy.prompt == 48
    text = quality.text_task(training.manual().windows(3, reading.LENGTH))
    assert text.targets.shape == (3, reading.LENGTH - reading.LEAST)
    assert text.config["sliding_window"] <= reading.LEAST
    assert reading.LENGTH - text.prompt == reading.DECODED
    assert text.config["index_topk"] * 4 >= reading.LENGTH


def test_the_reading_model_has_every_kind_of_layer_and_the_names_of_released_files(tmp_path):
    model = copying.new_model(content=reading.CONFIG)
    assert len(set(model.config.layer_types)) == 3
    wanted = released_tensors(reading.CONFIG, expert_dtype="fp4", scale_dtype="F8_E8M0")
    trunk = {name for name in wanted if not name.endswith(".scale") and not name.startswith("mtp.")}
    assert copying.released_weights(model, tmp_path).keys() == trunk


def test_the_reading_model_learns_and_is_the_same_again():
    text = training.manual()
    losses = []
    made = [
        reading.train(
            "cpu", text, (training.Stage(6, 2, 32),), report=lambda step, loss: losses.append(loss)
        )
        for _ in range(2)
    ]
    assert losses[:6] == losses[6:]
    assert losses[5] < losses[0] - 0.5
    assert all(
        torch.equal(*both) for both in zip(*(each.parameters() for each in made), strict=True)
    )
    assert not any(weight.requires_grad for weight in made[0].parameters())


def test_windows_of_text_were_not_trained_on():
    text = training.manual()
    trained = bytes(text.train.tolist())
    windows = text.windows(quality.WINDOWS, reading.LENGTH)
    assert not [window for window in windows if bytes(window.tolist()) in trained]


@pytest.mark.nightly("the copying model's rows, and a task's parts")
def test_a_short_run_scores_text(tmp_path):
    options = ["quality", "--cases", "text", "--smoke", "--out", str(tmp_path)]
    assert main(options) == 0
    lines = (tmp_path / "quality_text.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 9
    assert not [row for row in rows if row["error"]]
    assert all(row["targets"] == 3 * reading.DECODED for row in rows)
    assert all(row["perplexity"] == pytest.approx(math.exp(row["nll"])) for row in rows)
    assert abs(rows[1]["nll_change"]) < 1e-5  # patched, in float32 with a float32 cache
    assert any(row["nll_change"] != 0 for row in rows[2:])
    assert not (tmp_path / "quality.jsonl").exists()
