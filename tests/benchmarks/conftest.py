"""Fixtures for tests of benchmarks: runs without a compiler and without timing."""

import json

import pytest

from benchmarks import packages
from benchmarks.harness import measure, timing
from benchmarks.run import main


@pytest.fixture
def uncompiled(monkeypatch):
    """Replace compiled ops and packages by the eager ops, so that a run takes seconds."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))
    monkeypatch.setattr(packages, "build", unpackaged)


def unpackaged(form, device):
    """Return the call itself instead of a package of the call."""
    return form.case(form.exported).build(device).call


@pytest.fixture
def smoke(tmp_path):
    """Return a function that runs a benchmark and returns its exit status and rows."""

    def run(name, *more):
        status = main([name, "--smoke", "--out", str(tmp_path), *more])
        path = tmp_path / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return status, [json.loads(line) for line in lines]

    return run
