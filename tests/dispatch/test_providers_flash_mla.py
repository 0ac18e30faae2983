"""FlashMLA's adapter with a fake that refuses arguments that FlashMLA would misread."""

from itertools import product

import pytest
import torch
import torch._inductor.config

import dsv4_ops as ops
from dsv4_ops.dispatch import choice, providers
from dsv4_ops.lowering.inspect import build_package, compile_and_get_code, opaque_calls
from tests.fakes import flash_mla as fake_flash_mla
from tests.helpers import NIGHTLY, assert_right, nightly
from tests.support import providers_on_cpu
from tests.support.attention_batches import DECODE, GATHERED, PAGED, decode_case, some_tokens
from tests.support.mla_batches import DENSE, SPARSE
from tests.support.prefill_batches import PREFILL
from tests.support.providers_on_cpu import CASES, LIBRARY_OPS, call, message, plan_of, run_of

pytest_plugins = ("tests.support.providers_on_cpu",)
pytestmark = pytest.mark.usefixtures("scalar_loops")


@pytest.mark.parametrize("heads", [64, *nightly("64 heads", 128)])
@pytest.mark.parametrize("name", LIBRARY_OPS["flash_mla"])
def test_the_adapter_gives_what_the_reference_gives(name, heads, flash_mla):
    """Calls have adversarial slots and lengths, lists of odd widths, NaN in unused rows, sinks of
    inf, and tokens without keys."""
    for seed in range(3 if NIGHTLY else 2):
        case = CASES[name](seed, heads)
        assert_right(name, case, call(name, case, impl="flash_mla"))
    assert flash_mla.calls


def test_a_window_alone_and_widths_that_are_no_multiple(flash_mla):
    case = decode_case(1, 3, 64, None)
    assert_right(DECODE, case, call(DECODE, case, impl="flash_mla"))
    tensors = list(case.tensors)
    tensors[2] = tensors[2][:, :37]
    narrow = type(case)("narrow", tuple(tensors), case.settings)
    assert_right(DECODE, narrow, call(DECODE, narrow, impl="flash_mla"))


def test_no_token_and_no_page(flash_mla):
    case = decode_case(1, 3, 64)
    out, lse = call(DECODE, some_tokens(case, slice(0)), impl="flash_mla")
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
    rotated = type(case)("inverse RoPE", (*case.tensors[:-2], positions, table), case.settings)
    assert_right(DECODE, rotated, call(DECODE, rotated, impl="flash_mla"))


def test_a_plan_serves_every_call_of_its_sizes(flash_mla):
    """The calls have different lengths, and the fake refuses a plan that depends on lengths."""
    first, second = (decode_case(seed, 7, 64) for seed in (1, 2))
    plan = plan_of(first)
    assert len(flash_mla.calls) == 1
    for case in (first, second):
        assert_right(DECODE, case, planned_as(DECODE, case, plan))


def metadata_of(name, case, **changed):
    """Return the metadata for the lengths that FlashMLA gets from this call."""
    tensors, paged = case.tensors, name == PAGED
    extra = tensors[5] if paged else tensors[6]
    table = tensors[7] if paged else tensors[5]
    width = table.shape[1] * (case.settings["extra_block_size"] if paged else 1)
    sizes = {"swa_width": tensors[2].shape[1], "extra_width": width}
    sizes["num_sm_parts"] = fake_flash_mla.PARTS
    made = {"swa_lens": tensors[3], "extra_lens": extra, **sizes}
    return ops.flash_mla_metadata(**{**made, **changed})


def planned_as(name, case, plan, **settings):
    return call(name, case, **{"impl": "flash_mla", "flash_mla_plan": plan, **settings})


