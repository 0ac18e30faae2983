"""Contexts in chunks: plans on device and host, attention of a chunk, and merges."""

import math
from itertools import pairwise
from random import Random

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.testing.cases.mla_context import ragged_prefill, unlike_values
from tests.helpers import NIGHTLY, assert_exact, call, i32, strided

LN = {n: math.log(n) for n in (2, 3, 4, 6, 8, 10)}
NAN, INF = math.nan, math.inf


def settings_of(random: Random) -> dict:
    ranks, turn = random.choice((1, 1, 2, 4)), random.choice((1, 1, 2, 5))
    block = random.choice((1, 4))
    least = math.lcm(block, ranks * turn)
    return {
        "workspace_rows": random.randint(1, 6) * least + random.choice((0, 0, 1, 3)),
        "chunk_plan": random.choice(("packed", "packed", "equal")),
        "block_size": block,
        "cp_world_size": ranks,
        "cp_interleave": turn,
    }


def has_blocks(settings: dict, num_reqs: int) -> bool:
    """Return whether a chunk can hold a block and a round of the ranks per request."""
    ranks = settings["cp_world_size"]
    round_ = ranks * settings["cp_interleave"] if ranks > 1 else 1
    return settings["workspace_rows"] >= math.lcm(settings["block_size"], round_) * max(1, num_reqs)


def device_plan(
    lens: list[int], max_chunks: int, settings: dict
) -> list[list[tuple[int, int, int]]]:
    """Return the op's plan in the form of the host's."""
    chunks = ops.context_chunks(strided(i32(lens)), max_chunks=max_chunks, **settings)
    plan = []
    lists = chunks.local_starts.tolist(), chunks.cu_seq_lens.tolist()
    for starts, bounds in zip(*lists, strict=True):
        plan.append(
            [
                (request, start * settings["cp_world_size"], last - first)
                for request, (start, (first, last)) in enumerate(
                    zip(starts, pairwise(bounds), strict=True)
                )
                if last > first
            ]
        )
    count = chunks.num_chunks.item()
    assert not any(plan[count:])
    return plan[:count]


def test_the_plans_on_host_and_device_are_one() -> None:
    """The chunks cover every position once, in order, within the budget; ``max_context_chunks``
    bounds their number."""
    for seed in range(2000 if NIGHTLY else 300):
        random = Random(seed)
        settings, long = settings_of(random), random.choice((5, 40))
        lens = [random.choice((0, random.randint(0, long))) for _ in range(random.randint(0, 6))]
        sizes = {"num_reqs": len(lens), "max_model_len": max([1, *lens]), **settings}
        if settings["chunk_plan"] == "equal" and not has_blocks(settings, len(lens)):
            with pytest.raises(ValueError, match="an equal plan of"):
                ops.max_context_chunks(**sizes)
            continue
        plan, most = ops.plan_context_chunks(lens, **settings), ops.max_context_chunks(**sizes)
        assert len(plan) <= ops.max_context_chunks(**sizes, max_context_tokens=sum(lens)) <= most
        assert device_plan(lens, most, settings) == plan, (lens, settings)
        done = [0] * len(lens)
        for chunk in plan:
            assert 0 < sum(length for *_, length in chunk) <= settings["workspace_rows"]
            for request, start, length in chunk:
                assert start == done[request]
                done[request] += length
        assert done == lens


def test_one_long_context_among_many_short_ones() -> None:
    lens = [60000] + 31 * [16]
    sizes = {"workspace_rows": 65536, "block_size": 64}
    assert len(ops.plan_context_chunks(lens, chunk_plan="equal", **sizes)) == 30
    assert len(ops.plan_context_chunks(lens, **sizes)) == 1
    for plan, count in (("equal", 30), ("packed", 1)):
        chunks = ops.context_chunks(i32(lens), max_chunks=1, chunk_plan=plan, **sizes)
        assert chunks.num_chunks.tolist() == [count]


