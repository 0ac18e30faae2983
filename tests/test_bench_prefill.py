"""``bench sparse_mla`` times our prefill with FlashMLA beside vLLM's sequence, after it has looked
at its results."""

import fake_flash_mla
import pytest
import torch
from bench_fakes import pretend
from fake_attention import Cache, FlashMLA

from dsv4_ops.bench import attention_calls, attention_cases, measure, prefill_cases, sparse_mla
from dsv4_ops.bench.attention_calls import prefill_with_flash_mla
from dsv4_ops.bench.attention_cases import window_cases
from dsv4_ops.bench.prefill_cases import dense_cases, selecting_cases
from dsv4_ops.bench.sparse_mla import Bench
from dsv4_ops.core import choice
from dsv4_ops.core.types import SparseMla

pytest_plugins = ("providers_on_cpu",)


@pytest.fixture
def bench(monkeypatch):
    """Of a GPU with FlashMLA, which is not behind ``impl=``; ours is the reference."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(attention_calls, "ours_on", lambda tensor: "reference")
    made = Bench(torch.device("cpu"), None, budget_s=0.0)
    made = pretend(monkeypatch, made, attention_cases, prefill_cases)
    made.modules, made.cache = FlashMLA(), Cache()
    return made


@pytest.fixture
def usable(bench, flash_mla, monkeypatch):
    """Also behind ``impl=``."""
    monkeypatch.setattr(sparse_mla, "unusable", lambda library: "")
    monkeypatch.setattr(choice, "ours", lambda spec: "reference")
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    return bench


def prefill_of_16():
    return selecting_cases((16,), ((64, 64),), prefix=512)[0]


def dense_prefill_of_16():
    """Positions 639 to 654: 5 rows of 128 tokens each; the step ends before a sixth."""
    return dense_cases((16,), (64,), prefix=512)[0]


@pytest.mark.parametrize("make", [prefill_of_16, dense_prefill_of_16])
def test_ours_with_flashmla_is_timed_beside_the_sequence(usable, monkeypatch, make):
    """Over all input sets, as is our kernel over the rows that vLLM gathers."""
    calls = []

    def call(ratio, *args):
        calls.append(id(args[0]))
        return prefill_with_flash_mla(ratio, *args)

    monkeypatch.setattr(sparse_mla, "prefill_with_flash_mla", call)
    row = usable.measure(make())
    assert row.error is row.anchor_error is None
    assert row.anchor_agrees is True
    assert (row.flash_mla_us, row.whole_times_flash_mla, row.gathered_us) == (4.0, 1.0, 4.0)
    assert fake_flash_mla.calls == ["prefill"] * len(calls)
    assert len(set(calls)) == row.input_sets == 3
    assert "ours with FlashMLA" not in row.anchor_note
    row = usable.measure(window_cases((3,), 4)[0])
    assert row.flash_mla_us is row.whole_times_flash_mla is None


@pytest.mark.parametrize(
    ("result", "change"), [("out", lambda row: row * 1.1), ("lse", lambda value: value + 1e-2)]
)
def test_it_is_not_timed_if_it_differs(usable, monkeypatch, result, change):
    def wrong(*args):
        found = prefill_with_flash_mla(*args)._asdict()
        found[result][-1, 1] = change(found[result][-1, 1])
        return SparseMla(**found)

    monkeypatch.setattr(sparse_mla, "prefill_with_flash_mla", wrong)
    row = usable.measure(prefill_of_16())
    assert row.anchor_error.startswith(f"ours with FlashMLA: WrongResult: {result}: ")
    assert row.flash_mla_us is row.whole_times_flash_mla is None
    assert (row.error, row.anchor_agrees, row.anchor_whole_us) == (None, True, 4.0)


def test_it_needs_nothing_of_vllms(usable):
    usable.cache = ImportError("no cache_utils.py")
    row = usable.measure(prefill_of_16())
    assert row.anchor_error == "whole: ImportError: no cache_utils.py"
    assert (row.flash_mla_us, row.whole_times_flash_mla) == (4.0, None)


def test_without_the_library_or_an_anchor_it_is_absent(bench, monkeypatch):
    monkeypatch.setattr(sparse_mla, "unusable", lambda library: "not installed")
    row = bench.measure(prefill_of_16())
    assert row.anchor_note.endswith("in the CuTe DSL; ours with FlashMLA: not installed")
    assert row.anchor_error is None
    assert row.flash_mla_us is row.whole_times_flash_mla is None
    bench.modules = None
    row = bench.measure(prefill_of_16())
    assert row.flash_mla_us is row.anchor_note is row.error is None


def test_a_dense_prefill_sees_the_rows_that_are_finished(monkeypatch):
    """Position 766 has 5 rows of 128 tokens, 767 the sixth: of one request of 768 + 16 - 1."""
    case = dense_cases((16,), (4,), prefix=640)[0]
    assert (case.labels["context"], case.labels["gathered_rows"]) == (783, 6 + 143)
    monkeypatch.setattr(prefill_cases, "rotating_sets", lambda *_: 1)
    work = case.build(torch.device("cpu"))
    (_, kv, indices, lens, _), mine = work.anchor_sets[0], work.sets[0]
    assert mine[2].tolist() == [*range(767, 783)]
    assert mine[7] is None
    assert (kv.shape, indices.shape) == ((149, 1, 512), (16, 1, 256))
    assert lens.tolist() == [134] * 16
    assert indices[3, 0, :136].tolist() == [*range(9, 137), *range(6), -1, -1]
    assert work.flop == 2 * 4 * 16 * 134 * 1024
    assert work.moved_bytes == (6 + 143) * 584 + 16 * 4 * 512 * 4
