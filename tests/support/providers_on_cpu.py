"""Fakes of the libraries of ``impl=`` on a CPU: fixtures, and helpers of their tests."""

import sys
from functools import partial

import pytest
import torch
import torch._inductor.config

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS, REFERENCE
from dsv4_ops.dispatch import choice, libraries, providers
from dsv4_ops.kernels.external import flash_mla as adapter
from tests.fakes import flash_mla as fake_flash_mla
from tests.fakes.deep_gemm import FakeDeepGemm
from tests.support import attention_batches as batches
from tests.support.mla_batches import DENSE, DS_FP8, SPARSE, flash_mla_case, mla_case
from tests.support.prefill_batches import PREFILL, prefill_case

LIBRARY_OPS = {
    "flash_mla": (batches.DECODE, batches.PAGED, PREFILL, batches.GATHERED, DENSE, SPARSE),
    "deep_gemm": ("indexer_logits", "indexer_select"),
}
UNUSABLE = choice.unusable
CHOICES = [name for name, spec in OPS.items() if spec.has_choice]
CASES = {
    batches.DECODE: lambda seed, heads=64: batches.decode_case(seed, 7, heads),
    batches.PAGED: lambda seed, heads=64: batches.paged_case(seed, 7, heads, columns=70),
    PREFILL: lambda seed, heads=64: prefill_case(seed, 7, heads, "C4", longest=300, topk=70),
    batches.GATHERED: lambda seed, heads=64: batches.gathered_case(seed, 7, heads, 130),
    DENSE: lambda seed, heads=64: mla_case(seed, [2, 1, 3], heads, longest=200),
    SPARSE: lambda seed, heads=64: flash_mla_case(
        mla_case(seed, [2, 1, 3], heads, longest=200, layout=(DS_FP8, "plain")[seed % 2])
    ),
}


def call(name: str, case, **settings):
    return getattr(ops, name)(*case.tensors, **{**case.settings, **settings})


def present_in(case) -> list[int]:
    return [place for place, tensor in enumerate(case.tensors) if tensor is not None]


def run_of(name: str, case, present: list[int], **settings):
    """Return the call as a function of the tensors at the places ``present``."""

    def run(*tensors):
        given = list(case.tensors)
        for place, tensor in zip(present, tensors, strict=True):
            given[place] = tensor
        return tuple(getattr(ops, name)(*given, **{**case.settings, **settings}))

    return run


def message(error: type[Exception], name: str, case, **settings) -> str:
    with pytest.raises(error) as caught:
        call(name, case, **settings)
    assert type(caught.value) is error
    return str(caught.value)


@pytest.fixture
def scalar_loops():
    """Turn SIMD off: SIMD code takes the C++ compiler twice as long, and no test here needs it."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def on_cpu(monkeypatch):
    """Let adapters of libraries run on a CPU, to test their logic."""
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    torch._dynamo.reset()
    UNUSABLE.cache_clear()
    with torch._inductor.config.patch(force_disable_caches=True):  # tables are patched
        yield
    UNUSABLE.cache_clear()


@pytest.fixture
def no_kernels(monkeypatch):
    """Run the reference for calls that no library takes."""
    monkeypatch.setattr(choice, "ours", lambda spec: REFERENCE)


@pytest.fixture
def flash_mla(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    monkeypatch.setattr(adapter, "num_sm_parts", lambda device, heads: fake_flash_mla.PARTS)
    fake_flash_mla.calls.clear()
    fake_flash_mla.plans.clear()
    with fake_flash_mla.registered():
        yield fake_flash_mla
    torch._dynamo.reset()


def plan_of(case, **changed) -> providers.FlashMlaPlan:
    q, _, swa, _, _, extra = case.tensors[:6]
    width = 0 if extra is None else extra.shape[1]
    sizes = {"num_heads": q.shape[1], "swa_width": swa.shape[1], "extra_width": width}
    return providers.flash_mla_plan(q.shape[0], **{**sizes, "device": "cpu", **changed})


MODULE = """
import types
from tests.fakes import flash_mla as fake_flash_mla

def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    return fake_flash_mla.prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, None)

cuda = types.SimpleNamespace(
    sparse_decode_fwd=lambda *given: fake_flash_mla.decode(*given, None),
    dense_decode_fwd=lambda *given: fake_flash_mla.dense_decode(*given, None),
)
flash_mla_interface = types.SimpleNamespace(flash_mla_cuda=cuda)
"""


@pytest.fixture
def flash_mla_module(on_cpu, monkeypatch, tmp_path):
    """Fake DeepSeek's own module, whose functions are not ops."""
    (tmp_path / "flash_mla.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("DSV4_OPS_FLASH_MLA", raising=False)
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    libraries.load.cache_clear()
    fake_flash_mla.calls.clear()
    fake_flash_mla.plans.clear()
    yield
    libraries.load.cache_clear()
    sys.modules.pop("flash_mla", None)


reference_logits = partial(ops.indexer_logits, impl="reference")
reference_select = partial(ops.indexer_select, impl="reference")


@pytest.fixture
def deep_gemm(on_cpu, monkeypatch):
    library = FakeDeepGemm()
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    libraries.load.cache_clear()
    yield library
    libraries.load.cache_clear()
    torch._dynamo.reset()


def faster_from(op: str, library: str, tokens: int):
    """Return a stand-in for ``choice.is_faster``: the library is faster from ``tokens`` on."""

    def is_faster(name, other, values):
        return (name, other) == (op, library) and values["q"].shape[0] >= tokens

    return is_faster
