"""``impl=``: which implementation runs, which calls are refused and why, and what ``auto`` selects.
tests/gpu/test_providers.py runs the libraries."""

import sys

import pytest
import torch
import torch._inductor.config

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import choice, libraries, limits, providers
from tests.support import providers_on_cpu
from tests.support.attention_batches import DECODE, GATHERED, decode_case
from tests.support.mla_batches import DENSE, SPARSE, mla_case, sparse_case
from tests.support.prefill_batches import PREFILL
from tests.support.providers_on_cpu import CASES, CHOICES, LIBRARY_OPS, faster_from, message

pytest_plugins = ("tests.support.providers_on_cpu",)


def test_ops_with_a_choice_name_their_executions():
    for library, names in LIBRARY_OPS.items():
        assert {name for name in CHOICES if library in OPS[name].providers} == set(names)
    for name in CHOICES:
        assert set(OPS[name].providers) <= {*choice.IMPLS, libraries.SCALED_MM} - {"auto"}
        for library in set(OPS[name].providers) & set(libraries.LIBRARIES):
            assert callable(OPS[name].launcher(library))


@pytest.mark.parametrize("name", CHOICES)
def test_auto_and_the_reference_are_the_same_on_cpu(name):
    for case in testing.cases_of(name):
        ours = case.run(getattr(ops, name))
        for impl in ("auto", "reference"):
            settings = {**case.settings, "impl": impl}
            again = type(case)(case.name, case.tensors, settings).run(getattr(ops, name))
            for left, right in zip(ours, again, strict=True):
                assert torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("name", CHOICES)
def test_an_explicit_impl_never_falls_back_on_cpu(name):
    case = next(each for each in testing.cases_of(name) if all(each.tensors[0].shape))
    for impl in OPS[name].providers:
        if impl == "reference":
            continue
        assert message(RuntimeError, name, case, impl=impl) == (
            f"{name}: impl must be 'auto' or 'reference' on cpu, got {impl!r}. "
            "Move the tensors to a CUDA device."
        )
        with pytest.raises(RuntimeError, match="impl must be 'auto' or 'reference' on cpu"):
            OPS[name].op(*case.tensors, **{**case.settings, "impl": impl})


def test_an_unknown_impl_is_refused():
    case = testing.cases_of(GATHERED)[0]
    allowed = "'auto', 'triton', 'flash_mla' or 'reference'"
    text = f"sparse_mla_gathered: impl must be {allowed}, got 'deep_gemm'. Pass one of these."
    assert message(ValueError, GATHERED, case, impl="deep_gemm") == text
    text = f"sparse_mla_gathered: impl must be a str, got int. Pass {allowed}."
    assert message(TypeError, GATHERED, case, impl=3) == text


def test_a_missing_library_says_how_to_get_it(on_cpu, monkeypatch):
    for library, (name, *_) in LIBRARY_OPS.items():
        monkeypatch.delenv(libraries.VARIABLES[library], raising=False)
        with pytest.raises(ImportError) as error:
            choice.require(name, library)
        assert str(error.value) == (
            f"{name}: impl must be one that runs here, got {library!r}. "
            f"{choice._NAMES[library]}: not installed: install vLLM, which has a build, or name "
            f"a path in {libraries.VARIABLES[library]}."
        )
        providers_on_cpu.UNUSABLE.cache_clear()


