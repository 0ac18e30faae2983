"""Cases and strategies of attention over chunked contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.testing.case import Case, OpTesting, i32
from dsv4_ops.testing.float64.mla_context import exact_merge, exact_prefill
from dsv4_ops.testing.strategies.draw import Draw

_LENS = (0, 0, 1, 2, 3, 4, 5, 8, 11, 12, 13, 24, 100, 4096, 2**31 - 1, -1, -(2**31))


def _plan(
    rows: int, chunks: int, plan: str = "packed", block: int = 1, ranks: int = 1, turn: int = 1
) -> dict[str, Any]:
    return {
        "workspace_rows": rows,
        "max_chunks": chunks,
        "chunk_plan": plan,
        "block_size": block,
        "cp_world_size": ranks,
        "cp_interleave": turn,
    }


def _one_rank(starts: list[list[int]], ends: list[list[int]], num_chunks: int) -> tuple[Any, ...]:
    return starts, ends, ends, [num_chunks]


def _chunk_cases() -> list[Case]:
    lens = i32([10, 0, 5])
    packed = [[0, 0, 0], [10, 0, 2]], [[0, 10, 10, 12], [0, 0, 0, 3]]
    long = [[0, 0], [12, 0], [24, 0]], [[0, 12, 12], [0, 12, 12], [0, 6, 10]]
    cut = [[0] * 3, [10, 0, 5]], [[0, 10, 10, 15], [0] * 4]
    two_ranks = ([[0, 0], [3, 1]], [[0, 5, 7], [0, 0, 1]], [[0, 3, 4], [0, 0, 1]], [2])
    turns_of_two = ([[0, 0], [4, 0]], [[0, 8, 8], [0, 3, 6]], [[0, 4, 4], [0, 2, 4]], [2])
    equal = [[0, 0, 0], [6, 0, 5]], [[0, 6, 6, 11], [0, 4, 4, 4]]
    none = [[0, 0]] * 2, [[0, 0, 0]] * 2
    return [
        Case("packed", (lens,), _plan(12, 2), _one_rank(*packed, 2)),
        Case("one long context", (i32([30, 4]),), _plan(12, 3), _one_rank(*long, 3)),
        Case(
            "overflow is reported",
            (i32([30, 4]),),
            _plan(12, 1),
            _one_rank([[0, 0]], [[0, 12, 12]], 3),
        ),
        Case("as many rows as the workspace", (lens,), _plan(15, 2), _one_rank(*cut, 1)),
        Case("no context", (i32([0, -3]),), _plan(12, 2), _one_rank(*none, 0)),
        Case("no request", (i32([]),), _plan(12, 2), _one_rank([[]] * 2, [[0]] * 2, 0)),
        Case("two ranks", (i32([5, 3]),), _plan(8, 2, ranks=2), two_ranks),
        Case(
            "two ranks, turns of two", (i32([11, 3]),), _plan(8, 2, ranks=2, turn=2), turns_of_two
        ),
        Case("equal", (lens,), _plan(12, 2, "equal", 2), _one_rank(*equal, 2)),
        Case(
            # 6 rows per request are rounded down to 4, the rows of a round in which each of 2 ranks
            # takes 2
            "equal, whole rounds",
            (i32([12, 1]),),
            _plan(12, 3, "equal", 2, 2, 2),
            (
                [[0, 0], [2, 2], [4, 2]],
                [[0, 4, 5], [0, 4, 4], [0, 4, 4]],
                [[0, 2, 4], [0, 2, 2], [0, 2, 2]],
                [3],
            ),
        ),
        Case(
            "equal, less than a block each",
            (i32([1, 2, 3]),),
            _plan(12, 1, "equal", 8),
            _one_rank([[0] * 3], [[0] * 4], 2**31 - 1),
        ),
        Case("longest", (i32([2**31 - 1] * 3),), _plan(2**31 - 1, 4)),
        Case(
            "longest turns", (i32([2**31 - 1] * 3),), _plan(2**31 - 1, 4, ranks=2, turn=2**30 - 1)
        ),
    ]


def _chunk_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    size = max(draw.one_of(3, 0, 1, 2, 12), min_size)
    lens = [draw(draw.st.sampled_from(_LENS) | draw.st.integers(0, 40)) for _ in range(size)]
    return Case("sampled", (i32(lens),), settings)


context_chunks = OpTesting(
    cases=_chunk_cases,
    settings=(
        _plan(24, 5, ranks=2, turn=3),
        _plan(12, 7),
        _plan(12, 3, turn=64),
        _plan(30, 5, ranks=4),
        _plan(40, 5, "equal", 4),
        _plan(40, 4, "equal", 2, 2, 3),
        _plan(2**31 - 1, 2, ranks=2, turn=64),
    ),
    make=_chunk_call,
)

NAN = float("nan")
INF = float("inf")


def _state(out: list[float], lse: list[float]) -> tuple[Tensor, Tensor]:
    """Return the outputs and log-sum-exps of heads, with one output value per head."""
    return torch.tensor(out).view(1, -1, 1), torch.tensor(lse).view(1, -1)


def _merge_cases() -> list[Case]:
    lse = [0.0, INF, -INF, NAN, -INF, INF, 2.0]
    prefix = _state([1.0, 1.0, NAN, NAN, NAN, 1.0, 4.0], lse)
    suffix = _state([5.0, 5.0, 5.0, 5.0, NAN, NAN, 5.0], [-INF, 3.0, 3.0, 3.0, -INF, NAN, -INF])
    expected = (
        [[1.0], [5.0], [5.0], [5.0], [0.0], [0.0], [4.0]],
        [0.0, 3.0, 3.0, 3.0, -INF, -INF, 2.0],
    )
    wrapped = tuple([values] for values in expected)
    base_2 = (*_state([0.0], [1.0]), *_state([10.0], [1.0]))
    bf16 = tuple(each.to(torch.bfloat16) for each in (prefix[0], suffix[0]))
    return [
        Case("sides without keys", (*prefix, *suffix), {"lse_base": "e"}, wrapped),
        Case(
            "sides without keys, base 2, bfloat16",
            (bf16[0], prefix[1], bf16[1], suffix[1]),
            {"lse_base": "2"},
            wrapped,
        ),
        Case("base 2", base_2, {"lse_base": "2"}, ([[[5.0]]], [[2.0]])),
        Case(
            "mixed dtypes", (prefix[0], prefix[1], bf16[1], suffix[1]), {"lse_base": "e"}, wrapped
        ),
        Case("no token", tuple(each[:0] for each in (*prefix, *suffix)), {"lse_base": "e"}),
    ]


def merged_lses(draw: Draw, seed: torch.Generator, *shape: int) -> Tensor:
    """Sample log-sum-exps from -60 to 60, and some that are infinite or NaN."""
    spread: int = draw.one_of(4, 120)
    lse = (torch.rand(shape, generator=seed) - 0.5) * spread
    for value in (-INF, INF, NAN):
        lse = torch.where(torch.rand(shape, generator=seed) < 0.1, value, lse)
    return lse


def merged_out(lse: Tensor, seed: torch.Generator, width: int, dtype: torch.dtype) -> Tensor:
    """Sample outputs, which are NaN where ``lse`` is not finite."""
    out = torch.randn((*lse.shape, width), generator=seed)
    return torch.where(lse.isfinite()[..., None], out, NAN).to(dtype)


def _merge_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7), min_size)
    dtypes = [torch.float32, torch.bfloat16]
    if not min_size:
        dtypes = [draw.one_of(torch.float32, torch.bfloat16) for _ in range(2)]
    tensors: list[Tensor] = []
    for dtype in dtypes:
        lse = merged_lses(draw, seed, num_tokens, 3)
        tensors += [merged_out(lse, seed, 20, dtype), lse]
    return Case("sampled", tuple(tensors), settings)


def _precise_merge(
    prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, *, lse_base: str
) -> Any:
    return exact_merge([prefix_out, suffix_out], [prefix_lse, suffix_lse], lse_base)


merge_attn_states = OpTesting(
    cases=_merge_cases,
    settings=({"lse_base": "e"}, {"lse_base": "2"}),
    make=_merge_call,
    precise=_precise_merge,
)


def _states_cases() -> list[Case]:
    outs = torch.tensor([[8.0, 1.0, NAN], [NAN, 3.0, NAN], [NAN, 2.0, NAN]]).view(3, 1, 3, 1)
    lses = torch.tensor([[2.0, 0.0, -INF], [-INF, 0.0, NAN], [INF, 1.0, INF]]).view(3, 1, 3)
    merged = [[[8.0], [2.0], [0.0]]], [[2.0, 2.0, -INF]]
    return [
        Case("base 2", (outs, lses), {"lse_base": "2"}, merged),
        Case(
            "one part",
            (outs[:1], lses[:1]),
            {"lse_base": "e"},
            ([[[8.0], [1.0], [0.0]]], [[2.0, 0.0, -INF]]),
        ),
        Case("no token", (outs[:, :0], lses[:, :0]), {"lse_base": "e"}),
    ]


def _states_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_parts = max(draw.one_of(4, 1, 2, 5), min_size)
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7), min_size)
    dtype = torch.bfloat16 if min_size or draw.flag() else torch.float32
    lses = merged_lses(draw, seed, num_parts, num_tokens, 3)
    return Case("sampled", (merged_out(lses, seed, 20, dtype), lses), settings)


def _precise_states(outs: Tensor, lses: Tensor, *, lse_base: str) -> Any:
    return exact_merge(list(outs), list(lses), lse_base)


merge_states = OpTesting(
    cases=_states_cases,
    settings=({"lse_base": "e"}, {"lse_base": "2"}),
    make=_states_call,
    precise=_precise_states,
)

HEADS, NOPE, ROPE, VALUE = 3, 32, 16, 32


def _prefill_cases() -> list[Case]:
    q = torch.zeros(3, 1, 2)
    k_nope, k_pe = torch.tensor([[[1.0]], [[NAN]], [[1.0]]]), torch.tensor([[1.0], [NAN], [1.0]])
    v = torch.tensor([[[2.0]], [[NAN]], [[4.0]]])
    tensors = (q, k_nope, k_pe, v)
    causal, whole = ({"softmax_scale": 1.0, "causal": flag} for flag in (True, False))
    nothing = [[0.0]], [-INF]
    garbage = i32([1, 2, 2, 3]), i32([-7, 1, 2, 2**31 - 1])
    seed = torch.Generator().manual_seed(0)
    several = ragged_prefill(seed, [(3, 7), (270, 300), (0, 5), (130, 129)], sizes=(1, 16, 16, 16))
    return [
        Case(
            # token 0 has key 0, token 1 has no key, token 2 is padding; no token has key 1
            "one key, none, padding",
            (*tensors, i32([0, 1, 2]), i32([0, 1, 1])),
            whole,
            ([[[2.0]], nothing[0], nothing[0]], [[0.0], nothing[1], nothing[1]]),
        ),
        Case(
            # only the last of three queries sees the key
            "fewer keys than queries",
            (*tensors, i32([0, 3]), i32([2, 3])),
            causal,
            ([nothing[0], nothing[0], [[4.0]]], [nothing[1], nothing[1], [0.0]]),
        ),
        Case(
            "bounds that do not exist",
            (*tensors, *garbage),
            whole,
            ([nothing[0], [[2.0]], [[4.0]]], [nothing[1], [0.0], [0.0]]),
        ),
        Case(
            "bounds that do not exist, bfloat16",
            (*(each.to(torch.bfloat16) for each in tensors), *garbage),
            whole,
            ([nothing[0], [[2.0]], [[4.0]]], [nothing[1], [0.0], [0.0]]),
        ),
        Case("several tiles of queries and keys", several, {**causal, "softmax_scale": 0.2}),
        *(
            Case(f"values that are not seen by all, {each}", unlike_values(each), causal)
            for each in (torch.float32, torch.bfloat16)
        ),
        Case("no token", (q[:0], *tensors[1:], i32([0]), i32([0])), causal),
        Case(
            "no key",
            (q, *(each[:0] for each in tensors[1:]), i32([0, 3]), i32([0, 0])),
            whole,
            ([nothing[0]] * 3, [nothing[1]] * 3),
        ),
    ]


def unlike_values(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Make three queries with equal logits over three keys with values 2, 4 and NaN: results are 2,
    3 and NaN."""
    q, k_nope, k_pe = torch.zeros(3, 1, 2), torch.ones(3, 1, 1), torch.ones(3, 1)
    v = torch.tensor([2.0, 4.0, NAN]).view(3, 1, 1)
    return *(each.to(dtype) for each in (q, k_nope, k_pe, v)), i32([0, 3]), i32([0, 3])


