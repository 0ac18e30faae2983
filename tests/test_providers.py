"""``impl=``: what runs, what is refused and why, and the adapters' logic over stand-ins for the
libraries. With the libraries themselves: tests/test_gpu_providers.py."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fake_flash_mla
import pytest
import torch
import torch._inductor.config
from fake_deep_gemm import FakeDeepGemm, indexer_call
from gpu_attention import DECODE, GATHERED, PAGED, decode_case, gathered_case, paged_case

import dsv4_ops as ops
from dsv4_ops import providers, testing
from dsv4_ops.bench import choice as bench_choice
from dsv4_ops.core import choice, libraries
from dsv4_ops.core.measured import RULES, Rule, Sizes
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering import measure
from dsv4_ops.lowering.inspect import (
    build_package,
    compile_and_get_code,
    load_package,
    opaque_calls,
)
from dsv4_ops.testing.compare import assert_agrees

LIBRARY_OPS = {
    "flash_mla": (DECODE, PAGED, GATHERED),
    "deep_gemm": ("indexer_logits", "indexer_select"),
}
UNUSABLE = choice.unusable
CHOICES = [name for name, spec in OPS.items() if spec.has_choice]
CASES = {
    DECODE: lambda seed, heads=64: decode_case(seed, 7, heads),
    PAGED: lambda seed, heads=64: paged_case(seed, 7, heads, columns=70),
    GATHERED: lambda seed, heads=64: gathered_case(seed, 7, heads, 130),
}


def call(name: str, case, **settings):
    return getattr(ops, name)(*case.tensors, **{**case.settings, **settings})


def message(error: type[Exception], name: str, case, **settings) -> str:
    with pytest.raises(error) as caught:
        call(name, case, **settings)
    assert type(caught.value) is error
    return str(caught.value)


def test_ops_with_a_choice_name_their_executions():
    for library, names in LIBRARY_OPS.items():
        assert {name for name in CHOICES if library in OPS[name].providers} == set(names)
    for name in CHOICES:
        assert set(OPS[name].providers) <= set(choice.IMPLS) - {"auto"}
        for library in set(OPS[name].providers) & set(libraries.LIBRARIES):
            assert callable(OPS[name].launcher(library))


# --- on a machine without the libraries


@pytest.mark.parametrize("name", CHOICES)
def test_auto_and_the_reference_are_the_same_on_cpu(name):
    for case in testing.cases(name):
        ours = case.run(getattr(ops, name))
        for impl in ("auto", "reference"):
            settings = {**case.settings, "impl": impl}
            again = type(case)(case.name, case.tensors, settings).run(getattr(ops, name))
            for left, right in zip(ours, again, strict=True):
                assert torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("name", CHOICES)
def test_an_explicit_impl_never_falls_back_on_cpu(name):
    case = next(each for each in testing.cases(name) if all(each.tensors[0].shape))
    for impl in OPS[name].providers:
        if impl == "reference":
            continue
        text = message(RuntimeError, name, case, impl=impl)
        assert text == (
            f"{name}: impl must be 'auto' or 'reference' on cpu, got {impl!r}. "
            "Move the tensors to a CUDA device."
        )
        with pytest.raises(RuntimeError, match="impl must be 'auto' or 'reference' on cpu"):
            OPS[name].op(*case.tensors, **{**case.settings, "impl": impl})


def test_an_unknown_impl_is_refused():
    case = testing.cases(GATHERED)[0]
    text = "sparse_mla_gathered: impl must be 'auto', 'flash_mla' or 'reference', got 'triton'. "
    assert message(ValueError, GATHERED, case, impl="triton") == text + "Pass one of these."
    text = "sparse_mla_gathered: impl must be a str, got int. "
    text += "Pass 'auto', 'flash_mla' or 'reference'."
    assert message(TypeError, GATHERED, case, impl=3) == text


@pytest.fixture
def on_cpu(monkeypatch):
    """Executions may run on CPU, for their logic."""
    monkeypatch.setattr(choice, "DEVICES", ("cuda", "cpu"))
    torch._dynamo.reset()
    UNUSABLE.cache_clear()
    with torch._inductor.config.patch(force_disable_caches=True):  # of patched tables and choices
        yield
    UNUSABLE.cache_clear()


def test_a_missing_library_says_how_to_get_it(on_cpu, monkeypatch):
    for library, (name, *_) in LIBRARY_OPS.items():
        monkeypatch.delenv(libraries.VARIABLES[library], raising=False)
        with pytest.raises(ImportError) as error:
            choice.require(name, library)
        extra, variable = library.replace("_", "-"), libraries.VARIABLES[library]
        assert str(error.value) == (
            f"{name}: impl must be one that runs here, got {library!r}. "
            f"{library.replace('_', ' ').capitalize()}: not installed (extra {extra}, vLLM's "
            f"build, or a path in {variable})."
        )
        UNUSABLE.cache_clear()


def test_a_library_that_does_not_run_here_says_why(on_cpu, monkeypatch):
    found = libraries.Found("somewhere", object)
    monkeypatch.setattr(libraries, "find", lambda name: found)
    monkeypatch.setattr("dsv4_ops.core.providers.no_gpu_reason", lambda: "no driver")
    with pytest.raises(RuntimeError) as error:
        choice.require(DECODE, "flash_mla")
    assert type(error.value) is RuntimeError
    assert str(error.value) == (
        "sparse_mla_decode: impl must be one that runs here, got 'flash_mla'. "
        "Flash mla: needs a CUDA device: no driver (found: somewhere)."
    )


def test_a_path_that_names_nothing_is_not_replaced_by_another(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_OPS_FLASH_MLA", str(tmp_path / "none.so"))
    monkeypatch.setenv("DSV4_OPS_DEEP_GEMM", str(tmp_path))
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: object())
    assert libraries.find("flash_mla") == (
        f"DSV4_OPS_FLASH_MLA names no such thing as a library: {tmp_path / 'none.so'}"
    )
    assert libraries.find("deep_gemm") == (
        f"DSV4_OPS_DEEP_GEMM names no such thing as a folder with deep_gemm: {tmp_path}"
    )


def test_libraries_are_found_in_vllm_without_importing_it(monkeypatch, tmp_path):
    folder = tmp_path / "vllm"
    (folder / "third_party" / "deep_gemm").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "third_party" / "deep_gemm" / "__init__.py").write_text("found = 1")
    build = folder / "_flashmla_C.abi3.so"
    build.write_bytes(b"no library")
    for variable in libraries.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    libraries.load.cache_clear()
    assert libraries.find("flash_mla").where == str(build)
    with pytest.raises(OSError, match="_flashmla_C"):
        libraries.load("flash_mla")
    assert libraries.find("deep_gemm").where == str(folder / "third_party" / "deep_gemm")
    assert libraries.load("deep_gemm").found == 1
    libraries.load.cache_clear()
    assert sys.modules.pop("deep_gemm").found == 1
    assert "vllm" not in sys.modules


def test_a_broken_deep_gemm_is_not_left_behind(monkeypatch, tmp_path):
    folder = tmp_path / "deep_gemm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('no CUDA_HOME')")
    monkeypatch.setenv("DSV4_OPS_DEEP_GEMM", str(folder))
    libraries.load.cache_clear()
    with pytest.raises(AssertionError, match="no CUDA_HOME"):
        libraries.load("deep_gemm")
    assert "deep_gemm" not in sys.modules


@pytest.mark.parametrize("name", LIBRARY_OPS["flash_mla"])
def test_what_flash_mla_does_not_take_is_refused(name, on_cpu):
    heads = CASES[name](0, 8)
    others = "'auto', 'triton' or 'reference'" if name != GATHERED else "'auto' or 'reference'"
    assert message(NotImplementedError, name, heads, impl="flash_mla") == (
        f"{name}: impl must be {others} with 8 heads, got 'flash_mla'. FlashMLA takes 64 or 128."
    )
    if name == GATHERED:
        return
    case = CASES[name](0)
    text = f"{name}: impl must be {others} with num_splits or batch_invariant, got 'flash_mla'. "
    text += "FlashMLA decides itself what it splits."
    for setting in ({"num_splits": 2}, {"batch_invariant": True}):
        assert message(NotImplementedError, name, case, impl="flash_mla", **setting) == text


def test_rows_that_flash_mla_does_not_take_are_refused(on_cpu):
    case = testing.cases(GATHERED)[0]
    assert message(NotImplementedError, GATHERED, case, impl="flash_mla") == (
        "sparse_mla_gathered: impl must be 'auto' or 'reference' with torch.float32 rows of 2 "
        "values, got 'flash_mla'. FlashMLA takes bfloat16 rows of 512."
    )


def test_what_deep_gemm_does_not_take_is_refused(on_cpu):
    case = testing.cases("indexer_logits")[0]
    heads = case.tensors[0].shape[1]
    assert message(NotImplementedError, "indexer_logits", case, impl="deep_gemm") == (
        "indexer_logits: impl must be 'auto', 'triton' or 'reference' with "
        f"{heads} heads, got 'deep_gemm'. DeepGEMM takes 32 or 64."
    )


# --- what auto takes


def rule_of(op: str, library: str, tokens: int, columns: int) -> Rule:
    return Rule(op, library, 64, False, tokens, columns, (0, 2**62), (2.0, 1.0))


def test_auto_goes_by_the_table(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "RULES", (rule_of(DECODE, "flash_mla", 6, 640),))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    case = decode_case(0, 7, 64)
    monkeypatch.setattr(choice, "unusable", lambda library: "not installed")
    assert providers.choice_of(DECODE, *case.tensors, **case.settings) == (
        "triton",
        "not installed",
    )
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    assert providers.choice_of(DECODE, *case.tensors, **case.settings).impl == "flash_mla"
    fewer = decode_case(0, 5, 64)
    other = "flash_mla was not faster at these sizes on an H200"
    assert providers.choice_of(DECODE, *fewer.tensors, **fewer.settings) == ("triton", other)
    invariant = {**case.settings, "batch_invariant": True}
    assert providers.choice_of(DECODE, *case.tensors, **invariant).impl == "triton"
    assert providers.choice_of(DECODE, *case.tensors, **case.settings, impl="reference") == (
        "reference",
        "asked for",
    )


def test_choice_of_refuses_an_op_without_a_choice():
    with pytest.raises(ValueError, match=r"^choice_of: op must be one of .*, got 'token_map'\."):
        providers.choice_of("token_map")


def test_rules_are_about_ops_and_sizes_that_the_libraries_take():
    for rule in RULES:
        assert rule.library in OPS[rule.op].providers
        assert rule.heads in (None, 32, 64, 128)
        assert rule.tokens >= 1
        ours, theirs = rule.measured
        assert theirs < 0.97 * ours
        least = Sizes(rule.tokens, rule.heads or 64, rule.columns, rule.planned)
        assert rule.covers(rule.op, rule.library, least) == (
            rule.work[0] <= rule.tokens * rule.columns
        )
        assert not rule.covers(rule.op, rule.library, least._replace(tokens=rule.tokens - 1))
        assert not rule.covers(rule.op, rule.library, least._replace(planned=not rule.planned))
        assert not rule.planned or rule.library == "flash_mla"


# --- FlashMLA's adapter, over a stand-in


@pytest.fixture
def flash_mla(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    fake_flash_mla.calls.clear()
    with fake_flash_mla.registered():
        yield fake_flash_mla
    torch._dynamo.reset()


def check(name: str, case, actual, what: str = "flash_mla") -> None:
    expected = case.run(OPS[name].reference)
    assert_agrees(f"{name}, {what}", testing.station(name), case, actual, expected)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("name", LIBRARY_OPS["flash_mla"])
def test_the_adapter_gives_what_the_reference_gives(name, heads, flash_mla):
    """Hostile slots and lens, lists of odd widths, NaN in unused rows, sinks of inf, tokens without
    keys: the stand-in refuses what the library would misread."""
    for seed in range(3):
        case = CASES[name](seed, heads)
        check(name, case, call(name, case, impl="flash_mla"))
    assert flash_mla.calls


def test_a_window_alone_and_widths_that_are_no_multiple(flash_mla):
    case = decode_case(1, 3, 64, None)
    check(DECODE, case, call(DECODE, case, impl="flash_mla"))
    tensors = list(case.tensors)
    tensors[2] = tensors[2][:, :37]
    narrow = type(case)("narrow", tuple(tensors), case.settings)
    check(DECODE, narrow, call(DECODE, narrow, impl="flash_mla"))


def test_no_token_and_no_page(flash_mla):
    case = decode_case(1, 3, 64)
    per_token = (0, 2, 3, 5, 6)
    tensors = [each[:0] if place in per_token else each for place, each in enumerate(case.tensors)]
    out, lse = call(DECODE, type(case)("none", tuple(tensors), case.settings), impl="flash_mla")
    assert (out.shape, lse.shape) == ((0, 64, 512), (0, 64))
    assert flash_mla.calls == []
    tensors = list(case.tensors)
    tensors[1], tensors[4] = tensors[1][:0], tensors[4][:0]
    empty = type(case)("no page", tuple(tensors), case.settings)
    out, lse = call(DECODE, empty, impl="flash_mla")
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def test_the_rotation_is_undone_behind_it(flash_mla):
    table = ops.rope_cos_sin_cache(64, theta=10000.0)
    positions = torch.tensor([0, 5, -1, 63, 64, 9, 2**62])
    case = decode_case(2, 7, 64)
    tensors = (*case.tensors[:-2], positions, table)
    turned = type(case)("turned", tensors, case.settings)
    check(DECODE, turned, call(DECODE, turned, impl="flash_mla"))


def plan_of(case, **changed) -> providers.FlashMlaPlan:
    q, _, swa, _, _, extra = case.tensors[:6]
    sizes = {"num_heads": q.shape[1], "swa_width": swa.shape[1], "extra_width": extra.shape[1]}
    return providers.flash_mla_plan(q.shape[0], **{**sizes, "device": "cpu", **changed})


def planned(case, plan):
    tensors = list(case.tensors)
    tensors[8] = plan
    return ops.sparse_mla_decode(*tensors, **case.settings, impl="flash_mla")


def test_a_plan_serves_every_call_of_its_sizes(flash_mla):
    """The lens of these differ: the stand-in refuses a plan that they decide."""
    first, second = (decode_case(seed, 7, 64) for seed in (1, 2))
    plan = plan_of(first)
    assert len(flash_mla.calls) == 1
    for case in (first, second):
        check(DECODE, case, planned(case, plan))


@pytest.mark.parametrize("name", ["num_tokens", "num_heads", "swa_width", "extra_width"])
def test_a_plan_of_other_sizes_is_refused(name, flash_mla):
    case = decode_case(1, 7, 64)
    plan = plan_of(case)
    other = plan._replace(**{name: getattr(plan, name) + 1})
    with pytest.raises(ValueError, match="plan must be made for") as caught:
        planned(case, other)
    assert str(caught.value) == (
        f"sparse_mla_decode: plan must be made for {name} = {getattr(plan, name)}, got one for "
        f"{getattr(other, name)}. Make one of flash_mla_plan for every size of batch."
    )


def test_a_plan_goes_with_its_kernel(flash_mla):
    case = decode_case(1, 7, 64)
    tensors = list(case.tensors)
    tensors[8] = plan_of(case)
    mixed = type(case)("theirs", tuple(tensors), case.settings)
    assert message(ValueError, DECODE, mixed, impl="triton") == (
        "sparse_mla_decode: plan must be a tensor of sparse_mla_plan for impl 'triton', got a "
        "FlashMlaPlan. Pass impl='flash_mla', or leave it out."
    )
    assert message(ValueError, DECODE, mixed, num_splits=2) == (
        "sparse_mla_decode: num_splits must be 0 with a plan, got 2. Pass one of the two."
    )
    tensors[8] = ops.sparse_mla_plan(tensors[3], tensors[6], num_heads=64)
    mixed = type(case)("ours", tuple(tensors), case.settings)
    assert message(ValueError, DECODE, mixed, impl="flash_mla") == (
        "sparse_mla_decode: plan must be one of flash_mla_plan for impl 'flash_mla', got a tensor. "
        "Make it with flash_mla_plan, or leave it out."
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0. Pass 1 or more."),
        ({"num_tokens": 8193}, "num_tokens must be at most 8192, got 8193. Split the batch."),
        ({"num_heads": 32}, "num_heads must be 64 or 128, got 32. FlashMLA takes no other."),
        ({"swa_width": 0}, "swa_width must be at least 1, got 0. Pass 1 or more."),
        ({"extra_width": -1}, "extra_width must be at least 0, got -1. Pass 0 or more."),
    ],
)
def test_a_plan_needs_sizes_that_flash_mla_takes(arguments, text):
    sizes = {"num_tokens": 7, "num_heads": 64, "swa_width": 128, **arguments}
    with pytest.raises(ValueError, match=r"^flash_mla_plan: ") as caught:
        providers.flash_mla_plan(sizes.pop("num_tokens"), **sizes)
    assert str(caught.value) == f"flash_mla_plan: {text}"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LIBRARY_OPS["flash_mla"])
def test_compiled_code_calls_the_op_of_the_library(name, dynamic, flash_mla):
    case = CASES[name](3)
    present = [place for place, tensor in enumerate(case.tensors) if tensor is not None]

    def run(*tensors):
        given = list(case.tensors)
        for place, tensor in zip(present, tensors, strict=True):
            given[place] = tensor
        return tuple(getattr(ops, name)(*given, **case.settings, impl="flash_mla"))

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    actual, code = compile_and_get_code(compiled, *(case.tensors[place] for place in present))
    check(name, case, actual, "compiled")
    op = "sparse_prefill_fwd" if name == GATHERED else "sparse_decode_fwd"
    calls = [line for line in code.splitlines() if f"torch.ops._flashmla_C.{op}" in line]
    assert len([line for line in calls if "#" not in line]) == 1, calls
    assert [line for line in opaque_calls(code) if not line.startswith("assert_")] == []
    if name != GATHERED:  # the caches are passed as they are
        cache = case.tensors[1]
        assert f"empty_strided_cpu(({cache.shape[0]}," not in code


def test_a_symbolic_batch_has_auto_take_ours(flash_mla, monkeypatch):
    """And is compiled once."""
    monkeypatch.setattr(choice, "RULES", (rule_of(DECODE, "flash_mla", 2, 1),))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    seen = []
    monkeypatch.setattr(choice, "ours", lambda spec: seen.append(spec.name) or "reference")
    compiled = torch.compile(
        lambda *tensors: ops.sparse_mla_decode(*tensors, **case.settings).out,
        fullgraph=True,
        dynamic=True,
    )
    for tokens in (5, 9):
        case = decode_case(1, tokens, 64)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(*case.tensors[:8])
    assert seen
    assert flash_mla.calls == []
    torch._dynamo.reset()
    case = decode_case(1, 5, 64)
    torch.compile(lambda *t: ops.sparse_mla_decode(*t, **case.settings).out, dynamic=False)(
        *case.tensors[:8]
    )
    assert flash_mla.calls == ["decode"]


@pytest.mark.slow
def test_a_package_needs_the_library_only(flash_mla, tmp_path):
    """In this process; in one that has only torch and the library: tests/test_gpu_providers.py."""
    case = decode_case(3, 7, 64)
    given = case.tensors[:8]

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return tuple(ops.sparse_mla_decode(*tensors, **case.settings, impl="flash_mla"))

    program = torch.export.export(Call(), given, dynamic_shapes=None)
    assert [node.target for node in program.graph.nodes if node.target is OPS[DECODE].op]
    run = load_package(build_package(program, tmp_path / "decode.pt2"))
    flash_mla.calls.clear()
    check(DECODE, case, run(*given), "packaged")
    assert flash_mla.calls == ["decode"]


MODULE = """
import types
import fake_flash_mla

