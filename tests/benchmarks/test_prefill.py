"""``bench sparse_mla`` times our prefill with FlashMLA beside vLLM's sequence, after it has looked
at its results."""

import pytest
import torch

from benchmarks import sparse_mla
from benchmarks.cases import attention_calls, attention_cases, prefill_cases
from benchmarks.cases.attention_calls import prefill_by_copy, prefill_with_flash_mla
from benchmarks.cases.attention_cases import window_cases
from benchmarks.cases.prefill_cases import dense_cases, selecting_cases
from benchmarks.harness import measure, variants
from benchmarks.run import WrongResult
from benchmarks.sparse_mla import Bench
from dsv4_ops.core.registry import OPS
from dsv4_ops.core.types import SparseMla
from dsv4_ops.dispatch import choice
from tests.fakes import flash_mla as fake_flash_mla
from tests.fakes.attention import Cache, FlashMLA
from tests.fakes.timing import pretend

pytest_plugins = ("tests.support.providers_on_cpu",)


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
    assert row.error is row.baseline_error is None
    assert row.baseline_agrees is True
    assert (row.flash_mla_us, row.whole_times_flash_mla, row.gathered_us) == (4.0, 1.0, 4.0)
    assert fake_flash_mla.calls == ["prefill"] * len(calls)
    assert len(set(calls)) == row.input_sets == 3
    assert "ours with FlashMLA" not in row.baseline_note
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
    assert row.baseline_error.startswith(f"ours with FlashMLA: WrongResult: {result}: ")
    assert row.flash_mla_us is row.whole_times_flash_mla is None
    assert (row.error, row.baseline_agrees, row.baseline_whole_us) == (None, True, 4.0)


def test_it_needs_nothing_of_vllms(usable):
    usable.cache = ImportError("no cache_utils.py")
    row = usable.measure(prefill_of_16())
    assert row.baseline_error == "whole: ImportError: no cache_utils.py"
    assert (row.flash_mla_us, row.whole_times_flash_mla) == (4.0, None)


def test_without_the_library_or_an_baseline_it_is_absent(bench, monkeypatch):
    monkeypatch.setattr(sparse_mla, "unusable", lambda library: "not installed")
    row = bench.measure(prefill_of_16())
    assert row.baseline_note.endswith("in the CuTe DSL; ours with FlashMLA: not installed")
    assert row.baseline_error is None
    assert row.flash_mla_us is row.whole_times_flash_mla is None
    bench.modules = None
    row = bench.measure(prefill_of_16())
    assert row.flash_mla_us is row.baseline_note is row.error is None


def test_a_dense_prefill_sees_the_rows_that_are_finished(monkeypatch):
    """Position 766 has 5 rows of 128 tokens, 767 the sixth: of one request of 768 + 16 - 1."""
    case = dense_cases((16,), (4,), prefix=640)[0]
    assert (case.labels["context"], case.labels["gathered_rows"]) == (783, 6 + 143)
    monkeypatch.setattr(prefill_cases, "rotating_sets", lambda *_: 1)
    work = case.build(torch.device("cpu"))
    (_, kv, indices, lens, _), mine = work.baseline_sets[0], work.sets[0]
    assert mine[2].tolist() == [*range(767, 783)]
    assert mine[7] is None
    assert (kv.shape, indices.shape) == ((149, 1, 512), (16, 1, 256))
    assert lens.tolist() == [134] * 16
    assert indices[3, 0, :136].tolist() == [*range(9, 137), *range(6), -1, -1]
    assert work.flop == 2 * 4 * 16 * 134 * 1024
    assert work.moved_bytes == (6 + 143) * 584 + 16 * 4 * 512 * 4


def test_a_prefill_must_read_what_its_tokens_select():
    """One token has 64 of 128 rows and a window of its own."""
    work = selecting_cases((1,), ((4, 64),), prefix=512)[0].build(torch.device("cpu"))
    assert work.moved_bytes == (64 + 128) * 584 + 4 * 512 * 4 + (64 + 128) * 4


def test_a_wide_block_table_changes_nothing_but_its_width():
    """Absent entries behind those of the request, in ours and in what the baseline gathers."""
    cases = [dense_cases((16,), (4,), 640, rows)[0] for rows in (0, 64)]
    works = [case.build(torch.device("cpu")) for case in cases]
    fits, wide = (work.sets[0] for work in works)
    assert (fits[6].shape, wide[6].shape) == ((1, 3), (1, 32))
    assert wide[6][0].tolist() == [*fits[6][0].tolist(), *[-1] * 29]
    for place in set(range(9)) - {6, 7}:
        assert torch.equal(fits[place], wide[place])
    assert works[0].moved_bytes == works[1].moved_bytes
    assert cases[0].labels == cases[1].labels
    left, right = (work.expected() for work in works)
    assert torch.allclose(left[0], right[0], atol=1e-2)
    variant = "C128, behind 640 tokens"
    assert [case.variant for case in cases] == [variant, f"{variant}, table of 64 rows"]