def test_many_long_contexts() -> None:
    """16383 requests of 2**20 tokens have prefix sums beyond int32."""
    chunks = call(ops.context_chunks, i32([2**20] * 16383), workspace_rows=2**31 - 1, max_chunks=9)
    assert chunks.num_chunks.tolist() == [8]
    last = 16383 * 2**20 - 7 * (2**31 - 1)
    assert chunks.cu_seq_lens[:, -1].tolist() == [2**31 - 1] * 7 + [last, 0]


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((4096, 128, 64), 32768), ((131072, 256, 64), 65536), ((4096, 2048, 64), 131072),
     ((2048, 8, 64), 16384), ((163840, 1024, 128), 131072)],
)  # fmt: skip
def test_the_rule_for_the_workspace(sizes: tuple[int, int, int], rows: int) -> None:
    named = dict(zip(("max_model_len", "max_num_seqs", "block_size"), sizes, strict=True))
    assert ops.mla_workspace_rows(**named) == rows
    for ranks, turn in ((2, 1), (3, 1), (8, 64), (4, 3)):
        shared = ops.mla_workspace_rows(**named, cp_world_size=ranks, cp_interleave=turn)
        align = math.lcm(sizes[2], ranks * turn)
        assert shared >= max(rows, align * sizes[1])
        assert shared % align == 0


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).view(1, -1, 1)


def lses(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).view(1, -1)


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
def test_a_side_without_keys_is_the_other_one(empty: float) -> None:
    """The result has the bits of the side with keys, whatever the other side holds."""
    torch.manual_seed(0)
    out, lse = torch.randn(5, 3, 8), torch.randn(5, 3) * 30
    for garbage in (NAN, INF, 1e38):
        nothing = (torch.full_like(out, garbage), torch.full_like(lse, empty))
        for sides in ((out, lse, *nothing), (*nothing, out, lse)):
            assert_exact(ops.merge_attn_states(*sides), (out, lse))
        states = (torch.stack([no, some, no]) for no, some in zip(nothing, (out, lse), strict=True))
        assert_exact(ops.merge_states(*states), (out, lse))
        nothing_at_all = torch.zeros_like(out), torch.full_like(lse, -INF)
        assert_exact(ops.merge_attn_states(*nothing, *nothing), nothing_at_all)


def test_merges_of_large_log_sum_exps() -> None:
    """Logits of 1e4 and more exceed the range of exp."""
    parts = values(2.0, 2.0), lses(1e4, -1e4), values(4.0, 4.0), lses(1e4, 1e4)
    merged = ops.merge_attn_states(*parts)
    torch.testing.assert_close(merged, (values(3.0, 4.0), lses(1e4 + LN[2], 1e4)))


def test_a_value_of_nan_is_of_those_that_see_it() -> None:
    """Only the last of three causal queries sees the NaN."""
    out, lse = ops.mla_prefill(*unlike_values(torch.float32), softmax_scale=1.0, causal=True)
    assert out[:2].flatten().tolist() == [2.0, 3.0]
    assert out[2].isnan().all()
    assert_exact(lse[:2].flatten(), torch.tensor([0.0, LN[2]]))


@pytest.mark.parametrize("causal", [False, True])
def test_nan_stays_in_its_request(causal: bool) -> None:
    """A key and a value of the second of three requests are NaN: the others keep their bits."""
    seed = torch.Generator().manual_seed(0)
    clean = ragged_prefill(seed, [(3, 5), (4, 4), (2, 6)], dtype=torch.float32)
    spoiled = [each.clone() for each in clean]
    spoiled[1][6], spoiled[3][7] = NAN, NAN
    settings = {"softmax_scale": 0.2, "causal": causal}
    expected, found = (ops.mla_prefill(*each, **settings) for each in (clean, spoiled))
    for left, right in zip(found, expected, strict=True):
        assert_exact((left[:3], left[7:]), (right[:3], right[7:]))
    assert found.out[6].isnan().all()
    assert found.lse[6].isnan().all()