def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    return fake_flash_mla.prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, None)

cuda = types.SimpleNamespace(sparse_decode_fwd=lambda *given: fake_flash_mla.decode(*given, None))
flash_mla_interface = types.SimpleNamespace(flash_mla_cuda=cuda)
"""


@pytest.fixture
def flash_mla_module(on_cpu, monkeypatch, tmp_path):
    """DeepSeek's own module, whose functions are no ops."""
    (tmp_path / "flash_mla.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("DSV4_OPS_FLASH_MLA", raising=False)
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    libraries.load.cache_clear()
    fake_flash_mla.calls.clear()
    yield
    libraries.load.cache_clear()
    sys.modules.pop("flash_mla", None)


@pytest.mark.parametrize("name", LIBRARY_OPS["flash_mla"])
def test_the_module_of_deepseek(name, flash_mla_module):
    case = CASES[name](3)
    check(name, case, call(name, case, impl="flash_mla"))
    given = case.tensors[:8]
    compiled = torch.compile(
        lambda *tensors: getattr(ops, name)(*tensors, **case.settings, impl="flash_mla"),
        fullgraph=True,
    )
    rest = case.tensors[len(given) :] if name == PAGED else ()
    check(name, case, compiled(*given, *rest), "compiled")
    assert len(fake_flash_mla.calls) == 2


def test_the_module_of_deepseek_is_in_no_package(flash_mla_module, tmp_path):
    case = CASES[GATHERED](3)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return tuple(ops.sparse_mla_gathered(*tensors, **case.settings, impl="flash_mla"))

    program = torch.export.export(Call(), case.tensors)
    with pytest.raises(Exception, match=r"impl must be another in an AOTInductor package"):
        build_package(program, tmp_path / "call.pt2")


# --- DeepGEMM's adapter, over a stand-in


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


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 100, 256, 300])
def test_the_adapter_gives_the_logits_of_the_reference(num_rows, heads, deep_gemm):
    queries, lens, rows = indexer_call(num_rows, heads=heads)
    settings = {"block_size": 64, "num_rows": num_rows}
    theirs = ops.indexer_logits(*queries, lens, *rows, **settings, impl="deep_gemm")
    assert torch.equal(theirs, reference_logits(*queries, lens, *rows, **settings))
    assert theirs.is_contiguous()
    assert deep_gemm.calls == (num_rows > 0)