def from_pages(ratio, *args):
    """Stands in for the kernel: on a CPU there is none."""
    return prefill_with(attention_calls.prefill_settings(ratio), *args)


def prefill_with(settings, *args):
    return SparseMla(*OPS["sparse_mla_prefill"].reference(*args, **settings))


@pytest.fixture
def hopper(bench, monkeypatch):
    """A Hopper GPU without an baseline."""
    monkeypatch.setattr(variants, "on_hopper", lambda q: True)
    monkeypatch.setattr(variants, "prefill_from_pages", from_pages)
    monkeypatch.setattr(variants, "prefill_by_copy", from_pages)
    bench.modules = None
    return bench


@pytest.mark.parametrize("make", [prefill_of_16, dense_prefill_of_16])
def test_both_ways_of_a_prefill_are_timed_over_all_input_sets(hopper, monkeypatch, make):
    calls = {"prefill_from_pages": [], "prefill_by_copy": []}
    for name, seen in calls.items():

        def call(ratio, *args, seen=seen):
            seen.append(id(args[0]))
            return from_pages(ratio, *args)

        monkeypatch.setattr(variants, name, call)
    row = hopper.measure(make())
    assert row.error is row.note is row.baseline_us is None
    assert (row.compiled_us, row.pages_us, row.copied_us) == (4.0, 4.0, 4.0)
    assert [len(set(seen)) for seen in calls.values()] == [3, 3]


@pytest.mark.parametrize(
    ("name", "said"),
    [("prefill_from_pages", "from the pages ("), ("prefill_by_copy", "by a copy (")],
)
def test_a_way_that_differs_is_wrong_before_anything_is_timed(hopper, monkeypatch, name, said):
    def wrong(ratio, *args):
        found = from_pages(ratio, *args)
        found.out[-1, 1] *= 1.05
        return found

    monkeypatch.setattr(variants, name, wrong)
    row = hopper.measure(prefill_of_16())
    assert row.error.startswith(said)
    assert row.compiled_us is row.pages_us is row.copied_us is None
    with pytest.raises(WrongResult):
        hopper.raise_failures()


def test_a_way_that_does_not_run_is_a_note(hopper, monkeypatch):
    def broken(ratio, *args):
        raise NotImplementedError("too many rows")

    monkeypatch.setattr(variants, "prefill_by_copy", broken)
    row = hopper.measure(prefill_of_16())
    assert row.note == "by a copy: NotImplementedError: too many rows"
    assert (row.error, row.compiled_us, row.pages_us, row.copied_us) == (None, 4.0, 4.0, None)
    hopper.raise_failures()


def test_only_prefills_on_hopper_have_two_ways(bench, hopper, monkeypatch):
    row = hopper.measure(window_cases((3,), 4)[0])
    assert row.pages_us is row.copied_us is row.note is None
    monkeypatch.setattr(variants, "on_hopper", attention_calls.on_hopper)
    row = hopper.measure(prefill_of_16())
    assert row.pages_us is row.copied_us is row.error is None
    assert row.note == "pages_us and copied_us are of a Hopper GPU, which this is not"
    hopper.cold = hopper.copies = None
    row = hopper.measure(prefill_of_16())  # on a CPU nothing is missing
    assert row.pages_us is row.note is row.error is None


@pytest.mark.parametrize("make", [prefill_of_16, dense_prefill_of_16])
def test_the_way_by_a_copy_is_asked_for_as_the_launcher_does(monkeypatch, make):
    """Its rows and lists by ops of torch, its attention by the reference: they agree with the
    reference of the prefill if every argument is in its place."""
    pytest.importorskip("triton", reason="published for Linux only")
    from dsv4_ops.kernels import launcher
    from dsv4_ops.kernels.sparse_mla import prefill
    from dsv4_ops.reference import bf16_workspace

    asked = []

    def rows(how, call, sink, multiple, wanted):
        asked.append((how, wanted))
        return bf16_workspace.gather_rows(call, sink, multiple)

    def attend(how, *args, results):
        asked.append((how, results))
        *given, scale = args
        return OPS["sparse_mla_gathered"].reference(*given, softmax_scale=scale)

    monkeypatch.setattr(prefill, "gather_rows", rows)
    monkeypatch.setattr(prefill, "launch_gathered_keys", attend)
    work = make().build(torch.device("cpu"))
    results = prefill_by_copy(work.context.ratio, *work.sets[0])
    assert asked == [(launcher.EAGER, 1), (launcher.EAGER, None)]
    assert work.difference(work.sets[0], results, work.expected()) is None
