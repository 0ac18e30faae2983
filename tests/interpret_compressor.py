"""The compressor's kernel in Triton's interpreter with few programs, so that each looks at many
tokens, several times; tests/test_compressor_kernels.py starts it with TRITON_INTERPRET=1."""

import sys

import torch
from compressor_steps import Engine, random_sequences, random_weights
from interpret_kernels import fuzz

import dsv4_ops as ops
from dsv4_ops.kernels import compressor as kernels

PROGRAMS = ((1, 1, 1), (2, 3, 2), (8, 1, 4), (4, 5, 1))
"""Tokens that a program looks at, programs, rows that a thread reads at a time."""


def long_prefill(seed: int) -> None:
    """200 tokens of three requests, some of which every program finds a window in."""
    lens, weights = [90, 3, 107], random_weights("C4 indexer", seed)
    sequences = random_sequences("C4 indexer", lens, seed)
    ours, theirs = (Engine("C4 indexer", weights, lens) for _ in range(2))

    def compress(*tensors: torch.Tensor, **settings: object) -> None:
        kernels.compress_and_insert(lambda kernel: kernel, *tensors, **settings)

    ours.step(sequences, padding=5, call=(ops.save_compressor_states, compress))
    theirs.step(sequences, padding=5)
    for request in range(3):
        actual, expected = ours.rows(request), theirs.rows(request)
        torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6)


def main(examples: int) -> None:
    for tokens, programs, depth in PROGRAMS:
        kernels.SHORT_TOKENS = kernels.LONG_TOKENS = tokens
        kernels.SHORT_PROGRAMS = kernels.LONG_PROGRAMS = programs
        kernels.DEPTH = kernels.LONG_DEPTH = depth
        fuzz("compress_and_insert", examples)
        long_prefill(tokens)
        print(tokens, programs, depth)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