@pytest.mark.parametrize("topk", [0, 1, 60, 300])
def test_the_adapter_selects_what_the_reference_selects(topk, deep_gemm):
    queries, _, rows = indexer_call(topk)
    positions = torch.tensor([1023, 800, 600, -1, 3, 2**62, 9, 9, 1023])
    settings = {"block_size": 64, "compress_ratio": 4, "topk": topk}
    theirs = ops.indexer_select(*queries, positions, *rows, **settings, impl="deep_gemm")
    assert torch.equal(theirs, reference_select(*queries, positions, *rows, **settings))
    assert deep_gemm.calls == 1


def test_an_older_deep_gemm_has_another_name(deep_gemm, monkeypatch):
    newer = deep_gemm.fp8_fp4_paged_mqa_logits
    older = SimpleNamespace(
        get_num_sms=deep_gemm.get_num_sms,
        get_paged_mqa_logits_metadata=deep_gemm.get_paged_mqa_logits_metadata,
        fp8_paged_mqa_logits=lambda q, *rest, **named: newer((q, None), *rest, **named),
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", older)
    libraries.load.cache_clear()
    queries, lens, rows = indexer_call(7)
    settings = {"block_size": 64, "num_rows": 256}
    theirs = ops.indexer_logits(*queries, lens, *rows, **settings, impl="deep_gemm")
    assert torch.equal(theirs, reference_logits(*queries, lens, *rows, **settings))


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_deep_gemm(dynamic, deep_gemm):
    queries, _, rows = indexer_call(1)
    positions = torch.arange(9) * 100
    settings = {"block_size": 64, "compress_ratio": 4, "topk": 60}
    compiled = torch.compile(
        lambda *tensors: ops.indexer_select(*tensors, **settings, impl="deep_gemm") + 1,
        fullgraph=True,
        dynamic=dynamic,
    )
    actual, code = compile_and_get_code(compiled, *queries, positions, *rows)
    assert torch.equal(actual, reference_select(*queries, positions, *rows, **settings) + 1)
    assert deep_gemm.calls == 1
    called = [line for line in opaque_calls(code) if not line.startswith("assert_")]
    assert ["_deep_gemm_logits" in line for line in called] == [True]


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
    # auto takes ours there: here the reference, for want of a GPU
    monkeypatch.setattr(choice, "RULES", (rule_of("indexer_logits", "deep_gemm", 1, 1),))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    monkeypatch.setattr(choice, "ours", lambda spec: "reference")
    case = (*queries, lens, *rows)
    found = providers.choice_of("indexer_logits", *case, block_size=64, num_rows=256)
    assert found.impl == "deep_gemm"
    run = load_package(packaged("auto"))
    expected = reference_logits(*case, block_size=64, num_rows=256)
    torch.testing.assert_close(run(*case), expected, rtol=1e-4, atol=1e-3)
    assert deep_gemm.calls == 0


# --- under max_autotune


@pytest.mark.parametrize("winner", ["flash_mla", "reference"])
def test_max_autotune_measures_what_can_run(winner, flash_mla, monkeypatch):
    """On inputs of the compiled sizes, full lists, and once per sizes."""
    timed = []

    def time_of(spec, impl, values):
        case = decode_case(1, 7, 64)
        for name, tensor in zip(spec.parameters, case.tensors[:8], strict=False):
            if "cache" not in name:
                assert (values[name].shape, values[name].dtype) == (tensor.shape, tensor.dtype)
        assert bool((values["extra_lens"] == values["extra_indices"].shape[1]).all())
        assert int(values["extra_indices"].max()) < len(values["extra_cache"]) * 64
        timed.append(impl)
        return 1.0 if impl == winner else 2.0

    monkeypatch.setattr(measure, "_time_of", time_of)
    monkeypatch.setattr(choice, "ours", lambda spec: "reference")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measure._measured.cache_clear()
    case = decode_case(1, 7, 64)
    for options in ({"max_autotune": True}, {"max_autotune": True, "max_fusion_size": 8}):
        torch._dynamo.reset()
        flash_mla.calls.clear()
        compiled = torch.compile(
            lambda *t: ops.sparse_mla_decode(*t, **case.settings),
            options=options,
            dynamic=False,
            fullgraph=True,
        )
        check(DECODE, case, compiled(*case.tensors[:8]), "max_autotune")
        assert flash_mla.calls == ["decode"] * (winner == "flash_mla")
    assert timed == ["reference", "flash_mla"]
    measure._measured.cache_clear()


@pytest.mark.parametrize("name", [*LIBRARY_OPS["flash_mla"], *LIBRARY_OPS["deep_gemm"]])
def test_inputs_that_are_measured_are_calls(name, flash_mla):
    """Every execution takes them; with a plan of FlashMLA too."""
    if name in CASES:
        case = CASES[name](0)
        tensors = list(case.tensors)
        if name == DECODE:
            tensors[8] = plan_of(case).schedule
        values = choice.arguments(OPS[name], tensors, case.settings)
    else:
        (q, weights, cache), lens, rows = indexer_call(0)
        settings = {"block_size": 64, "layout": "v4_indexer_fp8"}
        if name == "indexer_logits":
            settings["num_rows"] = 256
        else:
            lens, settings = lens.long(), {**settings, "compress_ratio": 4, "topk": 60}
        values = choice.arguments(OPS[name], (q, weights, cache, lens, *rows), settings)
    made = measure.example(name, dict(measure._signature(values)))
    assert set(made) == set(OPS[name].parameters)
    given = {**made, "plan": None} if "plan" in made else made
    expected = OPS[name].reference(**given)
    if name == "indexer_select":
        assert bool((expected >= 0).all())
    if name in CASES:
        actual = OPS[name].launcher("flash_mla")(None, **made)
        torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=1e-3)


