"""``cp_gather_heads`` and ``cp_gather_rows`` between GPUs in one kernel, byte for byte."""

import pytest
import torch
import torch.distributed as dist

import dsv4_ops as ops
from dsv4_ops.ops.context_parallel import gather_each
from tests.support.ranks import check_left_alone, gpu_ranks, left_alone, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

CALLS = (  # dtype and shape of each part, dimension
    (((torch.bfloat16, (32, 32, 512)),), 1),
    (((torch.int32, (1, 1024)),), 0),
    (((torch.float8_e4m3fn, (7, 32, 128)), (torch.float32, (7, 32, 1))), 1),
    (((torch.bfloat16, (1, 5, 64, 512)), (torch.float32, (1, 5, 64))), 0),
    (((torch.uint8, (3, 5, 7)),), 1),
    (((torch.bfloat16, (700, 64, 512)),), 1),  # 44 MiB: all programs run several tiles
    (((torch.bool, (9, 3)),), 0),
)
STEP = (0, 2, 1, 3, 0, 5)
"""Numbers of the calls in a graph."""


def parts_of(number, seed, rank):
    """Sample random bytes. With odd seeds, parts have gaps, and are unaligned on odd ranks."""
    made, found = torch.Generator("cuda").manual_seed(4 * seed + rank), []
    for dtype, shape in CALLS[number][0]:
        values = torch.randint(
            0,
            2 if dtype == torch.bool else 256,
            (*shape[:-1], (shape[-1] + 1) * dtype.itemsize),
            dtype=torch.uint8,
            generator=made,
            device="cuda",
        ).view(dtype)
        odd = seed % 2 * (rank % 2)
        whole = values[..., odd : odd + shape[-1]]
        found.append(whole if seed % 2 else whole.contiguous())
    return found


def gathered(number, parts, group):
    dim, via = CALLS[number][1], "symmetric_memory"
    if len(parts) == 1:
        gather = ops.cp_gather_heads if dim else ops.cp_gather_rows
        return [gather(parts[0], group, via=via)]
    return gather_each("gathered", parts, group, dim=dim, via=via)


def checked(found, number, seed, world):
    every = zip(*(parts_of(number, seed, rank) for rank in range(world)), strict=True)
    for each, parts in zip(found, every, strict=True):
        wanted = torch.cat([part.view(torch.uint8) for part in parts], CALLS[number][1])
        assert each.dtype == parts[0].dtype
        assert each.is_contiguous()
        assert torch.equal(each.view(torch.uint8), wanted), (CALLS[number], seed)


def merged(rank, world):
    """Return a merge, which uses the same memory as gathers."""
    lse = torch.full((4, 2 * world), float(rank), device="cuda")
    out = lse[..., None].expand(-1, -1, 512).contiguous()
    found = ops.cp_combine(out, lse, dist.group.WORLD.group_name, via="symmetric_memory")
    weight = torch.arange(world, device="cuda").float().softmax(0)
    want = (weight * torch.arange(world, device="cuda")).sum()
    torch.testing.assert_close(found.out, want.expand_as(found.out))


@torch.no_grad()
def rank_gathers(rank, world):
    group = dist.group.WORLD.group_name
    for seed in range(40):  # one rank is late in some calls; sizes differ between calls
        number = seed * 5 % len(CALLS)
        parts = parts_of(number, seed, rank)
        if seed % 5 == rank:
            torch.cuda._sleep(10**7)
        checked(gathered(number, parts, group), number, seed, world)
        if seed % 3 == 0:
            merged(rank, world)

    def step(*parts):
        given = iter(parts)
        taken = [[next(given) for _ in CALLS[number][0]] for number in STEP]
        return [gathered(*each, group) for each in zip(STEP, taken, strict=True)]

    held = [part for number in STEP for part in parts_of(number, 0, rank)]
    compiled = torch.compile(step, fullgraph=True)
    for found, number in zip(compiled(*held), STEP, strict=True):
        checked(found, number, 0, world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*held)
    for seed in range(0, 40, 2):
        fresh = [part for number in STEP for part in parts_of(number, seed, rank)]
        for part, other in zip(held, fresh, strict=True):
            part.copy_(other)
        if seed % 6 == 2 * rank:
            torch.cuda._sleep(10**7)
        graph.replay()
        for found, number in zip(results, STEP, strict=True):
            checked(found, number, seed, world)
    torch.cuda.synchronize()


def rank_left_alone(rank, world):
    group = dist.group.WORLD.group_name
    rows = torch.ones(4, 512, device="cuda")
    return left_alone(rank, lambda: ops.cp_gather_rows(rows, group, via="symmetric_memory"))


def first_in_a_capture(rank, world):
    """Return the error of a captured first call; nothing may wait for the other rank."""
    group, rows = dist.group.WORLD.group_name, torch.ones(4, 512, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ops.cp_gather_rows(rows, group, via="symmetric_memory")
    except RuntimeError as error:
        return str(error)
    return "captured"


def test_ranks_gather_every_size_and_in_graphs(tmp_path):
    world = gpu_ranks()
    run_ranks(world, rank_gathers, tmp_path, world, backend="nccl", seconds=60)


def test_a_rank_that_is_left_alone_has_an_error_within_the_timeout(tmp_path):
    check_left_alone(rank_left_alone, tmp_path)


def test_first_call_is_not_captured(tmp_path):
    for error in run_ranks(2, first_in_a_capture, tmp_path, 2, backend="nccl", seconds=60):
        assert error.startswith("cp_gather_rows: via must have been called before it is captured")
