"""FlashMLA and DeepGEMM behind ``impl=`` on a GPU: the contract and upstream's numerics,
adversarial values, plans, graphs and packages. Run there with ``pytest -m gpu tests``; ANCHOR_DIR
names the bundle that holds them."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import choice, libraries, providers
from dsv4_ops.kernels.external import flash_mla as adapter
from dsv4_ops.lowering import inspect
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import exact_results
from tests.gpu.providers import BUILD
from tests.gpu.test_cache import needs_baselines
from tests.helpers import i32
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, DEVICE, GATHERED, PAGED, SCALE, decode_case
from tests.support.prefill_batches import GRAPHS, PREFILL, prefill_case
from tests.support.providers_on_cpu import call, plan_of, present_in, run_of

pytestmark = [needs_baselines, pytest.mark.usefixtures("found")]
pytest_plugins = ("tests.gpu.providers",)


def assert_upstream(
    what: str, out: Tensor, exact: Tensor, atol: float, rtol: float, cosine: float
) -> None:
    """Assert FlashMLA's own criteria."""
    out, exact = out.double(), exact.double()
    torch.testing.assert_close(out, exact, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")
    apart = 1 - 2 * (out * exact).sum() / (out.square() + exact.square()).sum()
    assert abs(float(apart)) <= cosine, what


def check(name: str, case: Case, actual, deviation: float = 1.5) -> None:
    """Apply upstream's criteria, which grow with the values, against float64; and our contract for
    tokens without keys."""
    out, *_, lse = actual
    exact, *exact_logs = (each.value for each in exact_results(testing.op_testing(name), case))
    no_key = exact_logs[-1] == -math.inf
    assert torch.equal(lse == -math.inf, no_key), name
    assert not out.isnan().any()
    assert not out[no_key].any()
    decoded = name not in (GATHERED, PREFILL)
    atol, rtol, cosine = (1e-2, 2.01, 5e-6) if decoded else (8e-3, 3.01, 7e-6)
    assert_upstream(name, out, exact, atol * deviation, rtol / 128, cosine)
    near = 1e-5 * deviation
    torch.testing.assert_close(lse.double(), exact_logs[-1], atol=near, rtol=8.01 / 65536)
    if name == GATHERED:
        torch.testing.assert_close(actual[1].double(), exact_logs[0], atol=near, rtol=8.01 / 65536)


@pytest.mark.parametrize(
    ("sizes", "extra"), [((64, 64), 512), ((256, 64), None), ((256, 2), 1024), ((3, 7), 37)]
)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (2, 128), (33, 128), (150, 64)])
def test_flash_mla_decodes(tokens, heads, extra, sizes):
    """Lengths are ragged, slots are absent, unused rows are NaN, sinks are inf, some tokens have no
    key, and widths are no multiples of FlashMLA's tiles."""
    pages = {"block": sizes[0], "extra_block": sizes[1]}
    case = decode_case(tokens + heads, tokens, heads, extra, **pages).on(DEVICE)
    check(DECODE, case, call(DECODE, case, impl="flash_mla"))


@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (7, 128), (140, 64)])
def test_flash_mla_decodes_pages(tokens, heads):
    case = batches.paged_case(tokens, tokens, heads).on(DEVICE)
    check(PAGED, case, call(PAGED, case, impl="flash_mla"))


@pytest.mark.parametrize("topk", [640, 100])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("make", [batches.gathered_case, batches.adversarial_gathered])
def test_flash_mla_attends_to_gathered_rows(make, heads, topk):
    case = make(heads, 200, heads, topk).on(DEVICE)
    check(GATHERED, case, call(GATHERED, case, impl="flash_mla"))


def test_strided_queries_and_lists():
    case = decode_case(9, 20, 64).on(DEVICE)
    expected = call(DECODE, case, impl="flash_mla")
    tensors = list(case.tensors)
    for place in batches.PER_TOKEN:
        wide = torch.stack([tensors[place]] * 2, -1)
        tensors[place] = wide[..., 1]
    actual = call(DECODE, Case("strided", tuple(tensors), case.settings), impl="flash_mla")
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)


