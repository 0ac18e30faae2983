"""Calls of dense MLA for tests of kernels: ragged requests, adversarial values, and rows of NaN
that no token sees; and float64 results of the calls, token by token."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout, mla_layout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import exact_results
from tests.helpers import INT32_MAX, INT32_MIN, i32

DENSE, SPARSE = "mla_decode", "mla_sparse"
WIDTH, RANK = 576, 512
FP8, DS_FP8 = MlaFp8Layout.tag, MlaDsFp8Layout.tag
LAYOUTS = (PlainLayout.tag, FP8, DS_FP8)


def cache_of(
    made: torch.Generator,
    layout: str,
    blocks: int,
    block_size: int,
    width: int = WIDTH,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Sample rows that make logits of a few units with normal queries."""
    rows = torch.randn(blocks, block_size, width, generator=made).to(dtype)
    if layout == PlainLayout.tag:
        return rows
    codes = rows.float().to(torch.float8_e4m3fn).view(torch.uint8)
    if layout == FP8:
        return codes
    cache = mla_layout(layout, block_size, width).allocate(blocks)
    cache[..., :RANK] = codes[..., :RANK]
    scales = torch.rand(blocks, block_size, 4, generator=made) + 0.5
    cache[..., RANK : RANK + 16] = scales.view(torch.uint8)
    cache[..., RANK + 16 :] = rows[..., RANK:].contiguous().view(torch.uint8)
    return cache


