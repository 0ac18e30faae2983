"""Caches that are views of one pool, as in vLLM: compiled code leaves every byte of the pool as
eager code does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.attention import LayerCaches, LayerInputs, LayerSpec, attention_layer
from dsv4_ops.attention.caches import check_apart, pool_view
from dsv4_ops.core.layout import MainLayout, PlainLayout, StateLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from tests.compile.test_compiled_cache import cache_sized_buffers
from tests.helpers import i32, i64, nightly
from tests.support.layers import PLAIN, SPEC, SmallLayer, hidden_states, projected

BLOCKS = 24
GROUPS = {"swa": 0, "compressed": 8, "indexer": 8, "states": 16, "indexer_states": 16}
"""The first block of each group of caches: they have the same bytes of other blocks."""


class Pool:
    """Two layers, whose caches are in each block side by side."""

    def __init__(self, spec: LayerSpec) -> None:
        self.layers = [SmallLayer(kind, spec) for kind in ("c4", "window")]
        self.places: list[dict[str, int]] = []
        end = dict.fromkeys(GROUPS.values(), 0)
        for layer in self.layers:
            self.places.append({})
            for name, layout in spec.layouts(layer.kind).items():
                first = GROUPS[name]
                self.places[-1][name] = end[first]
                end[first] += layout.page_bytes + -layout.page_bytes % 16
        self.block_stride = max(end.values()) + 48

    def allocate(self) -> Tensor:
        return torch.full((BLOCKS * self.block_stride,), 0xFF, dtype=torch.uint8)

    def caches(self, pool: Tensor, number: int) -> LayerCaches:
        layouts = self.layers[number].spec.layouts(self.layers[number].kind)
        places, stride = self.places[number], self.block_stride
        views = {
            name: pool_view(pool, layout, block_stride=stride, offset=places[name])
            for name, layout in layouts.items()
        }
        return LayerCaches(**views)

    def run(self, pool: Tensor, *rest: Any) -> list[Tensor]:
        return self.attend([self.caches(pool, number) for number in range(2)], *rest)

    def attend(
        self, caches: list[LayerCaches], inputs: list[dict[str, Tensor]], *batch: Tensor
    ) -> list[Tensor]:
        """Both layers; the second waits for the first, whose output changes none of its bits."""
        outputs: list[Tensor] = []
        for layer, held, given in zip(self.layers, caches, inputs, strict=True):
            if outputs:
                before = outputs[0].flatten(1)[:, :512].to(given["kv"])
                given = {**given, "kv": given["kv"] + before * 0}
            values = (LayerInputs(**given), layer.attention.weights, held, layer.step(*batch))
            out = attention_layer(
                layer.spec, layer.kind, *values, state_rings=False, save_first=True
            )
            assert isinstance(out, Tensor)
            outputs.append(out)
        return outputs


def steps_of(pool: Pool) -> list[tuple[Any, ...]]:
    """Prefills of two requests, then decodes: all blocks of a group in turn."""
    hidden, steps, done = hidden_states(2), [], [0, 0]
    for counts in ([9, 4], [1, 1], [1, 1], [5, 1], [1, 3]):
        ends = [before + count for before, count in zip(done, counts, strict=True)]
        rows = [hidden[r, done[r] : ends[r]] for r in range(2)]
        inputs = [projected(layer, torch.cat(rows)[None])[0] for layer in pool.layers]
        table = i32([[0, 2, 4, 6, 0, 2, 4, 6], [1, 3, 5, 7, 1, 3, 5, 7]])
        positions = [(r, p) for r in range(2) for p in range(done[r], ends[r])]
        slots = i64([int(table[r, p // 4]) * 4 + p % 4 for r, p in positions])
        starts = i32([0, counts[0], sum(counts)])
        batch = (starts, i32(ends), slots, table, table[:, :2] + 8, table + 16)
        steps.append((inputs, *batch))
        done = ends
    return steps


OTHERS = [
    (spec, backend, grad)
    for spec in (SPEC, PLAIN)
    for backend in ("eager", "aot_eager", "inductor")
    for grad in (torch.no_grad, torch.inference_mode)
]


@pytest.mark.parametrize(
    ("spec", "backend", "grad"),
    [(PLAIN, "aot_eager", torch.no_grad), *nightly("one of these, and Inductor below", *OTHERS)],
)
def test_every_byte_of_the_pool_is_that_of_eager_code(
    spec: LayerSpec, backend: str, grad: Callable[[], Any]
) -> None:
    torch._dynamo.reset()
    made = Pool(spec)
    compiled = torch.compile(made.run, fullgraph=True, backend=backend, dynamic=True)
    # a float that starts as a symbol and ends as a constant has the graph traced twice
    with grad(), torch._dynamo.config.patch(specialize_float=True):
        expected, pool, steps = made.allocate(), made.allocate(), steps_of(made)
        apart = [
            LayerCaches(
                **{
                    name: layout.allocate(BLOCKS)
                    .view(torch.uint8)
                    .fill_(0xFF)
                    .view(layout.storage_dtype)
                    for name, layout in spec.layouts(layer.kind).items()
                }
            )
            for layer in made.layers
        ]
        for step in steps:
            wanted, before = made.run(expected, *step), pool.clone()
            for out, alone in zip(wanted, made.attend(apart, *step), strict=True):
                assert torch.equal(out, alone)
            for out, other in zip(compiled(pool, *step), wanted, strict=True):
                close = {"rtol": 2**-7, "atol": 0.02} if spec is SPEC else {"rtol": 0, "atol": 3e-6}
                torch.testing.assert_close(out, other, **close)
            assert not torch.equal(pool, before)
            assert torch.equal(pool, expected)
    for number in range(2):
        for name, cache in vars(made.caches(expected, number)).items():
            if cache is not None:
                own = slice(GROUPS[name], GROUPS[name] + 8)
                pair = (
                    each[own].view(torch.uint8) for each in (cache, getattr(apart[number], name))
                )
                assert torch.equal(*pair)


PAGE = 64000
MAIN, STATES = MainLayout(4), StateLayout(4, 2048)


def write_and_read(
    swa: Tensor, rows: Tensor, states: Tensor, keys: Tensor, kv_score: Tensor, slots: Tensor
) -> Tensor:
    """Window keys, states and rows; then the keys are read."""
    ops.quantize_and_insert_k_cache(keys, swa, slots, block_size=4)
    table = i32([[0, 1]])
    ops.save_and_compress(
        *(
            kv_score,
            torch.ones(4, 1024),
            states,
            table + 2,
            slots + 8,
            slots,
            table[0, :1].expand(4),
        ),
        *(torch.ones(512), torch.zeros(0, 64), rows, torch.where(slots % 4 == 3, 12, -1)),
        **{"compress_ratio": 4, "overlap": True, "eps": 1e-6, "state_block_size": 4},
        block_size=4,
    )
    ops.quantize_and_insert_k_cache(-keys, swa, slots + 4, block_size=4)
    return ops.gather_k_cache(swa, i32([8]), None, table, block_size=4, num_rows=8)


def in_pool(pool: Tensor, *rest: Tensor) -> Tensor:
    offsets = {"block_stride": PAGE}
    swa = pool_view(pool, MAIN, **offsets)
    rows = pool_view(pool, MAIN, offset=32896, **offsets)
    return write_and_read(swa, rows, pool_view(pool, STATES, **offsets), *rest)


@pytest.mark.slow
def test_code_of_inductor_has_no_copy_of_a_cache() -> None:
    torch._dynamo.reset()
    tensors = torch.randn(4, 512).bfloat16(), torch.randn(4, 2048), i64([0, 1, 2, 3])
    expected, pool = (torch.full((4 * PAGE,), 7, dtype=torch.uint8) for _ in range(2))
    wanted = in_pool(expected, *tensors)
    compiled = torch.compile(in_pool, fullgraph=True, dynamic=False)
    out, code = compile_and_get_code(compiled, pool, *tensors)
    assert torch.equal(pool, expected)
    assert torch.equal(out, wanted)
    smallest = MAIN.allocate(4)
    assert cache_sized_buffers(code, smallest) == []
    assert ".copy_(" not in code


@pytest.mark.parametrize("shape", [(192,), (2, 96)])
def test_the_pool_is_the_memory_of_the_caches_by_hand(shape: tuple[int, ...]) -> None:
    """Blocks of 96 bytes: a row of two floats at byte 32 of each."""
    pool = torch.zeros(*shape, dtype=torch.uint8)
    cache = pool_view(pool, PlainLayout(1, 2, torch.float32), block_stride=96, offset=32)
    assert cache.shape == (2, 1, 2)
    cache[1, 0, 1] = 1.0
    assert pool.flatten().nonzero().flatten().tolist() == [96 + 32 + 4 + 2, 96 + 32 + 4 + 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pool": torch.zeros(4 * PAGE)}, "pool must be torch.uint8, got torch.float32"),
        ({"pool": torch.zeros(PAGE + 16, dtype=torch.uint8)}, "pool must have a multiple of"),
        (
            {"pool": torch.zeros(4, PAGE + 16, dtype=torch.uint8)},
            rf"pool must have shape \[num_blocks, {PAGE}\]",
        ),
        ({"block_stride": PAGE + 8}, "block_stride must be a multiple of 16, got 64008"),
        ({"offset": 8}, "offset must be a multiple of 16, got 8"),
        ({"offset": PAGE - 16}, "offset must be at most 61120, so that it ends in its block"),
        ({"offset": -16}, "offset must be at least 0, got -16"),
        ({"block_stride": "1"}, "block_stride must be an int, got str"),
    ],
)
def test_errors_of_pool_view(changed: dict[str, Any], message: str) -> None:
    given = {"pool": torch.zeros(4 * PAGE, dtype=torch.uint8), "block_stride": PAGE, **changed}
    with pytest.raises((ValueError, TypeError), match=f"^pool_view: {message}"):
        pool_view(layout=MAIN, **given)


@pytest.mark.parametrize("how", ["made in the graph", "beside a view of it"])
def test_a_pool_that_is_a_view_is_refused(how: str) -> None:
    def write(pool: Tensor, cache: Tensor) -> None:
        pool = pool.view(torch.uint8) if how == "made in the graph" else pool
        rows = torch.ones(1, 512).bfloat16()
        swa = pool_view(pool, MAIN, block_stride=PAGE)
        ops.quantize_and_insert_k_cache(rows, swa, i64([0]), block_size=4)
        ops.quantize_and_insert_k_cache(rows, cache, i64([9]), block_size=4)

    torch._dynamo.reset()
    pool = torch.zeros(4 * PAGE, dtype=torch.uint8)
    cache = MAIN.allocate(4)
    if how == "made in the graph":
        pool = pool.view(torch.int8)
    else:
        cache = pool_view(pool, MAIN, block_stride=PAGE)
    message = (
        "pool_view: pool must be an argument of the compiled function, and share no memory with "
        "another, got a view of another tensor. Make it before the call, and pass no view of it."
    )
    with pytest.raises(Exception, match=message), torch.no_grad():
        torch.compile(write, fullgraph=True, backend="aot_eager")(pool, cache)
    assert not pool.any()


def test_views_that_hide_that_they_share_memory_are_refused() -> None:
    """They are apart for a compiler, which is then wrong; views of one storage it knows about."""
    pool = torch.zeros(4 * PAGE, dtype=torch.uint8)
    swa, states = (
        pool_view(pool, MAIN, block_stride=PAGE),
        pool_view(pool, STATES, block_stride=PAGE),
    )
    check_apart(swa=swa, states=states, other=MAIN.allocate(2))
    hidden = torch.from_dlpack(states)
    with pytest.raises(
        ValueError, match=r"^check_apart: \w+ must share no memory with \w+, got a st"
    ):
        check_apart(swa=swa, states=hidden)
    with pytest.raises(RuntimeError, match="input mutations on views with different dtypes"):
        torch.compile(write_and_read, backend="aot_eager")(
            swa,
            MAIN.allocate(4),
            states,
            torch.ones(4, 512).bfloat16(),
            torch.ones(4, 2048),
            i64([0, 1, 2, 3]),
        )