def test_a_library_that_does_not_run_here_says_why(on_cpu, monkeypatch):
    found = libraries.Found("somewhere", object)
    monkeypatch.setattr(libraries, "find", lambda name: found)
    monkeypatch.setattr("dsv4_ops.dispatch.probes.no_gpu_reason", lambda: "no driver")
    with pytest.raises(RuntimeError) as error:
        choice.require(DECODE, "flash_mla")
    assert type(error.value) is RuntimeError
    assert str(error.value) == (
        "sparse_mla_decode: impl must be one that runs here, got 'flash_mla'. "
        "FlashMLA: needs a CUDA device: no driver (found: somewhere)."
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


@pytest.mark.parametrize("name", [each for each in LIBRARY_OPS["flash_mla"] if each != DENSE])
def test_what_flash_mla_does_not_take_is_refused(name, on_cpu):
    heads = CASES[name](0, 8)
    others = "'auto', 'triton' or 'reference'"
    text = f"{name}: impl must be {others} with 8 heads, got 'flash_mla'. FlashMLA takes 64 or 128."
    assert message(NotImplementedError, name, heads, impl="flash_mla") == text
    settings = {"layout": "v4_fp8", "num_splits": 0, "batch_invariant": False, **heads.settings}
    known = {key: settings[key] for key in OPS[name].parameters if key in settings}
    with pytest.raises(NotImplementedError) as error:  # as exported programs call the op
        OPS[name].op(*heads.tensors, **known, impl="flash_mla")
    assert str(error.value) == text
    if name in (GATHERED, PREFILL):
        return
    case = CASES[name](0)
    text = f"{name}: impl must be {others} with num_splits or batch_invariant, got 'flash_mla'. "
    text += "FlashMLA decides itself what it splits."
    for setting in ({"num_splits": 2}, {"batch_invariant": True}):
        assert message(NotImplementedError, name, case, impl="flash_mla", **setting) == text


def dense(heads=4, **made):
    return mla_case(0, [2], heads, longest=64, **made)


def apart(case):
    """Return the call with gaps between the blocks of its caches."""
    q, cache, *rest = case.tensors
    wide = torch.zeros(cache.shape[0], 65, 576).bfloat16()[:, :64]
    settings = {name: case.settings[name] for name in ("softmax_scale", "block_size")}
    return type(case)("apart", (q, wide, *rest), settings)


@pytest.mark.parametrize(
    ("name", "make", "impl", "changed", "what", "takes"),
    [
        (DENSE, lambda: dense(129), "flash_mla", {}, "129 heads", "FlashMLA takes up to 128."),
        (DENSE, lambda: dense(layout="mla_fp8"), "flash_mla", {},
         "layout 'mla_fp8' and torch.bfloat16 queries",
         "FlashMLA takes plain bfloat16 or float16 rows."),
        (DENSE, lambda: dense(width=80, rank=64), "flash_mla", {},
         "rows of 80 values, of which 64 are the latent",
         "FlashMLA takes rows of 576, of which 512 are the latent."),
        (DENSE, lambda: dense(block_size=16), "flash_mla", {}, "block_size 16",
         "FlashMLA reads pages of 64 rows."),
        (DENSE, dense, "flash_mla", {"num_splits": 2}, "num_splits or batch_invariant",
         "FlashMLA decides itself what it splits."),
        (SPARSE, lambda: sparse_case(dense(64, width=80, rank=64)), "flash_mla", {},
         "torch.bfloat16 queries of 80 values, of which 64 are the latent",
         "FlashMLA takes bfloat16 queries of 576, of which 512 are the latent."),
        (SPARSE, lambda: apart(sparse_case(dense(64))), "flash_mla", {},
         "blocks that lie apart", "FlashMLA reads plain rows one after the other."),
        (SPARSE, lambda: CASES[SPARSE](0), "flash_mla", {},
         "7 tokens over layout 'mla_ds_fp8'", "FlashMLA takes up to 3."),
        (GATHERED, lambda: testing.cases_of(GATHERED)[0], "flash_mla", {},
         "torch.float32 rows of 2 values", "FlashMLA takes bfloat16 rows of 512."),
        ("indexer_logits", lambda: testing.cases_of("indexer_logits")[0], "deep_gemm", {},
         "2 heads", "DeepGEMM takes 32 or 64."),
    ],
)  # fmt: skip
def test_calls_that_a_library_does_not_take_are_refused(
    name, make, impl, changed, what, takes, on_cpu, monkeypatch
):
    monkeypatch.setattr(limits, "FLASH_MLA_TOKENS", 3)
    assert message(NotImplementedError, name, make(), impl=impl, **changed) == (
        f"{name}: impl must be 'auto', 'triton' or 'reference' with {what}, got {impl!r}. {takes}"
    )


def test_auto_goes_by_the_table(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "is_faster", faster_from(DECODE, "flash_mla", 6))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    case = decode_case(0, 7, 64)
    monkeypatch.setattr(choice, "unusable", lambda library: "not installed")
    decode = providers.choice_of(DECODE, *case.tensors, **case.settings)
    assert decode == ("triton", "not installed")
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    assert providers.choice_of(DECODE, *case.tensors, **case.settings).impl == "flash_mla"
    fewer = decode_case(0, 5, 64)
    other = "flash_mla was not faster at these sizes on an H200"
    assert providers.choice_of(DECODE, *fewer.tensors, **fewer.settings) == ("triton", other)
    invariant = {**case.settings, "batch_invariant": True}
    assert providers.choice_of(DECODE, *case.tensors, **invariant).impl == "triton"
    asked = {**case.settings, "impl": "reference"}
    assert providers.choice_of(DECODE, *case.tensors, **asked) == ("reference", "asked for")


def test_choice_of_refuses_what_is_no_op():
    with pytest.raises(ValueError, match=r"^choice_of: op must be the name of an op, got 'token'"):
        providers.choice_of("token")


def test_deep_gemm_is_taken_from_the_sizes_on_that_it_was_measured_at():
    def faster(tokens, columns, heads=64, op="indexer_logits", library="deep_gemm"):
        values = {"q": torch.empty(tokens, heads, 128, device="meta"), "num_rows": columns}
        return choice.is_faster(op, library, values)

    assert faster(32, 32768)
    assert faster(512, 2048)
    for tokens, columns in ((31, 65536), (512, 2047), (32, 32767), (4097, 2048)):
        assert not faster(tokens, columns)
    for changed in ({"heads": 32}, {"op": "indexer_select"}, {"library": "flash_mla"}):
        assert not faster(32, 32768, **changed)


def test_a_plan_of_ours_has_auto_take_ours(on_cpu, monkeypatch):
    monkeypatch.setattr(choice, "is_faster", faster_from(DECODE, "flash_mla", 1))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    case = decode_case(1, 7, 64)
    tensors = list(case.tensors)
    assert providers.choice_of(DECODE, *tensors, **case.settings).impl == "flash_mla"
    tensors[8] = ops.sparse_mla_plan(tensors[3], tensors[6], num_heads=64)
    found = providers.choice_of(DECODE, *tensors, **case.settings)
    assert found == ("triton", "the plan is ours")
