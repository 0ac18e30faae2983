"""Calls of sparse MLA for the GPU tests: full caches, ragged lengths, adversarial indices."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.sparse_mla import BARE
from dsv4_ops.testing.contract.compare import assert_agrees, assert_precise
from tests.helpers import INT32_MAX, INT32_MIN, i32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 512**-0.5
WINDOW = 128
DECODE, PAGED, GATHERED = "sparse_mla_decode", "sparse_mla_decode_paged", "sparse_mla_gathered"
PER_TOKEN = (0, 2, 3, 5, 6)  # places of tensors with a row per token, in DECODE and PAGED


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(made: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=made).to(torch.bfloat16)


def integers(made: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=made).int()


def keys_of(made: torch.Generator, count: int, deviation: float = 1.5) -> Tensor:
    """Sample keys. With normal queries, a deviation of 1.5 makes logits of a few units."""
    return (normal(made, count, 512) * deviation).clamp(-10 * deviation, 10 * deviation)


def cache_of(layout: MainLayout, blocks: int, slots: Tensor, k: Tensor) -> Tensor:
    """Write rows to their slots with our op; all other bytes are 0xFF, which is NaN."""
    cache = layout.allocate(blocks, DEVICE)
    size = layout.block_size
    ops.quantize_and_insert_k_cache(k.to(DEVICE), cache, slots.to(DEVICE).long(), block_size=size)
    used, (page, row) = torch.zeros(cache.shape, dtype=torch.bool), (slots // size, slots % size)
    used[:, : 576 * size].view(blocks, size, 576)[page, row] = True
    scales = used[:, 576 * size : 584 * size].view(blocks, size, 8)
    scales[page, row] = (torch.arange(8) < 7).expand(len(slots), 8)
    return torch.where(used, cache.cpu(), 0xFF).to(torch.uint8)


def ragged_lens(made: torch.Generator, tokens: int, width: int, adversarial: bool) -> Tensor:
    """Sample lengths: 0 for the first token, the full width for the second."""
    lens = integers(made, 0, width + 1, tokens)
    lens[0], lens[1:2] = 0 if tokens > 1 else width // 3, width
    if adversarial:
        lens[2::7] = torch.tensor([-1, INT32_MIN, INT32_MAX, width + 1]).int()[
            integers(made, 0, 4, len(lens[2::7])).long()
        ]
    return lens


def indices_of(
    made: torch.Generator,
    slots: Tensor,
    unused: Tensor,
    lens: Tensor,
    width: int,
    *,
    adversarial: bool,
) -> Tensor:
    """Sample slots of existing rows, and 1 in 20 absent slots; past the lengths, slots of NaN."""
    tokens, limit = len(lens), len(slots) + len(unused)
    indices = slots[integers(made, 0, len(slots), tokens, width).long()].int()
    outside = [-2, INT32_MIN, limit, limit + 1, INT32_MAX] if adversarial else []
    none = torch.tensor([-1, *outside]).int()
    where = torch.rand(tokens, width, generator=made) < 0.05
    indices = torch.where(where, none[integers(made, 0, len(none), tokens, width).long()], indices)
    behind = torch.arange(width) >= lens[:, None]
    rest = unused[integers(made, 0, len(unused), tokens, width).long()].int() if adversarial else -1
    return torch.where(behind, rest, indices)


def settings_of(block: int, extra_block: int, **changed: object) -> dict[str, object]:
    sizes = {"swa_block_size": block, "extra_block_size": extra_block}
    rest = {"softmax_scale": SCALE, "layout": "v4_fp8", "num_splits": 0, "batch_invariant": False}
    return {**sizes, **rest, **changed}


def sink_of(made: torch.Generator, heads: int) -> Tensor:
    sink = torch.randn(heads, generator=made) * 3
    sink[1:4] = torch.tensor([math.inf, -math.inf, 1e30])[: len(sink[1:4])]
    return sink


def decode_case(
    seed: int,
    tokens: int,
    heads: int,
    extra: int | None = 512,
    *,
    block: int = 64,
    extra_block: int = 64,
    adversarial: bool = True,
    cache_seed: int = 0,
    deviation: float = 1.5,
    **changed: object,
) -> Case:
    """Make a call with ragged lengths; half of the caches is NaN. ``extra`` None: only a window."""
    made, stored = generator(seed + 1), generator(cache_seed)
    tensors: list[Tensor | None] = [normal(made, tokens, heads, 512)]
    for size, count, width in ((block, 2048, WINDOW), (extra_block, 8192, extra)):
        if width is None:
            tensors += [None] * 3
            continue
        blocks = -(-count // size)
        order = torch.randperm(blocks * size, generator=stored)
        slots, unused = order.tensor_split([len(order) // 2])
        k = keys_of(stored, len(slots), deviation)
        cache = cache_of(MainLayout(size), blocks, slots, k)
        lens = ragged_lens(made, tokens, width, adversarial)
        indices = indices_of(made, slots, unused, lens, width, adversarial=adversarial)
        tensors += [cache, indices, lens]
    tensors += [sink_of(made, heads), *BARE]
    return Case("decode", tuple(tensors), settings_of(block, extra_block, **changed))


def magnified(case: Case, exponent: int) -> Case:
    """Multiply all keys by a power of two, and divide the queries by it: attention weights stay
    equal, and outputs are multiplied by the power."""
    q, swa_cache, *rest = case.tensors
    layouts = [MainLayout(case.settings[f"{name}_block_size"]) for name in ("swa", "extra")]
    rest[2] = None if rest[2] is None else _times(rest[2], layouts[1], exponent)
    tensors = (q * 2.0**-exponent, _times(swa_cache, layouts[0], exponent), *rest)
    return Case(case.name, tensors, case.settings)


def _times(cache: Tensor, layout: MainLayout, exponent: int) -> Tensor:
    """Scale a cache by 2^exponent: its scale bytes are exponents, and its RoPE values bf16."""
    cache = cache.clone()
    data = layout.block_size * layout.data_bytes
    rows = cache[:, :data].unflatten(1, (layout.block_size, layout.data_bytes))
    rope = rows[..., layout.code_dim :].contiguous().view(torch.bfloat16)
    rows[..., layout.code_dim :] = (rope * 2.0**exponent).view(torch.uint8)
    scales = cache[:, data : layout.block_size * layout.row_bytes]
    scales.copy_((scales.int() + exponent).clamp(0, 255))
    return cache


def paged_case(
    seed: int,
    tokens: int,
    heads: int,
    columns: int = 150,
    *,
    cache_seed: int = 0,
    **changed: object,
) -> Case:
    """Make a C128 call: blocks of 2 rows, half of them NaN, and tables with absent blocks."""
    made, stored = generator(seed + 2), generator(cache_seed)
    window = decode_case(seed, tokens, heads, None, cache_seed=cache_seed)
    num_reqs = min(tokens, 5)
    pages = torch.randperm(2 * num_reqs * columns, generator=stored)[: num_reqs * columns]
    table = pages[torch.randperm(len(pages), generator=made)].view(num_reqs, columns).int()
    slots = (pages[:, None] * 2 + torch.arange(2)).flatten()
    cache = cache_of(MainLayout(2), 2 * len(pages), slots, keys_of(stored, len(slots)))
    for column, page in enumerate((-1, INT32_MIN, INT32_MAX, 2 * len(pages))):
        table[column % num_reqs, 3 * column % columns] = page
    requests = integers(made, 0, num_reqs, tokens)
    requests[3::11] = i32([-1, num_reqs, INT32_MAX, INT32_MIN])[
        integers(made, 0, 4, len(requests[3::11])).long()
    ]
    lens = ragged_lens(made, tokens, 2 * columns, adversarial=True)
    tensors = (*window.tensors[:4], cache, lens, requests, table, *window.tensors[-4:])
    return Case("paged", tensors, settings_of(64, 2, **changed))


def case_of(name: str, seed: int, tokens: int, heads: int, **changed: object) -> Case:
    make = decode_case if name == DECODE else paged_case
    return make(seed, tokens, heads, **changed)


def some_tokens(case: Case, chosen: slice | list[int], places: Sequence[int] = PER_TOKEN) -> Case:
    """Return the call for some of its tokens."""
    tensors = [
        tensor[chosen] if place in places and tensor is not None else tensor
        for place, tensor in enumerate(case.tensors)
    ]
    return Case(case.name, tuple(tensors), case.settings)


def with_inverse_rope(case: Case, seed: int = 0, num_positions: int = 5000) -> Case:
    """Return the call with an inverse RoPE; every third token has a position out of range."""
    made, tokens = generator(seed + 3), case.tensors[0].shape[0]
    table = ops.rope_cos_sin_cache(num_positions, theta=10000.0)
    positions = torch.randint(0, num_positions, (tokens,), generator=made)
    bad = torch.tensor([-1, num_positions, INT32_MIN, 2**63 - 1, -(2**63), 2**40])
    positions[2::3] = bad[torch.arange(len(positions[2::3])) % len(bad)]
    return Case(case.name, (*case.tensors[:-2], positions, table), case.settings)


def with_settings(case: Case, **changed: object) -> Case:
    return Case(case.name, case.tensors, {**case.settings, **changed})


def kernel(name: str, case: Case) -> tuple[Tensor, ...]:
    return case.on(DEVICE).run(OPS[name].op)


def agrees(name: str, case: Case, actual: tuple[Tensor, ...] | None = None) -> None:
    """Compare ``actual``, or the kernel's results, with the CPU's reference and float64."""
    spec = OPS[name]
    expected = [tensor.to(DEVICE) for tensor in case.run(spec.reference)]
    actual = kernel(name, case) if actual is None else actual
    op_testing = spec.implementation("testing")
    assert_agrees(f"{name}, {case.settings}", op_testing, case.on(DEVICE), actual, expected)
    assert not actual[0].isnan().any()


def gathered_case(seed: int, tokens: int, heads: int, topk: int, deviation: float = 1.5) -> Case:
    """Make a gathered call that FlashMLA supports: without NaN, and with a key for every token."""
    made = generator(seed)
    kv = keys_of(made, 3000, deviation)
    indices = integers(made, 0, len(kv), tokens, topk)
    indices[:, 1:][torch.rand(tokens, topk - 1, generator=made) < 0.05] = -1
    lens = integers(made, 1, topk + 1, tokens)
    tensors = (normal(made, tokens, heads, 512), kv, indices, lens, sink_of(made, heads))
    return Case("gathered", tensors, {"softmax_scale": SCALE})


def adversarial_gathered(seed: int, tokens: int, heads: int, topk: int) -> Case:
    """Make absent entries, lengths out of range, unlisted rows of NaN, and tokens without keys."""
    case = gathered_case(seed, tokens, heads, topk)
    q, kv, indices, lens, sink = case.tensors
    kv[1::2] = math.nan
    indices = torch.where(indices >= 0, indices // 2 * 2, -1)
    indices[:, 3::5] = i32([-2, INT32_MIN, len(kv), INT32_MAX])[torch.arange(tokens) % 4][:, None]
    lens[::4] = i32([0, -5, INT32_MAX, topk + 1])[torch.arange(len(lens[::4])) % 4]
    indices[1] = -1
    behind = torch.arange(topk) >= lens[:, None]
    return Case("adversarial", (q, kv, torch.where(behind, 1, indices), lens, sink), case.settings)


def agrees_when_sampled(name: str, part: int, *, precise: bool = False) -> None:
    """Check 75 calls that the op's strategy samples; parts bound the time of compilation.
    ``precise`` also compares with float64."""
    spec = OPS[name]

    @seed(part)
    @settings(
        max_examples=75, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(testing.strategy(name))
    def compare(case: Case) -> None:
        expected = case.run(spec.reference, spec.mutated)
        actual = [tensor.cpu() for tensor in case.on(DEVICE).run(spec.op, spec.mutated)]
        op_testing = spec.implementation("testing")
        assert_agrees(name, op_testing, case, actual, expected)
        if precise and op_testing.precise is not None:
            assert_precise(name, op_testing, case, actual)

    compare()


@contextmanager
def no_host_sync(sought: bool = True) -> Iterator[None]:
    """Synchronise, and then, if ``sought``, raise an error in each call that waits for the
    device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if sought else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_of(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of ``run``, and the results that the graph writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


def launches_both(code: str) -> bool:
    """Return whether compiled code runs splits and combine: one op on Hopper, else two kernels."""
    if torch.cuda.get_device_capability() == (9, 0):
        return "_hopper_split_keys" in code
    return "split_keys_kernel" in code and "join_splits_kernel" in code
