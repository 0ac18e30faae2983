"""The benchmark of whole layers: which errors its check of the output finds, and baselines."""

import re
from types import SimpleNamespace

import pytest
import torch

import dsv4_ops
from benchmarks.baselines.layer import Libraries
from benchmarks.cases.layer_cases import parts_of
from benchmarks.layer import CASES, Bench
from dsv4_ops.core.layout import MainLayout
from tests.benchmarks.test_ops import DeepGEMM
from tests.fakes.attention import FlashMLA
from tests.fakes.vllm_ops import fakes

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("uncompiled")


def vllm():
    def slots(rows, requests, table, block_size, valid):
        assert valid.all()
        assert rows.dtype == torch.int32
        return dsv4_ops.global_topk_indices_and_lens(rows, requests, table, block_size=block_size)

    return SimpleNamespace(compute_global_topk_indices_and_lens=slots)


def timed(kind):
    (case,) = Bench.cases((kind,), smoke=True)
    return case


def measured(case, **changed):
    bench = Bench(CPU, None, budget_s=0.0)
    bench.modules = Libraries(vllm(), DeepGEMM(), FlashMLA(), **fakes())._replace(**changed)
    return bench.measure(case)


@pytest.mark.parametrize("kind", CASES)
def test_the_baselines_leave_what_ours_leave(kind):
    row = measured(timed(kind))
    assert row.error is row.baseline_error is None
    assert row.baseline_agrees is True
    assert "inverse RoPE quantises to FP8, ours leaves bf16" in row.baseline_note
    assert ("in the CuTe DSL" in row.baseline_note) == (kind != "window")
    assert row.baseline_max_diff < 1e-3


def changed(library, name, change):
    """Return the library with a function whose result, or written argument, is changed."""
    whole = getattr(library, name)

    def wrong(*args, **named):
        return change(whole(*args, **named), named)

    return SimpleNamespace(**{name: wrong})


WRONG = {
    "extension": ("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
     lambda q, _: q * 1.05, "query: "),
    "states": ("save_partial_states",
     lambda _, named: named["state_cache"][-1].mul_(1.5), "states: "),
    "compressor": ("compress_norm_rope_store_triton",
     lambda _, named: named["kv_cache"].copy_(named["kv_cache"] + 16), "compressed: codes of "),
    "indexer_query": ("fused_indexer_q_rope_quant",
     lambda query, _: (query[0], query[1] * 1.3), "indexer_query: codes of "),
    "inverse_rope": ("fused_inv_rope_fp8_quant",
     lambda found, _: (found[0], found[1] * 2), "inverse_rope_fp8: codes of "),
}  # fmt: skip


@pytest.mark.parametrize("library", WRONG)
def test_a_stage_that_leaves_something_else_is_said(library):
    name, change, text = WRONG[library]
    row = measured(timed("c4"), **{library: changed(fakes()[library], name, change)})
    assert row.baseline_agrees is False
    assert f"; {text}" in row.baseline_note


@pytest.mark.parametrize(
    ("library", "name", "text"),
    [
        ("compressor", "compress_norm_rope_store_triton", "compressed: codes of 3 rows"),
        ("states", "save_partial_states", "states: "),
    ],
)
def test_rows_that_are_not_written_are_found(library, name, text):
    """The benchmark spoils the rows first; otherwise our rows would pass for the baseline's."""
    row = measured(timed("c128"), **{library: SimpleNamespace(**{name: lambda **_: None})})
    assert row.baseline_agrees is False
    assert text in row.baseline_note


def test_codes_one_step_away_are_a_note():
    def step(_, named):
        view, slot = named["kv_cache"], int(named["k_cache_metadata"].slot_mapping[0])
        codes = view.as_strided((448,), (1,), MainLayout(2).data_offset(slot))
        codes[((codes & 0x7F) < 0x60).nonzero()[0]] ^= 1

    name = "compress_norm_rope_store_triton"
    row = measured(timed("c128"), compressor=changed(fakes()["compressor"], name, step))
    assert row.baseline_agrees
    assert re.search(
        r"; compressed: \d+ of 1752 bytes differ, no value by more than a step", row.baseline_note
    )


@pytest.mark.parametrize("change", ["sink", "states", "selection"])
def test_a_wrong_stage_shows_in_the_output(change):
    """The check finds another sink, a wrong row that this step finishes, and a wrong selection."""
    work = timed("c4" if change == "selection" else "c128").build(CPU)
    expected = work.expected()
    args = work.sets[0]
    _, weights, caches, _ = parts_of(args)
    place = {"sink": weights.attn_sink, "states": caches.states, "selection": args[3]}[change]
    place.neg_() if change != "sink" else place.add_(5.0)
    assert work.difference(args, [work.call(*args)], expected) is not None
