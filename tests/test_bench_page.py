"""The page of figures: its tables are those of the stored rows."""

import json
from pathlib import Path

import pytest

from dsv4_ops.bench import page

ROOT = Path(__file__).resolve().parents[1]
ROW = {
    "case": "decode", "shape": "8 x 64 heads, 128+512", "variant": "", "eager_us": 14.96,
    "compiled_us": 15.67, "anchor_us": None, "pct_of_floor": 6.374, "device": "GPU",
    "torch": "2.11", "triton": "3.6", "date": "2026-11-21T20:00:00", "sources": "abc",
    "command": "bench",
}  # fmt: skip


def test_the_page_shows_the_stored_rows():
    """Fails after a new run: python -m dsv4_ops.bench.page docs/performance.md benchmarks/h200"""
    text = (ROOT / "docs/performance.md").read_text()
    assert page.page(text, ROOT / "benchmarks/h200") == text
    shown = text.count("<!-- table: ")
    assert shown == text.count("<!-- /table -->") == len(page.TABLES)


def test_every_plot_has_lines_of_ours_and_shows_the_stored_rows(monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        page.plot, "try_plot", lambda panels, path, **_: drawn.setdefault(path.name, panels)
    )
    page.draw(ROOT / "benchmarks/h200")
    assert set(drawn) == {f"{file}.png" for file in page.PLOTS}
    for name, panels in drawn.items():
        assert (ROOT / "benchmarks/h200" / name).is_file()
        assert panels
        assert all(panel.series[0].label.startswith("ours") for panel in panels)


def test_a_table_has_a_line_per_row_and_says_where_they_come_from(tmp_path):
    other = {**ROW, "variant": "C4", "anchor_us": 123.4, "sources": "def"}
    left_out = {**ROW, "case": "prefill"}
    rows = "\n".join(json.dumps(row) for row in (ROW, other, left_out))
    (tmp_path / "sparse_mla.jsonl").write_text(rows)
    written = page.page("a\n<!-- table: decode -->\nold\n<!-- /table -->\nb", tmp_path)
    assert written == (
        "a\n<!-- table: decode -->\n"
        "| tokens x heads, keys | ours, us | compiled for any size | FlashMLA | of the floor |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 8 x 64 heads, 128+512 | 15.0 | 15.7 | - | 6.37 % |\n"
        "| 8 x 64 heads, 128+512, C4 | 15.0 | 15.7 | 123 | 6.37 % |\n\n"
        "1 rows: GPU, torch 2.11, triton 3.6, 2026-11-21, sources `abc`: `bench`  \n"
        "1 rows: GPU, torch 2.11, triton 3.6, 2026-11-21, sources `def`: `bench`  \n"
        "<!-- /table -->\nb"
    )


def test_a_column_that_no_row_has_is_left_out(tmp_path):
    prefill = {**ROW, "case": "prefill", "rows": 512}
    whole = {
        **prefill, "anchor_us": 90.0, "anchor_gather_us": 11.0, "anchor_combine_us": 5.0,
        "anchor_whole_us": 108.0, "whole_times_faster": 6.9,
        "anchor_our_gather_us": 99.0, "context": 17023,
        "gathered_rows": 4894,
    }  # fmt: skip
    later = {**whole, "gathered_us": 80.0, "flash_mla_us": 105.8, "whole_times_flash_mla": 1.02}

    def table(*rows):
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / "sparse_mla.jsonl").write_text(lines)
        written = page.page("<!-- table: prefill -->\n<!-- /table -->", tmp_path).splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in written[1:6]]

    assert table(prefill)[0] == [
        "tokens x heads, keys", "ours, us", "compiled for any size", "of the floor"
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
    (folder / f"{file}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    lines = page.page(f"<!-- table: {name} -->\n<!-- /table -->", folder).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return [cells[0], *cells[2 : lines.index("") - 1]]


def test_prefills_of_few_tokens_and_of_short_prefixes_are_in_the_table_of_both_ways_alone(tmp_path):
    prefill = {**ROW, "case": "prefill", "rows": 512}
    few, short = {**prefill, "rows": 511}, {**prefill, "variant": "C128, behind 2048 tokens"}
    rows = "\n".join(json.dumps(row) for row in (prefill, few, short))
    (tmp_path / "sparse_mla.jsonl").write_text(rows)
    for table, count in (("prefill", 1), ("ways", 3)):
        written = page.page(f"<!-- table: {table} -->\n<!-- /table -->", tmp_path)
        assert f"{count} rows: GPU" in written


def test_both_ways_of_a_prefill_are_beside_what_sizes_choose(tmp_path):
    old = {
        **ROW, "case": "prefill", "anchor_us": 90.0, "anchor_whole_us": 108.0,
        "whole_times_faster": 6.9,
    }  # fmt: skip
    new = {**old, "variant": "C128", "pages_us": 17.25, "copied_us": 15.66}
    named = ["tokens x heads, keys", "ours, by size, us"]
    theirs = ["FlashMLA alone", "gather, indices and FlashMLA", "that over ours"]
    numbers = ["90.0", "108", "6.90"]
    other = {**new, "case": "packages"}
    assert table_of(tmp_path, "ways", old, new, other) == [
        [*named, "from the pages", "by a copy", *theirs],
        ["8 x 64 heads, 128+512", "15.7", "-", "-", *numbers],
        ["8 x 64 heads, 128+512, C128", "15.7", "17.2", "15.7", *numbers],
    ]
    assert table_of(tmp_path, "ways", old)[0] == [*named, *theirs]


def test_packages_are_beside_the_calls_that_they_are_made_of(tmp_path):
    row = {
        **ROW, "case": "packages", "variant": "paged", "shape": "8 x 64 heads, 128+1024",
        "package_us": 16.04, "anchor_us": 20.3,
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
    row = {**ROW, "case": case, "shape": "some", "anchor_us": 20.3, "times_faster": 1.295}
    assert table_of(tmp_path, name, ROW, row, file=file) == [
        [first, "ours, us", library, "that over ours", "of the floor"],
        ["some", "15.7", "20.3", "1.29", "6.37 %"],
    ]


def test_a_table_that_shows_nothing_waits_for_rows(tmp_path):
    (tmp_path / "sparse_mla.jsonl").write_text(json.dumps(ROW))
    text = "a\n<!-- table: packages -->\n<!-- /table -->\nb"
    assert page.page(text, tmp_path) == text


def test_a_table_that_loses_its_rows_and_one_that_is_not_known_are_refused(tmp_path):
    (tmp_path / "sparse_mla.jsonl").write_text(json.dumps(ROW))
    with pytest.raises(
        ValueError, match=r"page: rows must hold some of sparse_mla, got none\. Run"
    ):
        page.page("<!-- table: prefill -->\nold\n<!-- /table -->", tmp_path)
    with pytest.raises(ValueError, match=r"page: table must be one of metadata, .*, got 'mine'\."):
        page.page("<!-- table: mine -->\n<!-- /table -->", tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0157, "0.02"), (9.994, "9.99"), (12.34, "12.3"), (123.5, "124"), (None, "-")],
)
def test_numbers_have_three_digits(value, shown):
    assert page.number(value) == shown
