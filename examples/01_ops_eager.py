"""The ops, called like any PyTorch function: metadata, cache insert and gather, sparse MLA.

Two requests and one padding request go through two steps of one attention layer with a window of
4 tokens and a cache in DeepSeek-V4's FP8 layout. You can check every printed number by hand: each
key, which is also the value in MLA, is a constant row, and queries are 0. All keys then have equal
weights; with a sink of logit 0, attention returns the sum of n values divided by n + 1.

    python examples/01_ops_eager.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import dsv4_ops
from dsv4_ops.attention.metadata import (
    AttentionSpec,
    BlockTables,
    DecodeMetadata,
    build_decode_metadata,
)
from dsv4_ops.core.layout import MainLayout

PAGE = 4  # rows per block of the cache
SPEC = AttentionSpec(
    window_size=4, c4_ratio=2, c128_ratio=4, block_tokens=8, swa_block_size=PAGE, max_model_len=16
)


def int32(values: list, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Layer:
    """A cache of five blocks, and a block table, whose entry [request, column] is the block of the
    request's positions from column * 4 to column * 4 + 3."""

    def __init__(self, device: str) -> None:
        self.cache = MainLayout(block_size=PAGE).allocate(num_blocks=5, device=device)
        self.pages = int32([[2, 0], [4, -1], [-1, -1]], device)  # the third request has no blocks
        self.device = device

    def step(
        self, starts: list[int], lens: list[int], keys: list[float]
    ) -> tuple[DecodeMetadata, Tensor, Tensor]:
        """Compute metadata, insert keys and attend.

        Args:
            starts: Index of every request's first token in the step, then the number of tokens.
            lens: Length of every request after this step; 0 for a padding request.
            keys: A number per token, which all 512 values of the token's key have.
        """
        query_start_loc, seq_lens = int32(starts, self.device), int32(lens, self.device)
        tokens = dsv4_ops.token_map(query_start_loc, seq_lens, num_tokens=len(keys))
        slots = dsv4_ops.compressed_slot_mapping(
            tokens.positions,
            tokens.req_indices,
            self.pages,
            tokens.positions,
            block_size=PAGE,
            compress_ratio=1,
        )
        tables = BlockTables(swa=self.pages, c4=self.pages, c128=self.pages)
        metadata = build_decode_metadata(SPEC, query_start_loc, seq_lens, slots, tables)
        rows = torch.tensor(keys, dtype=torch.bfloat16, device=self.device)[:, None].expand(-1, 512)
        dsv4_ops.quantize_and_insert_k_cache(rows.contiguous(), self.cache, slots, block_size=PAGE)
        queries = torch.zeros(len(keys), 2, 512, dtype=torch.bfloat16, device=self.device)
        attended = dsv4_ops.sparse_mla_decode(
            queries,
            self.cache,
            metadata.swa_indices,
            metadata.swa_lens,
            attn_sink=torch.zeros(2, device=self.device),
            softmax_scale=512**-0.5,
            swa_block_size=PAGE,
        )
        return metadata, slots, attended.out

    def gather(self, lens: list[int]) -> Tensor:
        """Read back the rows of every request; [requests, rows, 512]."""
        return dsv4_ops.gather_k_cache(
            self.cache, int32(lens, self.device), None, self.pages, block_size=PAGE, num_rows=8
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    layer = Layer(args.device)

    print("step 1: request 0 brings five tokens, with keys 1 2 3 4 5")
    layer.step([0, 5, 5, 5], [5, 0, 0], [1.0, 2.0, 3.0, 4.0, 5.0])

    print("step 2: request 0 decodes one token, request 1 brings three, two tokens are padding")
    keys = [6.0, 16.0, 32.0, 48.0, 99.0, 99.0]
    metadata, slots, out = layer.step([0, 1, 4, 4], [6, 3, 0], keys)
    rows = layer.gather([6, 3, 0])
    found = {
        "request of every token": metadata.req_indices.tolist(),
        "position in its request": metadata.positions.tolist(),
        "slot it is stored in": slots.tolist(),
        "window: how many keys": metadata.swa_lens.tolist(),
        "window: slots of token 0": metadata.swa_indices[0].tolist(),
        "rows of ratio 2 it sees": metadata.c4_lens.tolist(),
        "keys of request 0, read back": rows[0, :6, 0].tolist(),
        "keys of request 1, read back": rows[1, :3, 511].tolist(),
        "attention of every token": [round(value, 3) for value in out[:, 0, 0].tolist()],
    }
    wanted = {
        "request of every token": [0, 1, 1, 1, -1, -1],
        "position in its request": [5, 0, 1, 2, -1, -1],
        # block of the table * 4 + row in the block: 0 * 4 + 1, then 4 * 4 + 0, 1, 2
        "slot it is stored in": [1, 16, 17, 18, -1, -1],
        "window: how many keys": [4, 1, 2, 3, 0, 0],
        # positions 2 to 5: rows 2 and 3 of block 2, rows 0 and 1 of block 0
        "window: slots of token 0": [10, 11, 0, 1],
        "rows of ratio 2 it sees": [3, 0, 1, 1, 0, 0],
        "keys of request 0, read back": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "keys of request 1, read back": [16.0, 32.0, 48.0],
        # (3 + 4 + 5 + 6) / 5 rounded to bfloat16; 16 / 2, (16 + 32) / 3, (16 + 32 + 48) / 4
        "attention of every token": [3.594, 8.0, 16.0, 24.0, 0.0, 0.0],
    }
    for what, value in found.items():
        print(f"  {what:30} {value}")
    wrong = [what for what, value in wanted.items() if found[what] != value]
    if wrong:
        print(f"FAILED: {', '.join(wrong)}: wanted {[wanted[what] for what in wrong]}")
        return 1
    print(
        f"shown: {len(found)} results of ragged steps on {args.device}, each as worked out by hand"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