@pytest.mark.parametrize("name", [DECODE, PAGED])
def test_metadata_of_the_lens_is_not_made_again(name, flash_mla):
    """The fake refuses metadata for other lengths."""
    case = CASES[name](5)
    metadata = metadata_of(name, case)
    assert_right(name, case, planned_as(name, case, metadata))
    assert (flash_mla.calls, flash_mla.plans) == (["decode"], [])
    assert providers.flash_mla_num_sm_parts(64, "cpu") == flash_mla.PARTS
    call(name, case, impl="flash_mla")
    assert flash_mla.plans == [7]
    other = metadata_of(name, case, swa_lens=case.tensors[3] + 64)
    assert not torch.equal(other, metadata)
    with pytest.raises(RuntimeError, match="FlashMLA would misread a stale plan"):
        planned_as(name, case, other)


def test_metadata_is_ignored_where_flash_mla_does_not_run():
    """On a CPU, "auto" selects no library."""
    case = CASES[DECODE](5)
    metadata = metadata_of(DECODE, case)
    assert_right(DECODE, case, planned_as(DECODE, case, metadata, impl="auto"))


def test_metadata_of_a_window_alone(flash_mla):
    case = decode_case(3, 9, 64, extra=None)
    sizes = {"swa_width": case.tensors[2].shape[1], "num_sm_parts": flash_mla.PARTS}
    metadata = ops.flash_mla_metadata(case.tensors[3], **sizes)
    assert_right(DECODE, case, planned_as(DECODE, case, metadata))
    assert flash_mla.plans == []


def test_metadata_at_any_place_of_a_buffer(flash_mla):
    """FlashMLA reads rows of its metadata as units of 32 bytes, which must be aligned."""
    case = CASES[DECODE](5)
    metadata = metadata_of(DECODE, case)
    buffer = torch.zeros(metadata.numel() + 3, dtype=torch.int32)
    moved = buffer[3:].view(metadata.shape).copy_(metadata)
    assert_right(DECODE, case, planned_as(DECODE, case, moved))
    assert flash_mla.plans == []


def test_metadata_is_made_in_one_graph_with_the_call(flash_mla):
    case = decode_case(5, 7, 64)

    def both(*tensors):
        given = type(case)("given", tensors, case.settings)
        return planned_as(DECODE, given, metadata_of(DECODE, given))

    compiled = torch.compile(both, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_right(DECODE, case, compiled(*case.tensors))
    assert flash_mla.plans == []


def test_wrong_metadata_is_refused(flash_mla):
    case = decode_case(1, 7, 64)
    metadata = metadata_of(DECODE, case)
    with pytest.raises(RuntimeError, match="FlashMLA would misread a plan of other sizes"):
        planned_as(DECODE, case, metadata[1:])
    fewer = {"swa_lens": case.tensors[3][:6], "extra_lens": case.tensors[6][:6]}
    shorter = metadata_of(DECODE, case, **fewer)
    with pytest.raises(RuntimeError, match="FlashMLA would misread a plan of other sizes"):
        planned_as(DECODE, case, shorter)
    assert flash_mla.calls == ["decode"] * 2
    with pytest.raises(ValueError, match="flash_mla_num_sm_parts: num_heads must be 64 or 128"):
        providers.flash_mla_num_sm_parts(32)


@pytest.mark.parametrize("name", ["num_tokens", "num_heads", "swa_width", "extra_width"])
def test_a_plan_of_other_sizes_is_refused(name, flash_mla):
    case = decode_case(1, 7, 64)
    plan = plan_of(case)
    other = plan._replace(**{name: getattr(plan, name) + 1})
    with pytest.raises(ValueError, match="flash_mla_plan must be made for") as caught:
        planned_as(DECODE, case, other)
    assert str(caught.value) == (
        f"sparse_mla_decode: flash_mla_plan must be made for {name} = {getattr(plan, name)}, got "
        f"one for {getattr(other, name)}. Make one of flash_mla_plan for every size of batch."
    )


def test_a_plan_goes_with_its_kernel(flash_mla):
    """error_rows/mla.py tests FlashMLA's plan with the reference, and two plans in one call."""
    case = decode_case(1, 7, 64)
    bare = type(case)("without its optional tensors", case.tensors[:8], case.settings)
    ours = ops.sparse_mla_plan(case.tensors[3], case.tensors[6], num_heads=64)
    assert message(ValueError, DECODE, bare, impl="flash_mla", plan=ours) == (
        "sparse_mla_decode: plan must be None for impl 'flash_mla', got a tensor. "
        "Pass flash_mla_plan, or none."
    )
    of_flash_mla = plan_of(case)
    assert message(ValueError, DECODE, bare, num_splits=2, flash_mla_plan=of_flash_mla) == (
        "sparse_mla_decode: num_splits must be 0 with a plan, got 2. Pass one of the two."
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


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        (DECODE, True),
        *(
            pytest.param(*each, marks=pytest.mark.nightly("one of any size"))
            for each in product(LIBRARY_OPS["flash_mla"], (False, True))
            if each != (DECODE, True)
        ),
    ],
)
def test_compiled_code_calls_the_op_of_the_library(name, dynamic, flash_mla):
    case = CASES[name](3)
    present = providers_on_cpu.present_in(case)
    run = run_of(name, case, present, impl="flash_mla")
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    # Dynamo would trace twice if a float begins as a symbol and ends as a constant
    with torch._dynamo.config.patch(specialize_float=True):
        actual, code = compile_and_get_code(compiled, *(case.tensors[place] for place in present))
    assert_right(name, case, actual)
    op = "sparse_prefill_fwd" if name in (GATHERED, PREFILL) else "sparse_decode_fwd"
    op = "dense_decode_fwd" if name == DENSE else op
    op = "sparse_prefill_fwd" if case.settings.get("layout") == "plain" and name == SPARSE else op
    calls = [line for line in code.splitlines() if f"torch.ops._flashmla_C.{op}" in line]
    assert len([line for line in calls if "#" not in line]) == 1, calls
    assert [line for line in opaque_calls(code) if not line.startswith("assert_")] == []
    if name != GATHERED:  # the caches are passed unchanged
        assert f"empty_strided_cpu(({case.tensors[1].shape[0]}," not in code


