"""The merges that a rank of ``test_mapped.py`` runs."""

import math

import torch

from dsv4_ops.kernels.context_parallel import combine
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.reference.mla_context import merge_states
from tests.kernels.interpreter.mapped import workspace

CALLS = (  # num_tokens, own heads, width, dtype, base; shapes change between calls
    (1, 2, 8, torch.bfloat16, "e"),
    (3, 3, 8, torch.bfloat16, "e"),  # several rows per tile; the last tile is not full
    (1, 2, 8, torch.bfloat16, "2"),
    (11, 10, 4, torch.float32, "e"),  # several tiles per program
    (2, 3, 6, torch.float16, "2"),
    (0, 2, 8, torch.bfloat16, "e"),
    (1, 1, 8, torch.bfloat16, "e"),
)


def parts(number: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample outputs and log-sum-exps of all ranks, some without keys, some transposed."""
    num_tokens, own, width, dtype, _ = CALLS[number]
    seed = torch.Generator().manual_seed(number)
    outs = torch.randn(world, own * world, num_tokens, width, generator=seed).to(dtype)
    lses = torch.randn(world, own * world, num_tokens, generator=seed) * 9
    if num_tokens > 1:
        empty = torch.rand(lses.shape, generator=seed)
        for at, value in enumerate((math.inf, -math.inf, math.nan)):
            lses[(empty >= at / 10) & (empty < (at + 1) / 10)] = value
        lses[:, 0] = -math.inf  # no rank has keys
        outs[~lses.isfinite()] = math.nan
    outs, lses = outs.transpose(1, 2), lses.transpose(1, 2)
    return (outs, lses) if number % 2 else (outs.contiguous(), lses.contiguous())


def main(folder: str, rank: int, world: int) -> None:
    mine = workspace(folder, rank, world)
    for _ in range(2):
        for number, (num_tokens, own, _, _, base) in enumerate(CALLS):
            outs, lses = parts(number, world)
            wanted = merge_states(outs.double().float(), lses, lse_base=base)
            rest = mine, rank, world, base, 10**9
            found = combine.combine_ranks(EAGER, outs[rank], lses[rank], *rest)
            heads = slice(rank * own, (rank + 1) * own)
            want = wanted[0][:, heads].to(outs.dtype), wanted[1][:, heads]
            assert found[0].shape == want[0].shape == (num_tokens, own, outs.shape[-1])
            torch.testing.assert_close(found, want, msg=lambda text, n=number: f"call {n}: {text}")
