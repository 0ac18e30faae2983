"""DeepGEMM's adapter with a fake that refuses arguments that DeepGEMM would misread."""

import re
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config

import dsv4_ops as ops
from dsv4_ops.dispatch import choice, libraries, providers
from dsv4_ops.kernels.external.deep_gemm import settings_of
from dsv4_ops.lowering.inspect import build_package
from tests.fakes.deep_gemm import indexer_call
from tests.support.providers_on_cpu import faster_from, reference_logits, reference_select

pytest_plugins = ("tests.support.providers_on_cpu",)
pytestmark = pytest.mark.usefixtures("scalar_loops")


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 100, 256, 300])
def test_the_adapter_gives_the_logits_of_the_reference(num_rows, heads, deep_gemm):
    queries, lens, rows = indexer_call(num_rows, heads=heads)
    settings = {"block_size": 64, "num_rows": num_rows}
    upstream = ops.indexer_logits(*queries, lens, *rows, **settings, impl="deep_gemm")
    assert torch.equal(upstream, reference_logits(*queries, lens, *rows, **settings))
    assert upstream.is_contiguous()
    assert deep_gemm.calls == (num_rows > 0)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("topk", [0, 1, 60, 300])
def test_the_adapter_selects_what_the_reference_selects(topk, slots, deep_gemm):
    queries, _, rows = indexer_call(topk)
    positions = torch.tensor([1023, 800, 600, -1, 3, 2**62, 9, 9, 1023])
    settings = {"block_size": 64, "compress_ratio": 4, "topk": topk, "slots": slots}
    upstream = ops.indexer_select(*queries, positions, *rows, **settings, impl="deep_gemm")
    assert torch.equal(upstream, reference_select(*queries, positions, *rows, **settings))
    assert deep_gemm.calls == 1


def test_the_adapter_scores_rows_of_tokens_one_by_one(deep_gemm):
    """Tokens may be of several requests, so no row of the block table serves all of them."""
    queries, lens, rows = indexer_call(4)
    settings = {"block_size": 64, "num_rows": 256}
    upstream = ops.indexer_logits(*queries, lens.view(3, 3), *rows, **settings, impl="deep_gemm")
    assert torch.equal(upstream, reference_logits(*queries, lens, *rows, **settings))
    positions = lens.clamp(max=1000).long() * 4 - 1
    settings = {"block_size": 64, "compress_ratio": 4, "topk": 60}
    in_rows = (*queries, positions.view(3, 3), *rows)
    upstream = ops.indexer_select(*in_rows, **settings, impl="deep_gemm")
    assert torch.equal(upstream, reference_select(*queries, positions, *rows, **settings))
    assert (deep_gemm.calls, deep_gemm.schedules) == (2, 2)


def test_a_schedule_of_the_step_is_not_made_again(deep_gemm):
    """The fake refuses a schedule for other lengths than those of valid tokens."""
    queries, lens, rows = indexer_call(3)
    counted = torch.where((rows[0] >= 0) & (rows[0] < 3), lens, 0).clamp(max=256)
    sizes = {"block_size": 64, "num_sms": providers.deep_gemm_num_sms()}
    schedule = ops.paged_mqa_logits_metadata(counted, **sizes)
    settings = {"block_size": 64, "num_rows": 256}
    want = reference_logits(*queries, lens, *rows, **settings)
    for impl in ("deep_gemm", "reference"):
        found = ops.indexer_logits(*queries, lens, *rows, schedule, **settings, impl=impl)
        assert torch.equal(found, want)
    assert (deep_gemm.calls, deep_gemm.schedules) == (1, 0)
    ops.indexer_logits(*queries, lens, *rows, **settings, impl="deep_gemm")
    assert (deep_gemm.calls, deep_gemm.schedules) == (2, 1)
    positions = lens.clamp(max=1000).long() * 4 - 1
    settings = {"block_size": 64, "compress_ratio": 4, "topk": 60}
    found = ops.indexer_select(*queries, positions, *rows, schedule, **settings, impl="deep_gemm")
    assert torch.equal(found, reference_select(*queries, positions, *rows, **settings))
    assert (deep_gemm.calls, deep_gemm.schedules) == (3, 1)
    text = "indexer_logits: schedule must have 133 rows, for the SMs that DeepGEMM uses here, got"
    with pytest.raises(ValueError, match=text):
        ops.indexer_select(*queries, positions, *rows, schedule[1:], **settings, impl="deep_gemm")
    assert deep_gemm.calls == 3