def mla_case(
    seed: int,
    query_lens: list[int],
    heads: int,
    *,
    longest: int = 300,
    layout: str = "plain",
    block_size: int = 64,
    width: int = WIDTH,
    rank: int = RANK,
    dtype: torch.dtype = torch.bfloat16,
    hint: bool = True,
    adversarial: bool = True,
    padding: int = 1,
    codes: bool = False,
    context_lens: list[int] | None = None,
    **changed: object,
) -> Case:
    """Make requests with these numbers of tokens, then padding tokens.

    The first request fills its row of the table; other rows end in garbage entries. With
    adversarial values, some blocks and requests do not exist, and lengths are out of range.
    """
    made = torch.Generator().manual_seed(seed)
    columns = -(-longest // block_size)
    num_reqs, tokens = len(query_lens), sum(query_lens) + padding
    if context_lens is None:
        some = torch.randint(0, longest + 1, (num_reqs,), generator=made).tolist()
        context_lens = [longest, *some[1:]]
    blocks = num_reqs * columns + 3
    table = torch.randperm(blocks, generator=made)[: num_reqs * columns].int()
    table = table.view(num_reqs, columns)
    requests = torch.arange(num_reqs).repeat_interleave(torch.tensor(query_lens)).int()
    requests = torch.cat([requests, i32([-1] * padding)])
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seq_lens = torch.zeros(tokens, dtype=torch.int32)
    for request, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        first = int(starts[request])
        seq_lens[first : first + count] = (context - count + 1 + torch.arange(count)).clamp(min=0)
    for request, context in enumerate(context_lens):  # garbage after the last block
        table[request, -(-context // block_size) :] = 2147480000
    if adversarial:
        none = i32([-1, INT32_MIN, blocks, INT32_MAX])
        where = torch.rand(table.shape, generator=made) < 0.08
        table = torch.where(where, none[torch.randint(0, 4, table.shape, generator=made)], table)
        seq_lens[tokens - padding :] = 5
        if sum(query_lens) > 3:
            seq_lens[1], requests[2] = INT32_MIN, num_reqs
    cache = cache_of(made, layout, blocks, block_size, width, dtype)
    seen = torch.zeros(blocks, block_size, dtype=torch.bool)
    for token in range(tokens):
        for page, row in rows_of(seq_lens[token], requests[token], table, blocks, block_size):
            seen[page, row] = True
    q = torch.randn(tokens, heads, width, generator=made)
    q = q.to(torch.float8_e4m3fn) if codes else q.to(dtype)
    scales = (torch.tensor([0.75]) if codes else None, torch.tensor([1.5]))
    scales = scales if layout == FP8 else (None, None)
    settings = {"block_size": block_size, "kv_lora_rank": rank, "layout": layout}
    settings |= {"softmax_scale": 0.05, "num_splits": 0, "batch_invariant": False, **changed}
    nan = torch.full_like(cache, 0xFF if cache.dtype == torch.uint8 else math.nan)
    cache = torch.where(seen[..., None], cache, nan)  # no token sees the other rows
    hints = (starts if hint else None, None)
    return Case("dense", (q, cache, seq_lens, requests, table, *hints, *scales), settings)


def rows_of(
    length: Tensor, request: Tensor, table: Tensor, blocks: int, block_size: int
) -> list[tuple[int, int]]:
    """Return the block, and the row within it, of every row that a token sees, by position."""
    request = int(request)
    if not 0 <= request < table.shape[0]:
        return []
    found = []
    for position in range(min(max(int(length), 0), table.shape[1] * block_size)):
        page = int(table[request, position // block_size])
        if 0 <= page < blocks:
            found.append((page, position % block_size))
    return found


def kernel_cases() -> dict[str, Case]:
    """Return critical calls for kernels over bf16 rows of 576 values, with a few blocks of keys."""
    short = [129, 1, 0, 64, 128, 127, 63, 65]
    return {
        "ragged tokens that share programs": mla_case(0, [2, 1, 4], 16, longest=150),
        "tokens of no program's size": mla_case(1, [3, 5], 12, longest=140, num_splits=2),
        "without a hint": mla_case(1, [3, 5], 12, longest=140, hint=False, num_splits=2),
        "two tiles of heads": mla_case(2, [1, 2], 65, longest=140, num_splits=3),
        "one head": mla_case(3, [5, 7], 1, longest=100),
        "more splits than blocks": mla_case(4, [1, 1], 8, longest=130, num_splits=5),
        "one split": mla_case(5, [2, 2], 16, longest=300, num_splits=1),
        "batch-invariant": mla_case(6, [3, 2], 8, longest=200, batch_invariant=True),
        "lengths at ends of blocks": mla_case(
            7, [1] * 8, 8, longest=129, hint=False, adversarial=False, context_lens=short
        ),
        "pages of 7 rows": mla_case(8, [3, 2], 8, longest=100, block_size=7),
    }


def spoiled(case: Case) -> tuple[Case, list[int]]:
    """Put NaN into the two last rows of the first request: a latent value of one row, the RoPE part
    of the other. Return the call, and the tokens that see these rows."""
    q, cache, seq_lens, requests, table, *rest = case.tensors
    changed = cache.clone()
    nan: float = 0x7F if cache.dtype == torch.uint8 else math.nan
    first = [token for token in range(q.shape[0]) if int(requests[token]) == 0]
    length = max(int(seq_lens[token]) for token in first)
    args = (table, cache.shape[0], case.settings["block_size"])
    *_, before, last = rows_of(torch.tensor(length), requests[first[0]], *args)
    changed[(*before, 3)] = nan
    changed[(*last, slice(-2, None))] = 0xFF if cache.dtype == torch.uint8 else math.nan
    made = Case("spoiled", (q, changed, seq_lens, requests, table, *rest), case.settings)
    return made, [token for token in first if int(seq_lens[token]) > length - 2]


def assert_spoils_what_sees_it(run: Callable[[Case], Sequence[Tensor]], case: Case) -> None:
    """Assert that a row of NaN reaches only the tokens that see it. Other results may be rounded
    differently, because tokens that share a program share the scale of partial results."""
    changed, seeing = spoiled(case)
    assert 0 < len(seeing) < int((case.tensors[3] == 0).sum())
    others = [token for token in range(case.tensors[0].shape[0]) if token not in seeing]
    for actual, expected in zip(run(changed), run(case), strict=True):
        assert bool(actual[seeing].isnan().all())
        eps = 2 * torch.finfo(actual.dtype).eps
        amax = float(expected[others].nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(actual[others], expected[others], rtol=eps, atol=eps * amax)


def planned(case: Case, plan: Tensor) -> Case:
    """Return the call with a plan, and without the hint that a plan excludes."""
    tensors = list(case.tensors)
    tensors[5:7] = None, plan
    return Case(case.name, tuple(tensors), case.settings)


def sparse_case(case: Case, seed: int = 0, topk: int = 0) -> Case:
    """Turn a call of ``mla_decode`` into one of ``mla_sparse``: the visible rows of a token become
    slots in any order, among absent slots; ``topk`` is the minimum number of columns."""
    q, cache, seq_lens, requests, table, *_ = case.tensors
    blocks, size = cache.shape[0], case.settings["block_size"]
    made = torch.Generator().manual_seed(seed)
    lists = [
        [page * size + row for page, row in rows_of(*token, table, blocks, size)]
        for token in zip(seq_lens, requests, strict=True)
    ]
    lists = [each + [-1, blocks * size, INT32_MAX, INT32_MIN][: len(each)] for each in lists]
    width = max(topk, *map(len, lists))
    indices = torch.randint(0, blocks * size, (len(lists), width), generator=made).int()
    for row, each in zip(indices, lists, strict=True):
        row[: len(each)] = i32(each)[torch.randperm(len(each), generator=made)]
    lens = i32(list(map(len, lists)))
    lens[lens == width] = INT32_MAX
    return Case("sparse", (q, cache, indices, lens), case.settings)


def flash_mla_case(case: Case) -> Case:
    """Make a call of ``mla_sparse`` with FP8 rows of bf16 scales; FlashMLA rounds other scales."""
    if case.settings["layout"] == DS_FP8:
        scales = case.tensors[1].view(torch.float32)[..., RANK // 4 : RANK // 4 + 4]
        scales.copy_(scales.bfloat16())
    return sparse_case(case)


def assert_exact(
    actual: tuple[Tensor, Tensor], case: Case, more: float = 1.6, op: str = DENSE
) -> None:
    """Assert errors within a factor of the reference's, and exact results without keys."""
    out, lse = (each.cpu().double() for each in actual)
    results = exact_results(OPS[op].implementation("testing"), case)
    expected, expected_lse = (result.value for result in results)
    reference = OPS[op].reference(*case.tensors, **case.settings)[0].double()
    without = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, without)
    assert bool((out[without] == 0).all())
    allowed = more * float((reference - expected).abs().max()) + 1e-5
    assert float((out - expected).abs().max()) <= allowed
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=1e-5)
