"""The command line of the benchmarks: its errors, the command in rows, and the printed table."""

import json
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks import sparse_mla
from benchmarks.harness import report
from benchmarks.harness.batches import draw_batch, input_bytes, mixed_lengths
from benchmarks.metadata import builder
from benchmarks.run import BENCHES, main
from dsv4_ops.attention.metadata import AttentionSpec, DecodeMetadata

CPU = torch.device("cpu")
SPEC = AttentionSpec.deepseek_v4_flash(max_model_len=4096)


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


def test_the_help_names_every_benchmark(capsys):
    assert main(["--help"]) == 0
    help = capsys.readouterr().out
    assert all(f"\n    {name}" in help for name in [*BENCHES, "report"])


def test_an_unknown_benchmark_is_an_error(capsys):
    assert main(["metadatum"]) == 2
    assert "invalid choice: 'metadatum' (choose from" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["metadata", "--device", "tpu"],
        ["sparse_mla", "--cases", "decode,x"],
        ["kv_cache", "--cases", ""],
        ["kv_cache", "--max-seconds", "0"],
        ["model", "--batches", "0"],
        ["start", "--layers", "x"],
    ],
)
def test_bad_arguments_are_errors(arguments, capsys):
    assert main(arguments) == 2
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["indexer", "--device", "cuda"], "torch sees no CUDA device"),
        *(([name], f"{name}: it times kernels, which run on CUDA only")
          for name in ("mla", "linear", "experts")),
        (["context_parallel", "--ranks", "1"], "it takes 2 ranks or more with a GPU each, got 1"),
    ],
)  # fmt: skip
def test_what_needs_a_gpu_says_so(arguments, text, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err


def test_no_case_that_matches_is_an_error(tmp_path, capsys):
    assert main(["kv_cache", "--smoke", "--out", str(tmp_path), "--match", "nine"]) == 2
    assert "--match nine: no case has it" in capsys.readouterr().err


# The table

ROW = {
    "case": "decode", "shape": "8 x 64 heads, 128+512", "variant": "", "plotted": True,
    "compiled_us": 15.67, "eager_us": 14.96, "baseline_us": None, "roofline_us": 1.0,
    "activities": [["kernel", 2.0]], "device": "GPU", "date": "2026-11-21T20:00:00",
}  # fmt: skip


def printed(rows, capsys, path, *options):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["report", str(path), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_table_has_the_ratio_and_the_share_of_the_roofline(tmp_path, capsys):
    """The ratio is 31.34 / 15.67, and the share is 1 / 15.67."""
    other = {**ROW, "variant": "C4", "baseline_us": 31.34, "error": "no plan"}
    whole = {**ROW, "variant": "C128", "baseline_us": 20.0, "baseline_whole_us": 156.7}
    assert printed([ROW, other, whole], capsys, tmp_path / "rows.jsonl") == [
        "| case | shape | variant | compiled_us | eager_us | baseline_us | roofline_us |"
        " pct_of_roofline | times_faster | baseline_whole_us |",
        f"| {' | '.join(['---'] * 10)} |",
        "| decode | 8 x 64 heads, 128+512 |  | 15.7 | 15.0 | - | 1.00 | 6.38 % | - | - |",
        "| decode | 8 x 64 heads, 128+512 | C4 | 15.7 | 15.0 | 31.3 | 1.00 | 6.38 % | 2.00 | - |",
        "| decode | 8 x 64 heads, 128+512 | C128 | 15.7 | 15.0 | 20.0 | 1.00 | 6.38 % | 10.0 |"
        " 157 |",
    ]


def test_columns_and_lines_are_chosen(tmp_path, capsys):
    rows = [ROW, {**ROW, "shape": "1 x 64", "kernels": 3, "agrees": True}]
    options = ["--columns", "shape,kernels,agrees,pct_of_roofline", "--match", "^1 x .*6.38"]
    assert printed(rows, capsys, tmp_path / "rows.jsonl", *options) == [
        "| shape | kernels | agrees | pct_of_roofline |",
        "| --- | --- | --- | --- |",
        "| 1 x 64 | 3 | yes | 6.38 % |",
    ]


def test_the_newest_run_of_a_point_is_shown_whichever_is_faster(tmp_path, capsys):
    """The points keep the order in which they first occurred."""
    old = {**ROW, "date": "2026-11-20T00:00:00", "compiled_us": 1.0}
    other = {**ROW, "shape": "another"}
    for rows in ((old, other, ROW), (ROW, other, old)):
        assert report.newest(rows) == [ROW, other]
    lines = printed([old, other, ROW], capsys, tmp_path / "rows.jsonl", "--all")
    assert len(lines) == 2 + 3


@dataclass
class Made:
    case: str = "some"
    us: float | None = 4.0
    note: str | None = None
    error: str | None = None
    spread: list = field(default_factory=list)
    more: dict = field(default_factory=dict)


def test_rows_are_kept_as_they_come_and_texts_are_below_the_table(tmp_path, capsys):
    options = type("Options", (), {"out": tmp_path, "bench": "some", "command": "some command"})
    output = report.Report(options, CPU, copy_tbs=4.2)
    output.add(Made(more={"whole_us": 8.0}))
    output.add(Made(us=None, error="no kernel"))
    written = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert written[0]["whole_us"] == 8.0
    assert "more" not in written[0]
    stamp = {"device", "torch", "triton", "transformers", "sources", "date", "command", "copy_tbs"}
    assert stamp <= set(written[0])
    output.finish("Title", "A note.")
    text = (tmp_path / "some.md").read_text()
    assert capsys.readouterr().out == text
    assert "| some | 4.00 | 8.00 |\n| some | - | - |\n\nerror: no kernel (some)\n\nA note." in text


def test_an_error_is_one_line_that_says_something():
    assert report.one_line(ValueError("first\nsecond")) == "ValueError: first"
    raised = RuntimeError("backend='inductor' raised:\nOutOfMemoryError: too large\nmore")
    said = "RuntimeError: backend='inductor' raised: OutOfMemoryError: too large"
    assert report.one_line(raised) == said
    assert report.one_line(RuntimeError("")) == "RuntimeError: "


def test_batches_are_legal_and_mixed():
    lengths = mixed_lengths(500, longest=4096, generator=torch.Generator().manual_seed(1))
    assert lengths.min() >= 100
    assert lengths.max() <= 4096
    assert 400 < lengths.float().median() < 1000  # log-uniform: the geometric mean is 640
    batch = draw_batch(SPEC, lengths, next_n=2, device=CPU, seed=1)
    built = DecodeMetadata(*builder(SPEC)(*batch.arguments()))
    assert torch.equal(built.positions, batch.positions)
    newest = built.swa_indices.gather(1, built.swa_lens[:, None].long() - 1)[:, 0]
    assert torch.equal(newest.long(), batch.slot_mapping)  # the newest key of its window
    for table in (batch.block_tables.swa, batch.block_tables.c4, batch.block_tables.c128):
        assert table.unique().numel() == table.numel()


def test_needed_bytes_by_hand():
    batch = draw_batch(SPEC, torch.tensor([1024, 130]), next_n=1, device=CPU, seed=0)
    # windows: positions 896..1023 are in blocks 14, 15; positions 2..129 in blocks 0, 1, 2
    # dense rows: 8 and 1, of 2 per block; position 1023 completes a C4 and a C128 row
    page_ids = (2 + 3) + (4 + 1) + 2
    assert input_bytes(SPEC, batch) == 3 * 4 + 2 * 4 + 2 * 8 + page_ids * 4
