"""The experts benchmark: the tuning entry that it selects for Humming, and missing packages."""

import sys

import pytest

from benchmarks.baselines import humming
from benchmarks.run import BenchError, main


def test_rows_choose_the_entry():
    table = [(0, 8, {"block_shape": "a"}), (8, 64, {"block_shape": "b"}), (64, 0, {"c": 0})]
    found = [humming.choose(table, rows) for rows in (1, 8, 9, 64, 65)]
    assert found == [table[0][2], table[0][2], table[1][2], table[1][2], table[2][2]]
    with pytest.raises(BenchError, match="no entry for 65 rows"):
        humming.choose(table[:2], 65)


def test_missing_library_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "humming", None)
    assert main(["experts", "--humming", "--out", str(tmp_path)]) == 2
    assert "--humming: cannot import humming-kernels" in capsys.readouterr().err
