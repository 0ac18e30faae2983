"""A benchmark checks before it times, leaves whole files, survives missing extras and baselines."""

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks import metadata, sparse_mla
from benchmarks.harness import report, timing
from benchmarks.harness.batches import draw_batch, input_bytes, mixed_lengths
from benchmarks.harness.rows import MetadataRow
from benchmarks.metadata import Case, eager_builder, make_plan
from benchmarks.run import WrongResult, _parser, main
from dsv4_ops.attention.metadata import AttentionSpec

CPU = torch.device("cpu")
SPEC = AttentionSpec.deepseek_v4_flash(max_model_len=4096)
STAMP = {
    "device",
    "threads",
    "torch",
    "triton",
    "transformers",
    "python",
    "dsv4_ops",
    "commit",
    "sources",
    "date",
    "command",
}


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the eager builder in for the compiled one, so that a run takes a second."""
    monkeypatch.setattr(metadata, "compiled_builder", lambda spec, mode=None: eager_builder(spec))


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["--out", "/home/me/out", "--smoke"], ["--smoke"]),
        (["--out=/home/me/out", "--smoke"], ["--smoke"]),
        (["--smoke", "--ou", "/home/me/out"], ["--smoke"]),
        (["--baseline", "/home/me/.anchor", "--smoke"], ["--baseline", ".anchor", "--smoke"]),
        (["--base=x/.anchor/"], ["--baseline", ".anchor"]),
        (["--cases", "decode", "--max-seconds", "9"], ["--cases", "decode", "--max-seconds", "9"]),
    ],
)
def test_rows_do_not_say_where_files_are(monkeypatch, arguments, recorded):
    seen = []
    monkeypatch.setattr(sparse_mla, "run", seen.append)
    assert main(["sparse_mla", *arguments]) == 0
    expected = ["python -m benchmarks sparse_mla", *recorded]
    assert [options.command for options in seen] == [" ".join(expected)]


def smoke(folder, *more):
    return main(
        ["metadata", "--smoke", "--requests", "2", "--next-n", "1", "--out", str(folder), *more]
    )


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_smoke_leaves_table_rows_and_plot(tmp_path, capsys):
    assert main(["metadata", "--smoke", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path)
    schema = {field.name for field in dataclasses.fields(MetadataRow)} | STAMP
    assert all(set(row) == schema for row in rows)
    grid = [(row["requests"], row["next_n"]) for row in rows if row["kind"] == "grid"]
    assert grid == [(1, 1), (8, 1), (1, 2), (8, 2)]
    assert [row["context"] for row in rows if row["kind"] == "context"] == ["1024", "16384"]
    for row in rows:
        assert row["tokens"] == row["requests"] * row["next_n"]
        assert row["call_us"] > 0
        assert row["eager_us"] > 0
        assert row["eager_speedup"] == pytest.approx(row["eager_us"] / row["call_us"])
        assert row["command"] == "python -m benchmarks metadata --smoke"
        assert row["device_us"] is row["baseline_error"] is None
    text = (tmp_path / "metadata.txt").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "eager_speedup" in text
    assert "baseline" not in text
    assert (tmp_path / "metadata.png").read_bytes().startswith(b"\x89PNG")


def corrupted(field):
    def builder(spec, mode=None):
        build = eager_builder(spec)

        def wrong(*tensors):
            result = build(*tensors)
            getattr(result, field).view(-1)[-1] += 1
            return result

        return wrong

    return builder


@pytest.mark.parametrize("field", ["c128_indices", "positions", "c4_slot_mapping"])
def test_a_wrong_entry_ends_the_run_before_timing(field, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metadata, "compiled_builder", corrupted(field))
    monkeypatch.setattr(metadata, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    assert smoke(tmp_path) == 1
    assert f"{field} differs from the reference in 1 of" in capsys.readouterr().err
    assert rows_of(tmp_path) == []
    assert not (tmp_path / "metadata.txt").exists()


def test_a_wrong_dtype_is_a_wrong_result():
    result = eager_builder(SPEC)(
        *draw_batch(SPEC, torch.tensor([9]), next_n=1, device=CPU, seed=0).arguments()
    )
    other = dataclasses.replace(result, c4_lens=result.c4_lens.long())
    with pytest.raises(
        WrongResult, match=r"c4_lens is torch.int64 \[1\], the reference has torch.int32"
    ):
        metadata.check("compiled", other, result, Case(1, 1))


def test_an_unknown_benchmark_is_an_error(capsys):
    assert main(["metadatum"]) == 2
    assert "invalid choice: 'metadatum' (choose from" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize(
    "arguments", [["--requests", "0"], ["--requests", "x"], ["--device", "tpu"]]
)
def test_bad_arguments_are_errors(arguments, capsys):
    assert main(["metadata", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_too_short_a_context_is_an_error(tmp_path, capsys):
    assert smoke(tmp_path, "--next-n", "4", "--context", "3") == 2
    assert "--context 3 is shorter than --next-n 4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error(tmp_path, capsys):
    assert smoke(tmp_path, "--device", "cuda") == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("uncompiled")
def test_without_extras_table_and_rows_are_left(tmp_path, monkeypatch, capsys):
    for extra in ("matplotlib", "tqdm"):
        monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert smoke(tmp_path) == 0
    assert "no plot: pip install 'dsv4_ops[bench]'" in capsys.readouterr().err
    assert len(rows_of(tmp_path)) == 3
    assert (tmp_path / "metadata.txt").exists()
    assert not (tmp_path / "metadata.png").exists()


@pytest.mark.usefixtures("uncompiled")
def test_no_plot_is_obeyed(tmp_path, capsys):
    assert smoke(tmp_path, "--no-plot") == 0
    assert not (tmp_path / "metadata.png").exists()
    assert "no plot" not in capsys.readouterr().err


@pytest.mark.usefixtures("uncompiled")
def test_a_missing_baseline_is_a_row_not_the_end(tmp_path):
    assert smoke(tmp_path, "--baseline", str(tmp_path / "nowhere"), "--no-plot") == 0
    assert all(
        "FileNotFoundError: no anchor_lib.py in" in row["baseline_error"]
        for row in rows_of(tmp_path)
    )
    assert "baseline_error" in (tmp_path / "metadata.txt").read_text()


@pytest.mark.usefixtures("uncompiled")
def test_a_failing_baseline_is_a_row_not_the_end(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(metadata.vllm_metadata, "load", lambda folder: object())
    monkeypatch.setattr(metadata.vllm_metadata, "measure", fail)
    assert smoke(tmp_path, "--baseline", str(tmp_path), "--no-plot") == 0
    assert {row["baseline_error"] for row in rows_of(tmp_path)} == {"RuntimeError: no driver"}


class FakeCapture:
    """Stands in for a CUDA graph where there is no GPU: a replay overwrites the outputs."""

    def __init__(self, calls):
        self.calls, self.outputs, self.graph = calls, [call() for call in calls], self

    def replay(self):
        for call, output in zip(self.calls, self.outputs, strict=True):
            for new, old in zip(vars(call()).values(), vars(output).values(), strict=True):
                old.copy_(new)

    def device_us(self):
        return timing.Timing(4.0, 3.0, 5.0)


@pytest.fixture
def pretend_cuda(monkeypatch, uncompiled):
    """The flow of a CUDA case with clocks that always show the same."""
    monkeypatch.setattr(metadata, "Capture", FakeCapture)
    monkeypatch.setattr(metadata, "rotating_sets", lambda *_: 3)
    monkeypatch.setattr(metadata, "host_us", lambda call: timing.Timing(6.0, 5.0, 7.0))
    monkeypatch.setattr(
        metadata, "device_activities", lambda call: [timing.Activity("triton_poi", 2.0)] * 2
    )
    monkeypatch.setattr(metadata.vllm_metadata, "measure", lambda *_: baselines_result())
    plan = dataclasses.replace(make_plan(options_of(4096)), cases=(Case(2, 2),))
    bench = metadata.Bench(plan, None)
    bench.cuda, bench.modules = True, object()
    bench.captured = eager_builder(plan.spec)
    return bench


def baselines_result():
    device, host = timing.Timing(30.0, 29.0, 31.0), timing.Timing(170.0, 160.0, 180.0)
    return metadata.vllm_metadata.BaselineResult(device, host, [timing.Activity("swa", 2.0)] * 12)


def options_of(max_model_len):
    options = [
        "--smoke",
        "--requests",
        "1,128",
        "--next-n",
        "1",
        "--max-model-len",
        str(max_model_len),
    ]
    return _parser().parse_args(["metadata", *options])


def test_a_cuda_row_adds_up(pretend_cuda):
    row = pretend_cuda.measure(Case(2, 2))
    assert (row.kernels, row.call_kernels, row.input_sets) == (2, 2, 3)
    assert (row.device_us, row.host_us, row.call_us) == (4.0, 6.0, 6.0)
    assert row.pct_of_roofline == pytest.approx(100 * row.roofline_us / 4.0)
    assert (row.baseline_kernels, row.baseline_exact, row.baseline_error) == (12, True, None)
    assert row.speedup == pytest.approx(20.0)
    json.dumps(dataclasses.asdict(row))


def test_a_replay_that_writes_nothing_is_wrong(pretend_cuda, monkeypatch):
    monkeypatch.setattr(FakeCapture, "replay", lambda self: None)
    with pytest.raises(WrongResult, match="CUDA graph replay"):
        pretend_cuda.measure(Case(2, 2))


def test_batches_are_legal_and_mixed():
    lengths = mixed_lengths(500, longest=4096, generator=torch.Generator().manual_seed(1))
    assert lengths.min() >= 100
    assert lengths.max() <= 4096
    assert (
        400 < lengths.float().median() < 1000
    )  # log-uniform: the geometric mean of 100 and 4096 is 640
    batch = draw_batch(SPEC, lengths, next_n=2, device=CPU, seed=1)
    built = eager_builder(SPEC)(*batch.arguments())
    assert torch.equal(built.positions, batch.positions)
    newest = built.swa_indices.gather(1, built.swa_lens[:, None].long() - 1)[:, 0]
    assert torch.equal(newest.long(), batch.slot_mapping)  # a token is the newest key of its window
    for table in (batch.block_tables.swa, batch.block_tables.c4, batch.block_tables.c128):
        assert table.unique().numel() == table.numel()


def test_needed_bytes_by_hand():
    batch = draw_batch(SPEC, torch.tensor([1024, 130]), next_n=1, device=CPU, seed=0)
    # windows: positions 896..1023 on blocks 14, 15; positions 2..129 on blocks 0, 1, 2
    # dense rows: 8 and 1 of 2 a block; position 1023 completes a C4 and a C128 row
    page_ids = (2 + 3) + (4 + 1) + 2
    assert input_bytes(SPEC, batch) == 3 * 4 + 2 * 4 + 2 * 8 + page_ids * 4


def test_the_batch_that_is_compiled_first_has_distinct_sizes():
    for max_model_len in (8192, 16384, 32768, 65536):
        case = metadata._distinct_sizes(make_plan(options_of(max_model_len)))
        sizes = [
            case.requests,
            case.requests + 1,
            2 * case.requests,
            max_model_len // 64,
            max_model_len // 256,
        ]
        assert len(set(sizes)) == 5


def test_a_summary_is_median_and_spread():
    assert timing.summary([5, 1, 4, 2, 3, 100]) == (3.5, 2, 5)


def test_an_error_is_one_line_that_says_something():
    assert report.one_line(ValueError("first\nsecond")) == "ValueError: first"
    raised = RuntimeError("backend='inductor' raised:\nOutOfMemoryError: too large\nmore")
    said = "RuntimeError: backend='inductor' raised: OutOfMemoryError: too large"
    assert report.one_line(raised) == said
    assert report.one_line(RuntimeError("")) == "RuntimeError: "


def test_a_table_is_aligned_and_drops_empty_columns():
    rows = [
        MetadataRow(kind="grid", requests=1, next_n=2, context="mixed", tokens=2, call_us=1.5),
        MetadataRow(kind="grid", requests=16, next_n=2, context="mixed", tokens=32, call_us=1234.5),
    ]
    assert report.table(rows, ("requests", "kernels", "call_us")) == (
        "requests  call_us\n       1     1.50\n      16     1234"
    )