def test_a_symbolic_batch_has_auto_take_ours(flash_mla, monkeypatch):
    """For a symbolic size, "auto" runs our kernels, and the call is compiled once."""
    monkeypatch.setattr(choice, "is_faster", providers_on_cpu.faster_from(DECODE, "flash_mla", 2))
    monkeypatch.setattr(choice, "_other_device", lambda device: "")
    seen = []
    monkeypatch.setattr(choice, "ours", lambda spec: seen.append(spec.name) or "reference")

    def run(*tensors):
        return ops.sparse_mla_decode(*tensors, **case.settings).out

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        case = decode_case(1, tokens, 64)
        with torch._dynamo.config.patch(error_on_recompile=True, specialize_float=True):
            compiled(*case.tensors[:8])
    assert seen
    assert flash_mla.calls == []
    torch._dynamo.reset()
    case = decode_case(1, 5, 64)
    fixed = torch.compile(run, dynamic=False, backend="aot_eager")
    fixed(*case.tensors[:8])
    assert flash_mla.calls == ["decode"]


@pytest.mark.parametrize("name", [DECODE, *nightly("another op", GATHERED, DENSE)])
def test_the_module_of_deepseek(name, flash_mla_module):
    """All functions of the module run."""
    case = CASES[name](3)
    assert_right(name, case, call(name, case, impl="flash_mla"))
    # each graph contains the same op of ours, which Inductor calls
    compiled = torch.compile(
        lambda *tensors: getattr(ops, name)(*tensors, **case.settings, impl="flash_mla"),
        fullgraph=True,
        backend="inductor" if NIGHTLY or name == DECODE else "aot_eager",
    )
    assert_right(name, case, compiled(*case.tensors[:8]))
    assert len(fake_flash_mla.calls) == 2


def test_the_module_of_deepseek_is_in_no_package(flash_mla_module, tmp_path):
    case = CASES[GATHERED](3)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return tuple(ops.sparse_mla_gathered(*tensors, **case.settings, impl="flash_mla"))

    program = torch.export.export(Call(), case.tensors)
    with pytest.raises(Exception, match=r"impl must be another in an AOTInductor package"):
        build_package(program, tmp_path / "call.pt2")