def test_the_benchmark_of_the_table_makes_calls(flash_mla, monkeypatch, capsys):
    """Of every op and sizes that rules are about, and says which library does not run."""
    monkeypatch.setattr(bench_choice, "_BLOCKS", 3)
    for op in bench_choice.SIZES:
        rows = {"indexer_logits": 128, "indexer_select": 128}.get(op, 64)
        made = measure.example(op, bench_choice.like(op, 3, 64, rows, "cpu"))
        expected = OPS[op].reference(**{**made, "plan": None} if "plan" in made else made)
        if op in CASES:
            actual = OPS[op].launcher("flash_mla")(None, **made)
            torch.testing.assert_close(actual[0], expected[0], rtol=2e-2, atol=1e-3)
        assert {(rule.op, rule.library) for rule in RULES if rule.op == op} <= {
            (op, library) for library in OPS[op].providers
        }
    monkeypatch.setattr(bench_choice, "unusable", lambda library: "not installed")
    assert bench_choice.main() == 1
    assert "flash_mla: not installed" in capsys.readouterr().err


def test_a_plan_of_ours_has_auto_take_ours(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "RULES", (rule_of(DECODE, "flash_mla", 1, 1),))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    case = decode_case(1, 7, 64)
    tensors = list(case.tensors)
    assert providers.choice_of(DECODE, *tensors, **case.settings).impl == "flash_mla"
    tensors[8] = ops.sparse_mla_plan(tensors[3], tensors[6], num_heads=64)
    found = providers.choice_of(DECODE, *tensors, **case.settings)
    assert found == ("triton", "the plan is ours")


