"""The benchmark of whole layers checks before it times, times every stage, and says what its
baselines leave out."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

import dsv4_ops
from benchmarks import layer
from benchmarks.baselines.layer import Libraries
from benchmarks.cases import layer_cases
from benchmarks.cases.layer_cases import FLASH, cost, parts_of
from benchmarks.cases.layer_stages import our_stages
from benchmarks.harness import measure, timing
from benchmarks.harness.plot import layer_panels
from benchmarks.harness.report import stamp
from benchmarks.harness.rows import LayerRow
from benchmarks.layer import CASES, Bench, chosen_cases
from benchmarks.run import main
from dsv4_ops.core.layout import MainLayout
from tests.benchmarks.test_indexer import DeepGEMM
from tests.fakes.attention import FlashMLA
from tests.fakes.timing import pretend
from tests.fakes.vllm_ops import fakes

CPU = torch.device("cpu")
PLAN = object()
each_kind = pytest.mark.parametrize("kind", CASES)


@pytest.fixture
def uncompiled(monkeypatch):
    """Stand the layer itself in for the compiled one, so that a run takes seconds."""
    monkeypatch.setattr(measure, "compiled_op", lambda function: function)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: timing.Timing(2.0, 1.0, 3.0))


@pytest.fixture
def pretend_cuda(monkeypatch, uncompiled):
    monkeypatch.setattr(layer, "host_us", lambda call: timing.Timing(6.0, 5.0, 7.0))
    bench = pretend(monkeypatch, Bench(CPU, None, budget_s=0.0), layer_cases)
    bench.modules = Libraries(vllm(), OnePlan(), SparseDecode(), **fakes())
    return bench


def vllm():
    def slots(rows, requests, table, block_size, valid):
        assert valid.all()
        assert rows.dtype == torch.int32
        return dsv4_ops.global_topk_indices_and_lens(rows, requests, table, block_size=block_size)

    return SimpleNamespace(
        quantize_and_insert_k_cache=dsv4_ops.quantize_and_insert_k_cache,
        compute_global_topk_indices_and_lens=slots,
    )


class OnePlan(DeepGEMM):
    """DeepGEMM that plans every input set alike."""

    def get_paged_mqa_logits_metadata(self, lens, block_size, num_sms):
        super().get_paged_mqa_logits_metadata(lens, block_size, num_sms)
        self.plans.append(PLAN)
        return PLAN


class SparseDecode(FlashMLA):
    """FlashMLA that plans every input set alike."""

    def sparse_decode(self, *tensors, meta, **more):
        self.plans.append(PLAN)
        assert meta in (None, PLAN)
        return super().sparse_decode(*tensors, meta=PLAN, **more)


def timed(kind):
    (case,) = chosen_cases((kind,), smoke=True)
    return case


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_smoke_leaves_table_rows_and_plot(tmp_path, capsys):
    assert main(["layer", "--smoke", "--cases", ",".join(CASES), "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "layer.jsonl").read_text().splitlines()]
    schema = {field.name for field in dataclasses.fields(LayerRow)} | set(stamp(CPU, ""))
    assert all(set(row) == schema for row in rows)
    assert [(row["case"], row["requests"], row["context"]) for row in rows] == [
        (kind, 3, 1024) for kind in CASES
    ]
    assert all(row["error"] is None and row["compiled_us"] == 2.0 for row in rows)
    captured = capsys.readouterr()
    assert (tmp_path / "layer.txt").read_text().strip() in captured.out
    assert "layer 2/3: c4, small, 3 x 1024 tokens" in captured.err
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


STAGES = {
    "window": ["window", "attention"],
    "c4": ["written", "selection", "attention"],
    "c128": ["window", "compressed", "attention"],
}


BASELINES = {
    "window": ["window", "attention", "inverse_rope_fp8"],
    "c4": [
        "window", "compressed", "indexer_keys", "indexer_query", "logits", "topk", "slots",
        "attention", "inverse_rope_fp8",
    ],
    "c128": ["window", "compressed", "attention", "inverse_rope_fp8"],
}  # fmt: skip


@each_kind
def test_a_cuda_row_adds_up(pretend_cuda, kind):
    row = pretend_cuda.measure(timed(kind))
    assert row.error is row.baseline_error is None
    assert (row.input_sets, row.compiled_us, row.baseline_us, row.times_faster) == (
        3,
        4.0,
        4.0,
        1.0,
    )
    assert list(row.stages) == STAGES[kind]
    assert list(row.baseline_stages) == BASELINES[kind]
    assert row.baseline_agrees
    assert "inverse RoPE quantises to FP8, ours leaves bf16" in row.baseline_note
    assert "do without" not in row.baseline_note
    assert ("in the CuTe DSL" in row.baseline_note) == (kind != "window")
    assert row.roofline_us == max(row.moved_bytes / 4e6, row.flop / 790e6) > 0


def test_quantised_groups_are_a_stage_of_their_own(pretend_cuda):
    work = timed("window").build(CPU)
    spec = dataclasses.replace(work.spec, scale_layout="row")
    stages, results = our_stages("window", spec, work.sets[0])
    assert [stage.name for stage in stages] == ["window", "attention", "output"]
    assert torch.equal(stages[-1].args[0], results.out)
    rotated, plain = (our_stages("window", each, work.sets[0]) for each in (work.spec, spec))
    out = rotated[0][-1].call(*rotated[0][-1].args)
    assert torch.equal(rotated[1].out, plain[1].out)
    assert not torch.equal(out, rotated[1].out)


MISSING = FileNotFoundError("no such file in .anchor")


@each_kind
def test_without_the_extension_the_row_says_what_is_left_out(pretend_cuda, kind):
    pretend_cuda.modules = pretend_cuda.modules._replace(extension=MISSING)
    row = pretend_cuda.measure(timed(kind))
    assert row.baseline_error is None
    assert row.baseline_agrees
    assert list(row.baseline_stages) == BASELINES[kind]
    assert row.baseline_note.startswith(
        "the baselines do without query norm and RoPE, RoPE of the keys (FileNotFoundError: no "
        "such "
    )


@pytest.mark.parametrize(
    ("library", "lost"),
    [
        ("states", ["compressed", "indexer_keys"]),
        ("compressor", ["compressed", "indexer_keys"]),
        ("indexer_query", ["indexer_query"]),
        ("deep_gemm", ["logits", "topk", "slots", "attention", "inverse_rope_fp8"]),
        ("vllm", ["slots", "attention", "inverse_rope_fp8"]),
        ("flash_mla", ["attention", "inverse_rope_fp8"]),
        ("inverse_rope", ["inverse_rope_fp8"]),
    ],
)
def test_without_a_file_the_stages_that_do_not_need_it_are_timed(pretend_cuda, library, lost):
    """What ours left stands in for what is missing, and no sequence is passed off as whole."""
    pretend_cuda.modules = pretend_cuda.modules._replace(**{library: MISSING})
    row = pretend_cuda.measure(timed("c4"))
    assert list(row.baseline_stages) == [name for name in BASELINES["c4"] if name not in lost]
    text = f"{lost[0]}: ImportError: {library} failed to load: FileNotFoundError: no such file"
    assert row.baseline_error.startswith(text)
    assert row.error is row.baseline_us is row.times_faster is None
    assert row.compiled_us == 4.0
    assert row.baseline_agrees == (None if "attention" in lost else True)


def test_a_stage_that_fails_for_a_later_input_set_is_not_timed(pretend_cuda):
    calls, save = [], pretend_cuda.modules.states.save_partial_states

    def third(**arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("too many")
        save(**arguments)

    broken = SimpleNamespace(save_partial_states=third)
    pretend_cuda.modules = pretend_cuda.modules._replace(states=broken)
    row = pretend_cuda.measure(timed("c128"))
    assert row.baseline_error == "compressed: RuntimeError: too many"
    assert list(row.baseline_stages) == ["window", "attention", "inverse_rope_fp8"]
    assert row.baseline_us is None


def changed(module, name, change):
    """The library with a function whose result, or what it wrote, is another."""
    whole = getattr(module, name)

    def wrong(*args, **named):
        return change(whole(*args, **named), args, named)

    return SimpleNamespace(**{name: wrong})


WRONG = {
    "extension": (
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
        lambda q, *_: q * 1.05,
        "query: ",
    ),
    "states": (
        "save_partial_states",
        lambda _, __, named: named["state_cache"][-1].mul_(1.5),
        "states: ",
    ),
    "compressor": (
        "compress_norm_rope_store_triton",
        lambda _, __, named: named["kv_cache"].copy_(named["kv_cache"] + 16),
        "compressed: codes of ",
    ),
    "indexer_query": (
        "fused_indexer_q_rope_quant",
        lambda query, *_: (query[0], query[1] * 1.3),
        "indexer_query: codes of ",
    ),
    "inverse_rope": (
        "fused_inv_rope_fp8_quant",
        lambda found, *_: (found[0], found[1] * 2),
        "inverse_rope_fp8: codes of ",
    ),
}


@pytest.mark.parametrize("library", WRONG)
def test_a_stage_that_leaves_something_else_is_said(pretend_cuda, library):
    name, change, text = WRONG[library]
    module = changed(getattr(pretend_cuda.modules, library), name, change)
    pretend_cuda.modules = pretend_cuda.modules._replace(**{library: module})
    row = pretend_cuda.measure(timed("c4"))
    assert row.baseline_agrees is False
    assert f"; {text}" in row.baseline_note
    assert row.baseline_us == 4.0


def test_rows_that_are_not_written_are_found(pretend_cuda):
    """They are spoiled before: what ours had written there would pass for baseline."""
    idle = SimpleNamespace(compress_norm_rope_store_triton=lambda **_: None)
    pretend_cuda.modules = pretend_cuda.modules._replace(compressor=idle)
    row = pretend_cuda.measure(timed("c128"))
    assert row.baseline_agrees is False
    assert "compressed: codes of 3 rows" in row.baseline_note
    idle = SimpleNamespace(save_partial_states=lambda **_: None)
    pretend_cuda.modules = pretend_cuda.modules._replace(states=idle)
    assert "states: " in pretend_cuda.measure(timed("c128")).baseline_note


def test_codes_one_step_away_are_a_note(pretend_cuda):
    def step(_, __, named):
        view, slot = named["kv_cache"], int(named["k_cache_metadata"].slot_mapping[0])
        start = MainLayout(2).data_offset(slot)
        codes = view.as_strided((448,), (1,), start)
        codes[((codes & 0x7F) < 0x60).nonzero()[0]] ^= 1

    module = pretend_cuda.modules.compressor
    module = changed(module, "compress_norm_rope_store_triton", step)
    pretend_cuda.modules = pretend_cuda.modules._replace(compressor=module)
    row = pretend_cuda.measure(timed("c128"))
    assert row.baseline_agrees
    found = re.search(
        r"; compressed: (\d+) of 1752 bytes differ, no value by more than a step", row.baseline_note
    )
    assert found
    assert int(found[1]) >= 1


def test_an_baseline_that_disagrees_is_said(pretend_cuda):
    pretend_cuda.modules = pretend_cuda.modules._replace(flash_mla=SparseDecode(factor=1.1))
    row = pretend_cuda.measure(timed("c128"))
    assert row.baseline_agrees is False
    assert "attention: " in row.baseline_note
    assert row.baseline_us == 4.0


@each_kind
def test_a_wrong_output_is_not_timed(monkeypatch, kind):
    def wrong(call):
        def corrupted(*args):
            out = call(*args)
            out[-1, 0, :512] *= 1.05
            return out

        return corrupted

    monkeypatch.setattr(measure, "compiled_op", wrong)
    monkeypatch.setattr(measure, "wall_us", lambda *_, **__: pytest.fail("timed a wrong result"))
    row = Bench(CPU, None, budget_s=0.0).measure(timed(kind))
    assert row.error.startswith("compiled (")
    assert "out: " in row.error
    assert row.compiled_us is None


def test_other_rows_of_one_token_show():
    """One of the 64 selected rows replaced, of one token of three."""
    work = timed("c4").build(CPU)
    stages, results = our_stages("c4", work.spec, work.sets[0])
    attention, (whole, *_) = stages[-1], work.expected()
    out = attention.call(results.q, results.slots, *work.sets[0])
    expected = [out.view_as(whole)]
    assert work.difference(work.sets[0], expected, [whole]) is None
    slots, table = results.slots.clone(), parts_of(work.sets[0])[3].c4.block_table
    rows = [64 * page + place for page in table[1].tolist() for place in range(64)]
    slots[1, 5] = next(slot for slot in rows if slot not in slots[1].tolist())
    out = attention.call(results.q, slots, *work.sets[0])
    found = work.difference(work.sets[0], [out.view_as(whole)], expected)
    assert found is not None


@pytest.mark.parametrize("change", ["sink", "states", "selection"])
def test_a_wrong_stage_shows_in_the_output(change):
    """A check of the output sees a sink, a row that this step finishes, other selected rows."""
    work = timed("c4" if change == "selection" else "c128").build(CPU)
    expected = work.expected()
    args = list(work.sets[0])
    _, weights, caches, _ = parts_of(work.sets[0])
    place = {"sink": weights.attn_sink, "states": caches.states, "selection": args[3]}[change]
    place.neg_() if change != "sink" else place.add_(5.0)
    out = work.call(*args)
    assert work.difference(tuple(args), [out], expected) is not None


def test_selection_does_not_hang_on_rounding():
    """As many keys as are selected have scores far above those of all others."""
    work = timed("c4").build(CPU)
    stages, results = our_stages("c4", work.spec, work.sets[0])
    inputs, weights, caches, step = parts_of(work.sets[0])
    query = dsv4_ops.indexer_quantize_q(
        inputs.indexer_q, inputs.indexer_weights, step.positions, weights.cos_sin_cache
    )
    scores = dsv4_ops.indexer_logits(
        *query, caches.indexer, step.c4.lens, step.req_indices, step.c4.block_table,
        block_size=64, num_rows=256,
    ).sort(1, descending=True).values  # fmt: skip
    assert ((scores[:, 63] - scores[:, 64]) > 0.2 * scores[:, 0]).all()
    assert results.slots.shape == (3, 64)
    assert len(stages) == 3


def test_costs_by_hand():
    """One request of C4 at 16384 tokens: 128 + 512 rows of 584 bytes, 4096 + 1 keys of 132."""
    moved, flop = cost("c4", FLASH, (16384,))
    queries = 2 * 64 * 512 * 2 + 512 * 2 + 64 * (128 * 2 + 4)
    projections = 2 * 1024 * 4 + 2 * 256 * 4  # read, and written to the states
    older = 7 * 2 * (512 + 128) * 4  # a half of each row of kv and of score
    rows = (128 + 512 + 2) * 584 + (4096 + 1) * 132
    assert moved == queries + 2 * projections + older + rows + 128 * 4
    assert flop == 4 * 64 * 640 * 512 + 4096 * 64 * 128


def test_cases_of_a_run():
    cases = chosen_cases(CASES, smoke=False)
    assert len(cases) == 2 * (4 + 5 + 5) + 4
    assert str(cases[0]) == "window, Flash, 1 x 16384 tokens"
    assert str(cases[27]) == "c128, Pro, 8 x 131072 tokens"
    assert not any(case.variant or " to " in case.shape for case in cases[:28])
    assert str(cases[-1]) == "c128, Flash, 64 x 128 to 128896 tokens, planned"
    rows = [
        LayerRow(
            case=case.case, shape=case.shape, variant="", requests=case.requests, rows=case.rows,
            plotted=case.plotted, compiled_us=2.0, **case.labels,
        )
        for case in cases
    ]  # fmt: skip
    panels = layer_panels(rows, cuda=True)
    assert [panel.title for panel in panels] == [
        f"{name}, {heads} heads"
        for name in ("sliding window", "C4 (4 tokens a row)", "C128 (128 tokens a row)")
        for heads in (64, 128)
    ]
    assert [x for x, _ in panels[2].series[0].points] == [1, 8, 64, 128]
