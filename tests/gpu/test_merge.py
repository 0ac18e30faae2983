"""``cp_combine`` in one kernel, over memory that the GPUs map into each other."""

import pytest
import torch
import torch.distributed as dist

import dsv4_ops as ops
from dsv4_ops.reference.mla_context import merge_states
from tests.support.ranks import check_left_alone, gpu_ranks, left_alone, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

CALLS = (  # tokens, heads, width, dtype
    (32, 64, 512, torch.bfloat16),
    (1, 4, 512, torch.bfloat16),
    (5, 4, 12, torch.float32),
    (300, 128, 512, torch.bfloat16),
    (7, 16, 512, torch.float16),
)


def parts_of(tokens, heads, width, dtype, world, seed):
    """Sample outputs and log-sum-exps of all ranks, equal on each rank."""
    made = torch.Generator("cuda").manual_seed(seed)
    outs = torch.randn(world, heads, tokens, width, generator=made, device="cuda")
    lses = 3 * torch.randn(world, tokens, heads, generator=made, device="cuda")
    outs = outs.to(dtype).transpose(1, 2)
    for fill in (float("-inf"), float("inf"), float("nan")):
        absent = torch.rand(lses.shape, generator=made, device="cuda") < 0.1
        lses[absent], outs[absent] = fill, torch.nan
    return outs, lses


def checked(found, outs, lses, rank, base):
    own = outs.shape[2] // outs.shape[0]
    mine = slice(rank * own, (rank + 1) * own)
    expected, expected_lse = merge_states(outs[:, :, mine], lses[:, :, mine], lse_base=base)
    rounding = max(torch.finfo(outs.dtype).eps, 2e-6)
    torch.testing.assert_close(found[0], expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(found[1], expected_lse, rtol=2e-6, atol=2e-6)


@torch.no_grad()
def rank_merges(rank, world):
    group = dist.group.WORLD.group_name

    def merge(out, lse, base="e"):
        return ops.cp_combine(out, lse, group, via="symmetric_memory", lse_base=base)

    for seed in range(40):  # one rank is late in some calls; sizes differ between calls
        base = ("e", "2")[seed % 2]
        outs, lses = parts_of(*CALLS[seed * 7 % len(CALLS)], world, seed)
        if seed % 5 == rank:
            torch.cuda._sleep(10**7)
        checked(merge(outs[rank], lses[rank], base), outs, lses, rank, base)
    outs, lses = parts_of(*CALLS[0], world, 0)
    out, lse = outs[rank].clone(), lses[rank].clone()
    compiled = torch.compile(merge, fullgraph=True)
    checked(compiled(out, lse), outs, lses, rank, "e")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [merge(out, lse) for _ in range(3)]
    for seed in range(20):
        outs, lses = parts_of(*CALLS[0], world, seed)
        out.copy_(outs[rank])
        lse.copy_(lses[rank])
        graph.replay()
        for each in found:
            checked(each, outs, lses, rank, "e")
    torch.cuda.synchronize()


def rank_left_alone(rank, world):
    group = dist.group.WORLD.group_name
    out, lse = torch.ones(4, 2, 512, device="cuda").bfloat16(), torch.zeros(4, 2, device="cuda")
    return left_alone(rank, lambda: ops.cp_combine(out, lse, group, via="symmetric_memory"))


def test_ranks_merge_at_every_size_and_in_graphs(tmp_path):
    world = gpu_ranks()
    run_ranks(world, rank_merges, tmp_path, world, backend="nccl", seconds=60)


def test_a_rank_that_is_left_alone_has_an_error_within_the_timeout(tmp_path):
    check_left_alone(rank_left_alone, tmp_path)