# --- the kernels around both


@pytest.mark.slow
def test_the_kernels_around_the_libraries():
    script = Path(__file__).parent / "interpret_foreign.py"
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, **hidden},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.splitlines() == ["flash_mla 14", "deep_gemm 5"]


# --- caches of compiled code

CACHED = """
import sys, torch
sys.path.insert(0, "tests")
import fake_flash_mla, dsv4_ops as ops
from dsv4_ops.core import choice
from gpu_attention import decode_case
choice.DEVICES = ("cuda", "cpu")
usable = sys.argv[1] == "1"
choice.unusable = lambda library: "" if usable else "gone"
case = decode_case(1, 7, 64)
run = torch.compile(lambda *t: ops.sparse_mla_decode(*t, **case.settings, impl=sys.argv[2]).out)
if usable:
    with fake_flash_mla.registered():
        run(*case.tensors[:8])
else:
    run(*case.tensors[:8])
from torch._dynamo.utils import counters
print(fake_flash_mla.calls, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_cached_code_of_a_library_is_found_by_processes_that_have_it(tmp_path):
    """The second process has not traced the call; one without the library must not find it."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}

    def process(usable: str, impl: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CACHED, usable, impl],
            capture_output=True,
            text=True,
            env=env,
            cwd=Path(__file__).parent.parent,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    assert process("1", "flash_mla") == "['decode'] 0"
    assert process("1", "flash_mla") == "['decode'] 1"
    assert process("0", "reference") == "[] 0"