def test_a_cache_beyond_4_gib(gpu_memory_alone):
    layout, blocks = MainLayout(64), 120_000
    cache = layout.allocate(blocks, DEVICE)
    assert cache.nbytes > 2**32
    made = batches.generator(0)
    slots = torch.randint(0, blocks * 64, (256,), generator=made)
    slots[:8] = torch.arange(blocks * 64 - 8, blocks * 64)
    keys = batches.keys_of(made, 256)
    ops.quantize_and_insert_k_cache(keys.to(DEVICE), cache, slots.to(DEVICE), block_size=64)
    indices = slots[None, :128].int().to(DEVICE)
    lens = i32([128]).to(DEVICE)
    q = batches.normal(made, 1, 64, 512).to(DEVICE)
    settings = {"softmax_scale": SCALE, "swa_block_size": 64, "impl": "flash_mla"}
    far = ops.sparse_mla_decode(q, cache, indices, lens, **settings)
    small = batches.cache_of(layout, 4, torch.arange(256), keys).to(DEVICE)
    first = torch.arange(128, device=DEVICE).int()[None]
    near = ops.sparse_mla_decode(q, small, first, lens, **settings)
    if len(set(slots.tolist())) == 256:
        assert torch.equal(far.out, near.out)


@pytest.mark.parametrize("extra", [None, 512])
@pytest.mark.parametrize(("tokens", "heads"), [(33, 128), (300, 64)])
def test_one_plan_is_right_for_any_lens(tokens, heads, extra):
    plan = None
    for seed in range(3):
        case = decode_case(seed, tokens, heads, extra).on(DEVICE)
        plan = plan or plan_of(case, device=DEVICE)
        check(DECODE, case, call(DECODE, case, impl="flash_mla", flash_mla_plan=plan))


LENS = ("none", "one key", "random", "mostly none", "whole blocks", "full", "one long")


def lens_of(what: str, tokens: int, width: int) -> Tensor:
    made = torch.Generator().manual_seed(tokens)
    sampled = torch.randint(0, width + 1, (tokens,), generator=made)
    return {
        "none": sampled * 0,
        "one key": sampled * 0 + 1,
        "random": sampled,
        "mostly none": torch.where(sampled * 8 > width, 0, sampled * 8),
        "whole blocks": sampled // 64 * 64,
        "full": sampled * 0 + width,
        "one long": torch.where(torch.arange(tokens) == tokens // 2, width, 7),
    }[what].to(DEVICE, torch.int32)


def their_metadata(heads: int, swa_lens: Tensor, extra_lens: Tensor | None, width: int):
    """Return FlashMLA's plan for these lengths."""
    tokens, page = swa_lens.shape[0], MainLayout(64).allocate(1, DEVICE)
    q = torch.zeros(tokens, 1, heads, 512, dtype=torch.bfloat16, device=DEVICE)
    view = adapter.kernel_view(page, 64)
    slots = [torch.full((tokens, 1, n), -1, device=DEVICE).int() for n in (128, width)]
    extra = (None, None, None) if extra_lens is None else (view, slots[1], extra_lens)
    settings = (None, None, None, *extra, 512, SCALE)
    return adapter.decode(q, view, slots[0], swa_lens, *settings)[2:]


@pytest.mark.parametrize("extra", [None, 512, 8192])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (2, 128), (33, 64), (150, 128), (2000, 64)])
def test_our_metadata_is_that_of_flash_mla(tokens, heads, extra):
    """All integers are equal, except those that nothing reads: the last column, and the start of a
    part without work. One compiled graph serves any number of tokens."""
    parts = providers.flash_mla_num_sm_parts(heads)
    compiled = torch.compile(ops.flash_mla_metadata, fullgraph=True, dynamic=True)
    for window in LENS:
        for what in LENS if extra else ("none",):
            swa = lens_of(window, tokens, 128)
            lens = lens_of(what, tokens + 1, extra)[:-1].contiguous() if extra else None
            schedule, num_splits = their_metadata(heads, swa, lens, extra or 64)
            schedule[:, 2] = torch.where(schedule[:, 0] < tokens, schedule[:, 2], 0)
            sizes = {"swa_width": 128, "extra_width": extra or 0, "num_sm_parts": parts}
            for make in (ops.flash_mla_metadata, compiled):
                ours = make(swa, lens, **sizes)
                assert torch.equal(ours[:parts, :7], schedule[:, :7]), (window, what)
                assert torch.equal(ours[parts:].flatten()[: tokens + 1], num_splits)