def ragged_prefill(
    seed: torch.Generator,
    lens: list[tuple[int, int]],
    *,
    padding: Sequence[int] = (2, 3),
    dtype: torch.dtype = torch.bfloat16,
    sizes: tuple[int, int, int, int] = (HEADS, NOPE, ROPE, VALUE),
) -> tuple[Tensor, ...]:
    """Make the tensors of a call for requests of (queries, keys), followed by padding of NaN."""
    heads, nope, rope, value = sizes
    start_loc, cu_seq_lens = [0], [0]
    for queries, keys in lens:
        start_loc.append(start_loc[-1] + queries)
        cu_seq_lens.append(cu_seq_lens[-1] + keys)
    num_tokens, num_k = start_loc[-1] + padding[0], cu_seq_lens[-1] + padding[1]
    q = torch.randn(num_tokens, heads, nope + rope, generator=seed)
    kv = torch.randn(num_k, heads, nope + value, generator=seed)
    k_pe = torch.randn(num_k, rope, generator=seed)
    q[start_loc[-1] :], kv[cu_seq_lens[-1] :], k_pe[cu_seq_lens[-1] :] = NAN, NAN, NAN
    q, kv, k_pe = (each.to(dtype) for each in (q, kv, k_pe))
    return q, kv[..., :nope], k_pe, kv[..., nope:], i32(start_loc), i32(cu_seq_lens)


def _prefill_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    sizes = draw.st.tuples(
        draw.st.sampled_from((1, 0, 2, 5, 17)), draw.st.sampled_from((3, 0, 1, 16, 33, 70))
    )
    lens = draw(draw.st.lists(sizes, min_size=min_size, max_size=5))
    padding = [max(draw.one_of(1, 0, 3), min_size) for _ in range(2)]
    dtype = torch.bfloat16 if min_size or draw.flag() else torch.float32
    q, *keys, start_loc, cu_seq_lens = ragged_prefill(seed, lens, padding=padding, dtype=dtype)
    if draw.integer(0, 3) == 0:  # bounds past the last token and the last key
        q, *keys = (each[: max(each.shape[0] - 9, min_size)] for each in (q, *keys))
    return Case("sampled", (q, *keys, start_loc, cu_seq_lens), settings)


mla_prefill = OpTesting(
    cases=_prefill_cases,
    settings=tuple({"softmax_scale": 0.2, "causal": causal} for causal in (True, False)),
    make=_prefill_call,
    precise=exact_prefill,
)
