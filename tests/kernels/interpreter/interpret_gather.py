"""The gathers that a rank of ``test_mapped.py`` runs."""

import time

import torch

from dsv4_ops.kernels.context_parallel import combine, gather
from dsv4_ops.kernels.launcher import EAGER
from tests.kernels.interpreter.mapped import workspace

# parts as (dtype, shape), and the dimension; sizes change between calls
CALLS = (
    (((torch.bfloat16, (3, 2, 8)),), 1),
    (((torch.float32, (1, 3, 512)), (torch.int32, (1, 3, 512))), 0),
    (((torch.uint8, (5, 3, 7)), (torch.float32, (5, 3, 1))), 1),  # integers of two sizes
    (((torch.float8_e4m3fn, (9, 5)),), 0),
    (((torch.int64, (33, 129)),), 0),  # several tiles per program; the last tile is not full
    (((torch.float16, (11, 6, 700)), (torch.bfloat16, (11, 1))), 1),
    (((torch.bool, (1, 1)), (torch.complex64, (1, 1))), 0),
    (((torch.float32, (0, 4)),), 0),
    (((torch.bfloat16, (1, 2, 512)),), 1),
)


def parts(number: int, rank: int) -> list[torch.Tensor]:
    """Sample a rank's random bytes; some tensors are columns, transposed, or at odd addresses."""
    seed, found = torch.Generator().manual_seed(100 * number + rank), []
    for dtype, shape in CALLS[number % len(CALLS)][0]:
        width = dtype.itemsize
        made = torch.randint(0, 256, (*shape[:-1], shape[-1] * width + 4 * width), generator=seed)
        if dtype == torch.bool:
            made %= 2
        whole = made.to(torch.uint8).view(dtype)
        kind = number // len(CALLS)
        if kind == 0:
            whole = whole[..., : shape[-1]].contiguous()
        elif kind == 1:  # rank 1 may copy wider integers than others
            whole = whole[..., rank : rank + shape[-1]]
        else:
            whole = whole[..., : shape[-1]].transpose(0, -1).contiguous().transpose(0, -1)
        found.append(whole)
    return found


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    found, want = (each.contiguous().view(torch.uint8) for each in (found, want))
    return torch.equal(found, want)


def main(folder: str, rank: int, world: int) -> None:
    mine = workspace(folder, rank, world)
    for number in range(3 * len(CALLS)):
        dim = CALLS[number % len(CALLS)][1]
        if number % 3 == rank:  # a rank that does not wait for this one reads old values
            time.sleep(0.05)
        found = gather.gather(EAGER, parts(number, rank), mine, rank, world, dim, 10**9)
        wanted = zip(*(parts(number, each) for each in range(world)), strict=True)
        for each, want in zip(found, wanted, strict=True):
            assert same(each, torch.cat(want, dim)), f"call {number}: {each}, {want}"
        if number % 2:  # a merge between gathers uses the same buffers
            lse = torch.full((2, 3 * world), float(rank))
            out = lse[..., None].expand(-1, -1, 8).contiguous()
            merged = combine.combine_ranks(EAGER, out, lse, mine, rank, world, "e", 10**9)
            weights = torch.arange(world).float().softmax(0)
            want = weights @ torch.arange(world).float()
            torch.testing.assert_close(merged[0], want.expand(2, 3, 8))