@pytest.mark.parametrize(("name", "extra"), [(DECODE, None), (DECODE, 512), (PAGED, None)])
def test_a_captured_step_makes_its_metadata(name, extra):
    """A step makes its metadata once for two calls, bit-equal to what FlashMLA plans itself."""

    def run(case):
        q, _, swa, swa_lens = case.tensors[:4]
        lens, width = None, 0
        if name == PAGED:
            lens = case.tensors[5]
            width = case.tensors[7].shape[1] * case.settings["extra_block_size"]
        elif extra:
            lens, width = case.tensors[6], case.tensors[5].shape[1]
        widths = {"swa_width": swa.shape[1], "extra_width": width}
        parts = providers.flash_mla_num_sm_parts(q.shape[1])
        plan = ops.flash_mla_metadata(swa_lens, lens, **widths, num_sm_parts=parts)
        settings = {"impl": "flash_mla", "flash_mla_plan": plan}
        return [call(name, case, **settings) for _ in range(2)]

    def sampled(seed):
        if name == PAGED:
            return batches.paged_case(seed, 33, 64).on(DEVICE)
        return decode_case(seed, 33, 64, extra).on(DEVICE)

    case = sampled(1)
    graph, outputs = batches.graph_of(lambda: run(case))
    for seed in range(3):
        for tensor, new in zip(case.tensors, sampled(seed + 5).tensors, strict=True):
            if tensor is not None:
                tensor.copy_(new)
        graph.replay()
        own = call(name, case, impl="flash_mla")
        for found in outputs:
            check(name, case, found)
            assert all(torch.equal(ours, other) for ours, other in zip(found, own, strict=True))


CASES = {
    DECODE: lambda seed: decode_case(seed, 21, 64),
    PAGED: lambda seed: batches.paged_case(seed, 21, 64),
    PREFILL: lambda seed: prefill_case(seed, 21, 64, "C4"),
    GATHERED: lambda seed: batches.gathered_case(seed, 21, 64, 128),
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CASES), (DECODE, True), (PREFILL, True)]
)
def test_compiled_and_captured(name, dynamic):
    """One graph contains the library's op; a replay is right after inputs change in place."""
    case, other = (CASES[name](seed).on(DEVICE) for seed in (3, 4))
    present = present_in(case)
    inputs = [case.tensors[place].clone() for place in present]
    for tensor in inputs:
        torch._dynamo.mark_static_address(tensor)
    run = run_of(name, case, present, impl="flash_mla")
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, options=GRAPHS)
    result, code = inspect.compile_and_get_code(compiled, *inputs)
    assert "torch.ops._flashmla_C." in code
    assert [line for line in inspect.opaque_calls(code) if not line.startswith("assert_")] == []
    check(name, case, result)
    compiled(*inputs)
    for place, tensor in zip(present, inputs, strict=True):
        if tensor.shape == other.tensors[place].shape:
            tensor.copy_(other.tensors[place])
    with batches.no_host_sync():
        result = [each.clone() for each in compiled(*inputs)]
    given = list(case.tensors)
    for place, tensor in zip(present, inputs, strict=True):
        given[place] = tensor
    check(name, Case("changed", tuple(given), case.settings), result)


PACKAGED = """
import sys, torch
build, package, inputs = sys.argv[1:]
torch.ops.load_library(build)
run = torch._inductor.aoti_load_package(package, run_single_threaded=True)
given, expected = torch.load(inputs)
for left, right in zip(run(*given), expected):
    assert torch.equal(left, right.to(left.device)), (left, right)
assert not [name for name in sys.modules if name.startswith("dsv4_ops")]
print("right")
"""


@pytest.mark.parametrize("name", [PAGED, PREFILL, GATHERED])
def test_a_package_needs_the_library_only(name, tmp_path):
    case = CASES[name](6).on(DEVICE)
    present = present_in(case)
    inputs = tuple(case.tensors[place] for place in present)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return run_of(name, case, present, impl="flash_mla")(*tensors)

    program = torch.export.export(Call(), inputs)
    path = inspect.build_package(program, tmp_path / "call.pt2")
    expected = inspect.load_package(path)(*inputs)
    check(name, case, expected)
    torch.save((inputs, expected), tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", PACKAGED, BUILD, path, tmp_path / "inputs.pt"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("right")


def test_both_libraries_run_here():
    for name in libraries.LIBRARIES:
        assert choice.unusable(name) == ""
        assert OPS[DECODE].launcher("flash_mla")
