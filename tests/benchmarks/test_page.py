"""The pages: their tables, figures and plots are those of the stored rows."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.harness.figures import FIGURES
from benchmarks.harness.stored import Stored, number
from benchmarks.harness.tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "case": "decode", "shape": "8 x 64 heads, 128+512", "variant": "", "eager_us": 14.96,
    "compiled_us": 15.67, "baseline_us": None, "pct_of_roofline": 6.374, "device": "GPU",
    "torch": "2.11", "triton": "3.6", "date": "2026-11-21T20:00:00", "sources": "abc",
    "command": "bench",
}  # fmt: skip


def store(folder, file, *rows):
    """Rows of a benchmark below a folder."""
    stored = Stored(folder)
    stored.path(file).parent.mkdir(exist_ok=True)
    stored.path(file).write_text("\n".join(json.dumps(row) for row in rows))
    return stored


def test_every_page_and_plot_shows_the_stored_rows():
    """Fails after a new run: python -m benchmarks.page"""
    assert page.stale() == []
    for name in page.PAGES:
        text = (ROOT / name).read_text()
        assert text.count("<!-- table: ") == text.count("<!-- /table -->")
        assert text.count("<!-- = ") == text.count("<!-- / -->")
    both = "".join((ROOT / name).read_text() for name in page.PAGES)
    assert set(re.findall(r"<!-- table: (\w+)", both)) <= set(TABLES)
    assert set(re.findall(r"<!-- = (\w+) -->", both)) <= set(FIGURES)


def test_every_plot_has_lines_of_ours_and_shows_the_stored_rows():
    found = page.plots(Stored(ROOT / "benchmarks/results"))
    assert set(found) == set(page.PLOTS)
    for plotted in found.values():
        assert plotted.panels
        assert all(panel.series[0].label.startswith("ours") for panel in plotted.panels)
    labels = [series.label for series in found["model"].panels[0].series]
    assert "Hugging Face, torch.compile" in labels


# Versions, rates of the hardware, targets and constants of the code: what no row says.
NO_FIGURE = re.compile(
    r"vLLM 0\.22\.1|torch 2\.\d+|to 2\.1[35]|transformers 5\.17|(?:to|transformers) 5\.2[34]|"
    r"Python 3\.10|Triton 3\.6 to 3\.9|Triton 3\.[678]|compute capability 8\.9|"
    r"Apache-2\.0|4\.3 TB/s|3\.2 B parameters|at most 1\.2 times DeepGEMM|2\.\d+ in FP8|"
    r"at most 3 % slower|75 % of the roofline|5 times at 4k|20 times at 32k|"
    r"8 times at 8 x 4k|20 times at 8 x 32k|10 times at 1 x 128k|"
    r"at most 230 us|at most 890|"
    r"target at 2048 tokens, 1\.3 times|within 3 % of the largest|"
    r"4 times the rows|a read of 4 times|"
    r"75 % of the bandwidth|at least \d+ times faster at|at most 3 % of a step|"
    r"at most 60 % of the baselines|95 % intervals"
)


@pytest.mark.parametrize("name", page.PAGES)
def test_no_sentence_has_a_measured_figure_of_its_own(name):
    """A decimal, a time, a share or a ratio is of a row, between marks, or is listed above."""
    text = (ROOT / name).read_text()
    text = re.sub(
        r"```.*?```|<!-- table: .*?<!-- /table -->|<!-- = .*?<!-- / -->", "", text, flags=re.S
    )
    text = NO_FIGURE.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    assert re.findall(r".{0,40}\b\d+(?:\.\d+|\s(?:us|ms|%|times)).{0,20}", text) == []


def test_a_row_that_changes_makes_pages_and_plot_stale_until_they_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    (tmp_path / "docs").mkdir()
    for name in page.PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    assert page.stale(tmp_path) == []
    rows = tmp_path / "benchmarks/results/h200/indexer.jsonl"
    lines = rows.read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if row["case"] == "select")
    later = {**row, "compiled_us": 10 * row["compiled_us"], "date": "2099-01-01T00:00:00"}
    rows.write_text("\n".join([*lines, json.dumps(later)]) + "\n")
    shown_in = ("docs/performance.md", "benchmarks/results/h200/indexer.png")
    stale = [tmp_path / name for name in shown_in]
    assert page.stale(tmp_path) == stale
    assert page.write(tmp_path) == stale
    assert page.stale(tmp_path) == []
    assert number(later["compiled_us"]) in (tmp_path / "docs/performance.md").read_text()
    stale[-1].write_bytes(b"another picture")
    assert page.stale(tmp_path) == stale[-1:]


def test_check_names_what_is_stale_and_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(page, "stale", lambda: [ROOT / "README.md"])
    before = (ROOT / "README.md").read_text()
    assert page.main(["--check"]) == 1
    assert capsys.readouterr().out == "stale: README.md\n"
    assert (ROOT / "README.md").read_text() == before
    monkeypatch.setattr(page, "stale", list)
    assert page.main(["--check"]) == 0


def test_the_newest_run_of_a_point_is_shown_whichever_is_faster(tmp_path):
    """In the order in which the points first came; of another point there is one run."""
    old = {**ROW, "date": "2026-11-20T00:00:00", "compiled_us": 1.0}
    other = {**ROW, "shape": "another"}
    for rows in ((old, other, ROW), (ROW, other, old)):
        stored = store(tmp_path, "sparse_mla", *rows)
        assert stored.rows("sparse_mla") == [ROW, other]
        assert stored.runs("sparse_mla") == list(rows)


def test_a_figure_is_reckoned_from_the_rows(tmp_path):
    rows = [
        {**ROW, "case": "insert", "shape": str(us), "baseline_us": 30.0, "compiled_us": us}
        for us in (2.0, 10.0)
    ]
    stored = store(tmp_path, "kv_cache", *rows)
    text = "inserts <!-- = insert_times -->1<!-- / --> times, <!-- = insert_times --><!-- / -->"
    marked = "<!-- = insert_times -->3.0 to 15<!-- / -->"
    assert page.page(text, stored) == f"inserts {marked} times, {marked}"
    with pytest.raises(ValueError, match=r"page: figure must be one of .*, got 'mine'\."):
        page.page("<!-- = mine -->1<!-- / -->", stored)
    with pytest.raises(ValueError, match=r"page: rows of kv_cache must hold .* got none of"):
        page.page("<!-- = gather_times -->1<!-- / -->", stored)


def test_a_table_has_a_line_per_row_and_says_where_they_come_from(tmp_path):
    other = {**ROW, "variant": "C4", "baseline_us": 123.4, "sources": "def"}
    left_out = {**ROW, "case": "prefill"}
    stored = store(tmp_path, "sparse_mla", ROW, other, left_out)
    written = page.page("a\n<!-- table: decode -->\nold\n<!-- /table -->\nb", stored)
    assert written == (
        "a\n<!-- table: decode -->\n"
        "| tokens x heads, keys | ours, us | compiled for any size | FlashMLA | of the roofline |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 8 x 64 heads, 128+512 | 15.0 | 15.7 | - | 6.37 % |\n"
        "| 8 x 64 heads, 128+512, C4 | 15.0 | 15.7 | 123 | 6.37 % |\n\n"
        "1 rows: GPU, torch 2.11, triton 3.6, 2026-11-21, sources `abc`: `bench`  \n"
        "1 rows: GPU, torch 2.11, triton 3.6, 2026-11-21, sources `def`: `bench`  \n"
        "<!-- /table -->\nb"
    )


def test_a_pattern_chooses_lines_of_a_table(tmp_path):
    stored = store(tmp_path, "sparse_mla", ROW, {**ROW, "shape": "1 x 64 heads, 128+512"})
    written = page.page("<!-- table: decode; ^1 x .*15\\.7 -->\n<!-- /table -->", stored)
    assert written.splitlines()[3:] == [
        "| 1 x 64 heads, 128+512 | 15.0 | 15.7 | 6.37 % |",
        "<!-- /table -->",
    ]
    with pytest.raises(ValueError, match=r"page: rows must hold some of sparse_mla, got none\."):
        page.page("<!-- table: decode; ^2 -->\n<!-- /table -->", stored)


def test_a_column_that_no_row_has_is_left_out(tmp_path):
    prefill = {**ROW, "case": "prefill", "rows": 512}
    whole = {
        **prefill, "baseline_us": 90.0, "baseline_gather_us": 11.0, "baseline_combine_us": 5.0,
        "baseline_whole_us": 108.0, "whole_times_faster": 6.9,
        "baseline_our_gather_us": 99.0, "context": 17023,
        "gathered_rows": 4894,
    }  # fmt: skip
    later = {**whole, "gathered_us": 80.0, "flash_mla_us": 105.8, "whole_times_flash_mla": 1.02}

    def table(*rows):
        named = [{**row, "shape": f"{place}"} for place, row in enumerate(rows)]
        stored = store(tmp_path, "sparse_mla", *named)
        written = page.page("<!-- table: prefill -->\n<!-- /table -->", stored).splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in written[1:6]]

    assert table(prefill)[0] == [
        "tokens x heads, keys", "ours, us", "compiled for any size", "of the roofline"
    ]  # fmt: skip
    heading, lines, *cells = table(whole, prefill)
    named = [
        "FlashMLA", "vLLM's gather", "its indices", "gather, indices and FlashMLA",
        "that over ours", "with our gather in place of vLLM's",
    ]  # fmt: skip
    assert heading[3:-1] == [*named, "context, rows gathered"]
    assert len(lines) == len(heading)
    numbers = ["90.0", "11.0", "5.00", "108", "6.90", "99.0"]
    assert cells[0][3:-1] == [*numbers, "17023, 4894"]
    assert cells[1][3:-1] == ["-"] * 7
    heading, _, *cells = table(later, whole, prefill)  # rows from before ours had FlashMLA
    with_it = ["ours with FlashMLA", "vLLM's sequence over that"]
    named.insert(1, "our kernel over its rows")
    assert heading[3:-1] == [*named, *with_it, "context, rows gathered"]
    assert cells[0][3:-1] == ["90.0", "80.0", *numbers[1:], "106", "1.02", "17023, 4894"]
    assert cells[1][3:-1] == ["90.0", "-", *numbers[1:], "-", "-", "17023, 4894"]
    assert cells[2][3:-1] == ["-"] * 10


def table_of(folder, name, *rows, file="sparse_mla"):
    """Heading and cells of a table, without the markup between them."""
    stored = store(folder, file, *rows)
    lines = page.page(f"<!-- table: {name} -->\n<!-- /table -->", stored).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return [cells[0], *cells[2 : lines.index("") - 1]]


def test_prefills_of_few_tokens_and_of_short_prefixes_are_in_the_table_of_both_variants_alone(
    tmp_path,
):
    prefill = {**ROW, "case": "prefill", "rows": 512}
    few, short = {**prefill, "rows": 511}, {**prefill, "variant": "C128, behind 2048 tokens"}
    stored = store(tmp_path, "sparse_mla", prefill, few, short)
    for table, count in (("prefill", 1), ("variants", 3)):
        written = page.page(f"<!-- table: {table} -->\n<!-- /table -->", stored)
        assert f"{count} rows: GPU" in written


def test_both_variants_of_a_prefill_are_beside_what_sizes_choose(tmp_path):
    old = {
        **ROW, "case": "prefill", "baseline_us": 90.0, "baseline_whole_us": 108.0,
        "whole_times_faster": 6.9,
    }  # fmt: skip
    new = {**old, "variant": "C128", "pages_us": 17.25, "copied_us": 15.66}
    named = ["tokens x heads, keys", "ours, by size, us"]
    baseline = ["FlashMLA alone", "gather, indices and FlashMLA", "that over ours"]
    numbers = ["90.0", "108", "6.90"]
    other = {**new, "case": "packages"}
    assert table_of(tmp_path, "variants", old, new, other) == [
        [*named, "from the blocks", "by a copy", *baseline],
        ["8 x 64 heads, 128+512", "15.7", "-", "-", *numbers],
        ["8 x 64 heads, 128+512, C128", "15.7", "17.2", "15.7", *numbers],
    ]
    assert table_of(tmp_path, "variants", old)[0] == [*named, *baseline]


def test_packages_are_beside_the_calls_that_they_are_made_of(tmp_path):
    row = {
        **ROW, "case": "packages", "variant": "paged", "shape": "8 x 64 heads, 128+1024",
        "package_us": 16.04, "baseline_us": 20.3,
    }  # fmt: skip
    failed = {**row, "variant": "gathered", "package_us": None, "package_error": "no compiler"}
    assert table_of(tmp_path, "packages", ROW, row, failed) == [
        ["form", "tokens x heads, keys", "package, us", "compiled for any size", "eager",
         "FlashMLA"],
        ["paged", "8 x 64 heads, 128+1024", "16.0", "15.7", "15.0", "20.3"],
        ["gathered", "8 x 64 heads, 128+1024", "-", "15.7", "15.0", "20.3"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case", "file", "first", "library"),
    [
        ("gathered", "gathered", "sparse_mla", "tokens x heads, keys", "FlashMLA"),
        ("logits", "logits", "indexer", "requests x context", "DeepGEMM"),
    ],
)
def test_a_table_of_one_library_has_its_time_over_ours(tmp_path, name, case, file, first, library):
    row = {**ROW, "case": case, "shape": "some", "baseline_us": 20.3, "times_faster": 1.295}
    assert table_of(tmp_path, name, ROW, row, file=file) == [
        [first, "ours, us", library, "that over ours", "of the roofline"],
        ["some", "15.7", "20.3", "1.29", "6.37 %"],
    ]


def test_a_table_that_shows_nothing_waits_for_rows(tmp_path):
    stored = store(tmp_path, "sparse_mla", ROW)
    text = "a\n<!-- table: packages -->\n<!-- /table -->\nb"
    assert page.page(text, stored) == text


def test_a_table_that_loses_its_rows_and_one_that_is_not_known_are_refused(tmp_path):
    stored = store(tmp_path, "sparse_mla", ROW)
    with pytest.raises(
        ValueError, match=r"page: rows must hold some of sparse_mla, got none\. Run"
    ):
        page.page("<!-- table: prefill -->\nold\n<!-- /table -->", stored)
    with pytest.raises(ValueError, match=r"page: table must be one of metadata, .*, got 'mine'\."):
        page.page("<!-- table: mine -->\n<!-- /table -->", stored)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0157, "0.02"), (9.994, "9.99"), (12.34, "12.3"), (123.5, "124"), (None, "-")],
)
def test_numbers_have_three_digits(value, shown):
    assert number(value) == shown
