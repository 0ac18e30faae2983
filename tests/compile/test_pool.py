"""Caches are views of one pool, as in vLLM: compiled and eager code write equal bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.attention.caches import check_apart, pool_view
from dsv4_ops.core.layout import MainLayout, PlainLayout, StateLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from tests.compile.test_compiled_cache import cache_sized_buffers
from tests.helpers import i32, i64

PAGE = 64000
MAIN, STATES = MainLayout(4), StateLayout(4, 2048)


def write_and_read(
    swa: Tensor, rows: Tensor, states: Tensor, keys: Tensor, kv_score: Tensor, slots: Tensor
) -> Tensor:
    """Write window keys, states and rows; then read the keys."""
    ops.quantize_and_insert_k_cache(keys, swa, slots, block_size=4)
    table = i32([[0, 1]])
    ops.save_and_compress(
        *(kv_score, torch.ones(4, 1024), states, table + 2, slots + 8),
        *(slots, table[0, :1].expand(4)),
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
    """Blocks have 96 bytes; at byte 32 of each is a row of two floats."""
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


@pytest.mark.parametrize("how", ["made in the graph", "beside a view of it", "a slice"])
def test_a_pool_that_is_a_view_is_refused(how: str) -> None:
    def write(pool: Tensor, cache: Tensor) -> None:
        pool = pool.view(torch.uint8) if how == "made in the graph" else pool
        rows = torch.ones(1, 512).bfloat16()
        swa = pool_view(pool, MAIN, block_stride=PAGE)
        ops.quantize_and_insert_k_cache(rows, swa, i64([0]), block_size=4)
        ops.quantize_and_insert_k_cache(rows, cache, i64([9]), block_size=4)

    torch._dynamo.reset()
    pool = torch.zeros(5 * PAGE, dtype=torch.uint8)
    cache = MAIN.allocate(4)
    if how == "made in the graph":
        pool = pool.view(torch.int8)
    elif how == "a slice":
        pool = pool[PAGE:]
    else:
        cache = pool_view(pool, MAIN, block_stride=PAGE)
    message = (
        "pool_view: pool must be an argument of the compiled function, and share no memory with "
        "another, got a view of another tensor. Make it before the call, and pass no view of it."
    )
    if how == "beside a view of it":
        message = "non-differentiable view input mutations"  # an error of AOTAutograd
    with pytest.raises(Exception, match=message), torch.no_grad():
        torch.compile(write, fullgraph=True, backend="aot_eager")(pool, cache)
    assert not pool.any()


def test_views_that_hide_that_they_share_memory_are_refused() -> None:
    """A compiler takes these views for separate memory, unlike two views of one storage."""
    pool = torch.zeros(4 * PAGE, dtype=torch.uint8)
    swa, states = (pool_view(pool, each, block_stride=PAGE) for each in (MAIN, STATES))
    check_apart(swa=swa, states=states, other=MAIN.allocate(2))
    hidden = torch.from_dlpack(states)
    with pytest.raises(ValueError, match=r"^check_apart: \w+ must share no memory with \w+, got"):
        check_apart(swa=swa, states=hidden)
    given = (torch.ones(4, 512).bfloat16(), torch.ones(4, 2048), i64([0, 1, 2, 3]))
    with pytest.raises(RuntimeError, match="input mutations on views with different dtypes"):
        torch.compile(write_and_read, backend="aot_eager")(swa, MAIN.allocate(4), states, *given)
