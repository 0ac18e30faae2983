"""The compressor's kernel in Triton's interpreter with few programs, so that each scans many
tokens, several times. tests/kernels/interpreter/test_scripts.py starts this file with
TRITON_INTERPRET=1."""

import sys

import torch

from dsv4_ops.core.layout import StateLayout
from dsv4_ops.kernels.compressor import launch as kernels
from dsv4_ops.testing.case import Case
from tests.kernels.interpreter.interpret_kernels import check, fuzz
from tests.support.compressor_steps import SPECS, random_weights

PROGRAMS = ((1, 1, 1), (2, 3, 2), (8, 1, 4), (4, 5, 1))
"""Tokens that a program scans together, programs, and rows that a thread reads at a time."""
FEW = (2,)
"""Numbers of the entries that `make test` runs."""


def nearly_whole_windows(kind: str, tokens: int, seed: int) -> None:
    """Prefill windows in which one row may have another request or position. The kernel then reads
    that row from the states, if its block exists."""
    spec, made = SPECS[kind], torch.Generator().manual_seed(seed)
    weights, size = random_weights(kind, seed), spec["state_block_size"]
    width, pages = weights["ape"].shape[1], tokens // size + 1
    positions, requests = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int32)
    odd = torch.rand(tokens, generator=made) < 1.5 / spec["ratio"]
    odd &= positions % spec["ratio"] != spec["ratio"] - 1
    other = torch.rand(tokens, generator=made) < 0.5
    requests[odd & other] = 1
    positions[odd & ~other] += torch.randint(-9, 9, (int((odd & ~other).sum()),), generator=made)
    finishes = (positions % spec["ratio"] == spec["ratio"] - 1) & (torch.arange(tokens) > 0)
    order = torch.randperm(tokens, generator=made)
    slots = torch.where(finishes, order[torch.arange(tokens)], -1)
    table = torch.randint(-1, pages, (2, pages), generator=made, dtype=torch.int32)
    kv_score = torch.randn(tokens, 2 * width, generator=made)
    states = torch.randn(StateLayout(size, 2 * width).shape(pages), generator=made)
    tensors = (kv_score, weights["ape"], states, table, positions, requests)
    tensors += (weights["norm_weight"], weights["cos_sin_cache"])
    tensors += (torch.zeros(tokens, 1, spec["head_dim"]), slots)
    settings = {"compress_ratio": spec["ratio"], "overlap": spec["overlap"], "eps": 1e-6}
    settings |= {"state_block_size": size, "block_size": 1, "layout": "plain"}
    check("compress_and_insert", Case("nearly whole windows", tensors, settings))


def main(examples: int) -> None:
    thorough = examples > 2
    for number, (tokens, programs, depth) in enumerate(PROGRAMS):
        if not thorough and number not in FEW:
            continue
        kernels.MIXED_WARPS = (1, 99)[number % 2]
        kernels.LONG_SPACING, kernels.SAVED_EARLY = ((2, 7), (0, 0), (1, 8), (3, 4))[number]
        for kind in ("SHORT", "LONG", "INSERT"):
            setattr(kernels, f"{kind}_SAVE_VALUES", 2**number)
        kernels.SHORT_TOKENS = kernels.LONG_TOKENS = kernels.INSERT_TOKENS = tokens
        kernels.SHORT_TOKENS_SAVING = tokens
        kernels.SHORT_PROGRAMS = kernels.LONG_PROGRAMS = kernels.INSERT_PROGRAMS = programs
        kernels.FEW_TOKENS = 0
        kernels.DEPTH = kernels.LONG_DEPTH = depth
        fuzz("compress_and_insert", examples // 2)
        fuzz("save_and_compress", examples - examples // 2)
        fuzz("insert_c4_step", examples // 2)
        nearly_whole_windows("C4 indexer", 60, tokens)
        nearly_whole_windows("C128 narrow", 520, tokens)
        print(tokens, programs, depth)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
