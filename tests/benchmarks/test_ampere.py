"""The benchmark of A100 code, on a CPU: its calls and checks, not its times."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from benchmarks import ampere
from benchmarks.harness import timing
from dsv4_ops.kernels.common.hopper import support


class Captured:
    """Runs each call once; the time is the number of captures so far."""

    made = 0

    def __init__(self, calls):
        assert calls
        calls[0]()
        Captured.made += 1
        self.us = float(Captured.made)

    def device_us(self, cold):
        return timing.Timing(self.us, self.us, self.us)


def test_every_case_is_checked_and_timed_with_each_code(monkeypatch):
    monkeypatch.setattr(ampere, "Capture", Captured)
    monkeypatch.setattr(ampere, "captured_calls", lambda calls: calls)
    monkeypatch.setattr(ampere, "_BATCHES", (2,))
    monkeypatch.setattr(ampere, "_HEADS", 4)
    monkeypatch.setattr(ampere, "_CONTEXT", 512)
    monkeypatch.setitem(ampere.CODES, "sm_80_us", contextlib.nullcontext)
    cases = ampere.cases_of(torch.device("cpu"), smoke=True)
    names = [row.case.partition(",")[0] for row, _ in cases]
    assert names == ["insert", "decode", "paged", "logits", "select", "mla_decode", "mla_decode"]
    for row, make in cases:
        Captured.made = 0
        ampere.measure(row, make, None)
        assert (row.hopper_us, row.triton_us, row.sm_80_us, row.times_triton) == (1, 2, 3, 1.5)


def test_without_gluon_no_call_is_for_hopper(tmp_path):
    with ampere.without_gluon(tmp_path):
        assert not support.runs(None, None, True)
    with pytest.raises(AttributeError):
        support.runs(None, None, True)