@pytest.mark.parametrize("is_older", [True, False])
def test_other_releases_of_deep_gemm(deep_gemm, monkeypatch, is_older):
    """Older releases have another name for the function; since 2.8, it has no ``clean_logits``."""
    ours, name = deep_gemm.fp8_fp4_paged_mqa_logits, "fp8_fp4_paged_mqa_logits"
    function = lambda *rest: ours(*rest, False)  # noqa: E731
    if is_older:
        name = "fp8_paged_mqa_logits"
        function = lambda q, *rest, clean_logits: ours((q, None), *rest, clean_logits)  # noqa: E731
    same = ("get_num_sms", "get_paged_mqa_logits_metadata")
    library = SimpleNamespace(
        **{each: getattr(deep_gemm, each) for each in same}, **{name: function}
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    libraries.load.cache_clear()
    queries, lens, rows = indexer_call(7)
    settings = {"block_size": 64, "num_rows": 256}
    upstream = ops.indexer_logits(*queries, lens, *rows, **settings, impl="deep_gemm")
    assert torch.equal(upstream, reference_logits(*queries, lens, *rows, **settings))
    assert settings_of(max) == {"clean_logits": False}  # functions in C++ have no signature


def test_no_token_no_page_and_no_table(deep_gemm):
    queries, lens, (requests, table) = indexer_call(0)
    settings = {"block_size": 64, "num_rows": 70, "impl": "deep_gemm"}
    none = [each[:0] for each in queries[:2]]
    found = ops.indexer_logits(*none, queries[2], lens[:0], requests[:0], table, **settings)
    assert found.shape == (0, 70)
    for cache, held in ((queries[2][:0], table), (queries[2], table[:, :0])):
        found = ops.indexer_logits(*queries[:2], cache, lens, requests, held, **settings)
        assert bool((found == -torch.inf).all())
    assert deep_gemm.calls == 0


@pytest.mark.slow
def test_deep_gemm_is_in_no_package(deep_gemm, tmp_path, monkeypatch):
    queries, lens, rows = indexer_call(2)

    def packaged(impl):
        class Call(torch.nn.Module):
            def forward(self, *tensors):
                return ops.indexer_logits(*tensors, block_size=64, num_rows=256, impl=impl)

        program = torch.export.export(Call(), (*queries, lens, *rows))
        return build_package(program, tmp_path / f"{impl}.pt2")

    text = "indexer_logits: impl must be another in an AOTInductor package, got 'deep_gemm'. "
    text += "Its functions are no ops of torch, and a package calls nothing else."
    with pytest.raises(Exception, match=re.escape(text)):
        packaged("deep_gemm")
    if torch.__version__ < "2.12":  # earlier CPU packages do not compile with FP8 arguments
        return
    # in a package, auto selects ours: here the reference, as there is no GPU
    monkeypatch.setattr(choice, "is_faster", faster_from("indexer_logits", "deep_gemm", 1))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    monkeypatch.setattr(choice, "ours", lambda spec: "reference")
    case = (*queries, lens, *rows)
    found = providers.choice_of("indexer_logits", *case, block_size=64, num_rows=256)
    assert found.impl == "deep_gemm"
    with torch._inductor.config.patch({"aot_inductor.package_cpp_only": True}):
        package = zipfile.ZipFile(packaged("auto"))
    files = [package.read(name) for name in package.namelist()]
    assert any(b"cpp_fused" in file for file in files)
    assert not any(b"deep_gemm" in file for file in files)
    assert deep_gemm.calls == 0
