"""FlashMLA behind ``sparse_mla_prefill`` on a GPU: sampled and adversarial calls, graphs, and what
"auto" selects. Run there with ``pytest -m gpu tests``; ANCHOR_DIR names the bundle that holds the
library. Compiled and packaged calls: test_providers.py."""

import math

import pytest
import torch
from torch import Tensor

from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.sparse_mla import bf16_workspace as kernels
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.reference import bf16_workspace
from dsv4_ops.reference.bf16_workspace import Prefill, Source
from dsv4_ops.testing.case import Case
from tests.gpu.test_cache import needs_baselines
from tests.gpu.test_providers import check
from tests.helpers import INT32_MAX, INT32_MIN
from tests.support.attention_batches import DEVICE, generator, graph_of, integers, some_tokens
from tests.support.prefill_batches import MODES, PLACES, PREFILL, prefill_case
from tests.support.providers_on_cpu import call, present_in, run_of

pytestmark = [needs_baselines, pytest.mark.usefixtures("found")]
pytest_plugins = ("tests.gpu.providers",)
each_mode = pytest.mark.parametrize("mode", MODES)


def upstream(case: Case) -> tuple[Tensor, ...]:
    """Return FlashMLA's results. Memory held NaN, so gathers must write every row that is read."""
    poison = torch.full((2**27,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    del poison
    return call(PREFILL, case, impl="flash_mla")


@each_mode
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (64, 128), (300, 64), (200, 128)])
def test_sampled_batches(mode: str, tokens: int, heads: int) -> None:
    """Requests are ragged or absent, some tokens padding, unused blocks NaN, sinks inf."""
    case = prefill_case(7 * tokens + heads, tokens, heads, mode).on(DEVICE)
    check(PREFILL, case, upstream(case))


@pytest.mark.parametrize("topk", [1, 64, 511, 1024])
@pytest.mark.parametrize(("window", "block"), [(1, 1), (128, 53), (1000, 256)])
def test_sizes(window: int, block: int, topk: int) -> None:
    case = prefill_case(topk, 40, 64, "C4", window=window, block=block, topk=topk).on(DEVICE)
    check(PREFILL, case, upstream(case))


@each_mode
def test_requests_one_after_the_other_and_mixed(mode: str) -> None:
    """A token has equal bits, also alone, because its keys are the same in the same order."""
    case = prefill_case(9, 200, 64, mode).on(DEVICE)
    whole = upstream(case)
    order = torch.randperm(200, generator=generator(1)).to(DEVICE)
    for chosen in (order, slice(7, 8), slice(50, 200)):
        actual = upstream(some_tokens(case, chosen, PLACES))
        for left, right in zip(actual, whole, strict=True):
            assert torch.equal(left, right[chosen])


def adversarial(case: Case, seed: int) -> Case:
    """Replace a third of all integers by integers that name nothing, or something else."""
    made = generator(seed)
    extremes = (-1, INT32_MIN, INT32_MAX, INT32_MAX - 1, 0, 1, 700)

    def sampled(tensor: Tensor, *more: int) -> Tensor:
        pool = torch.tensor([*extremes, *more], dtype=tensor.dtype)
        wild = pool[integers(made, 0, len(pool), *tensor.shape).long()]
        return torch.where(torch.rand(tensor.shape, generator=made) < 0.3, wild, tensor)

    tensors = list(case.tensors)
    tensors[2] = sampled(tensors[2], 2**63 - 1, -(2**63), 2**40)
    for place in (3, 4, 6, 7):
        tensors[place] = None if tensors[place] is None else sampled(tensors[place])
    for place in (1, 5):  # a table may name a block that held NaN
        if tensors[place] is not None:
            tensors[place] = torch.where(tensors[place] == 0xFF, 0, tensors[place])
    return Case("adversarial", tuple(tensors), case.settings)


@each_mode
@pytest.mark.parametrize("seed", range(3))
def test_adversarial_values(mode: str, seed: int) -> None:
    case = adversarial(prefill_case(seed, 100, 64, mode), seed).on(DEVICE)
    check(PREFILL, case, upstream(case))


@each_mode
def test_lists_and_rows_are_those_of_the_definition(mode: str) -> None:
    """Every listed entry is equal, and so is every bit of the rows that lists name."""
    case = adversarial(prefill_case(11, 1500, 64, mode), 4).on(DEVICE)
    _, swa_cache, positions, owners, swa_table, cache, table, chosen, sink = case.tensors
    numbers = case.settings
    extra = None if cache is None else Source(cache, table, numbers["extra_block_size"])
    swa = Source(swa_cache, swa_table, numbers["swa_block_size"])
    given = (positions, owners, swa, extra, chosen)
    made = Prefill(*given, numbers["window_size"], numbers["compress_ratio"])
    expected = bf16_workspace.gather_rows(made, sink, 128)
    actual = kernels.gather_rows(EAGER, made, sink, 128)
    for name in ("lens", "sink"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    column = torch.arange(actual.slots.shape[1], device=DEVICE)
    counted = torch.where(column < actual.lens[:, None], actual.slots, -1)  # up to the lengths
    assert torch.equal(counted, expected.slots)
    named = expected.slots.unique()[1:].long()
    assert len(named) > 1000
    assert torch.equal(actual.kv[named].view(torch.int16), expected.kv[named].view(torch.int16))


@each_mode
def test_a_captured_call_follows_its_tensors(mode: str) -> None:
    case = prefill_case(1, 150, 64, mode).on(DEVICE)
    graph, outputs = graph_of(lambda: call(PREFILL, case, impl="flash_mla"))
    for seed in range(3):
        other = prefill_case(seed + 5, 150, 64, mode).on(DEVICE)
        for tensor, new in zip(case.tensors, other.tensors, strict=True):
            if tensor is not None:
                tensor.copy_(new)
        graph.replay()
        check(PREFILL, case, outputs)


@each_mode
def test_compiled_code_has_one_workspace(mode: str) -> None:
    """Our gathers write to the workspace in place, and FlashMLA reads it there."""
    case = prefill_case(1, 30, 64, mode).on(DEVICE)
    present = present_in(case)
    run = run_of(PREFILL, case, present, impl="flash_mla")
    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    result, code = compile_and_get_code(compiled, *(case.tensors[place] for place in present))
    check(PREFILL, case, result)
    sizes, tables = case.settings, case.tensors[4:7:2]
    rows = tables[0].shape[1] * sizes["swa_block_size"]
    if tables[1] is not None:
        rows += tables[1].shape[1] * sizes["extra_block_size"]
    assert code.count(f"empty_strided_cuda(({tables[0].shape[0] * rows}, 512)") == 1
