"""Launchers of the lightning indexer's selection: a first pass over parts of rows, and merges."""

from typing import Any

import torch
import triton

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.kernels.arguments import paged, strided
from dsv4_ops.kernels.indexer import logits as indexer
from dsv4_ops.kernels.indexer.topk_merge import merge_groups_kernel, merge_parts_kernel
from dsv4_ops.kernels.indexer.topk_partial import select_keys_kernel, select_logits_kernel
from dsv4_ops.kernels.launcher import Launcher

PROGRAMS = 396
"""Programs of the first pass, each with a scratch row: three per SM of an H200."""

CAPACITY = 2048
"""Keys of a scratch row, unless twice topk is more."""

MERGED = 4096
"""Keys that are merged together, at least."""

GROUPS = 8
"""Most groups that the lists of a row are merged in where they have more keys than that."""

WIDE, WIDE_GROUP = 1024, 8192
"""From lists of how many keys on few groups fit into MERGED keys, and keys of such a group that are
merged together: as few passes as those of short lists have, for rows of up to 32768 keys."""

LEAST = 256
"""Keys of a part, at least."""

LONG = 200
"""Keys of a part, for each token of the call, up to which a row has no more lists than are merged
together. H100, top 512, one token a request, us with and without: 32 x 32k 29.4 and 48.5, 14 x 128k
53.4 and 57.1; 8 x 128k, which is beyond it, 46.6 and 40.0."""

LOGITS_STEP, LOGITS_LEAST = 512, 2048
"""The same for logits that are read."""

STAGES = 3


def warps_for(capacity: int) -> int:
    """Warps that have 16 of the keys in every thread."""
    return min(max(capacity // 512, 4), 16)


class _Scratch:
    """Scratch rows and the plan of the parts of every row, and what is launched with them."""

    def __init__(
        self, launch: Launcher, like: torch.Tensor, num_keys: int, topk: int, least: int, long: int
    ) -> None:
        self.launch, self.topk, num_tokens = launch, topk, like.shape[0]
        self.width = triton.next_power_of_2(topk)
        self.capacity = max(CAPACITY, 2 * self.width)
        self.together = max(MERGED, self.capacity)
        self.groups = min(max(self.together // self.width, 2), GROUPS)
        self.grouped = max(self.together, WIDE_GROUP if self.width >= WIDE else 0)
        sizes = ((PROGRAMS, self.capacity), (PROGRAMS, self.capacity), (num_tokens, 3))
        self.lists = tuple(like.new_empty(size, dtype=torch.int32) for size in sizes)
        self.out = like.new_empty((num_tokens, topk), dtype=torch.int32)
        self.rows = torch.sym_min(num_tokens, PROGRAMS)
        lists = self.together // self.width
        parts = torch.sym_min((num_keys + least - 1) // least, PROGRAMS // num_tokens)
        if isinstance(parts, int) and (num_keys + lists - 1) // lists <= long * num_tokens:
            parts = min(parts, lists)  # as the kernel does for each row
        self.splits = torch.sym_max(1, parts)
        self.programs = torch.sym_min(num_tokens * self.splits, PROGRAMS)
        self.arguments = (*self.lists, self.out, num_tokens, self.splits, topk)
        self.sizes = {
            "WIDTH": self.width,
            "CAPACITY": self.capacity,
            "MOST": self.capacity // 2,
            "MERGED": self.together,
            "GROUPS": self.groups,
            "GROUPED": self.grouped,
            "LEAST": least,
            "LISTS": lists,
            "LONG": long,
            "num_warps": warps_for(self.capacity),
        }

    def merged(self, pages: tuple[Any, ...], block_size: int, slots: bool) -> torch.Tensor:
        """Merge the lists of the parts, into rows or into ``slots``; ``pages`` are the requests and
        the block table, with their strides and its columns. Launches that would find nothing to do
        are left out; where sizes are symbols they have one program."""
        known, num_tokens = isinstance(self.splits, int), self.out.shape[0]
        sizes = {"GROUPS": self.groups, "WIDTH": self.width, "STRIDE": self.capacity}
        if not known or self.splits * self.topk > self.together:
            long = torch.sym_min(1, torch.sym_max(0, self.splits * self.topk - self.together))
            self.launch(merge_groups_kernel)[1 + (self.rows * self.groups - 1) * long,](
                *self.lists, num_tokens, self.topk,
                **sizes, MERGED=self.together, CAPACITY=self.grouped,
                num_warps=warps_for(self.grouped),
            )  # fmt: skip
        if not known or self.splits > 1:
            self.launch(merge_parts_kernel)[
                1 + (self.rows - 1) * torch.sym_min(1, self.splits - 1),
            ](
                *self.lists, self.out, num_tokens, self.topk, *pages,
                **sizes, CAPACITY=self.together, BLOCK_SIZE=block_size, SLOTS=slots,
                num_warps=warps_for(self.together),
            )  # fmt: skip
        return self.out


def indexer_topk(
    launch: Launcher, logits: torch.Tensor, lens: torch.Tensor, *, topk: int
) -> torch.Tensor:
    num_tokens, num_columns = logits.shape
    if num_tokens == 0 or topk == 0:
        return logits.new_empty((num_tokens, topk), dtype=torch.int32)
    scratch = _Scratch(launch, logits, num_columns, topk, LOGITS_LEAST, 0)
    launch(select_logits_kernel)[scratch.programs,](
        *strided(logits), num_columns, *strided(lens), *scratch.arguments,
        STEP=LOGITS_STEP, **scratch.sizes,
    )  # fmt: skip
    return scratch.merged((lens, 0, lens, 0, 0, 0), 1, False)  # without slots no table is read


def indexer_select(
    launch: Launcher,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    positions: torch.Tensor,
    req_indices: torch.Tensor,
    block_table: torch.Tensor,
    schedule: torch.Tensor | None = None,
    *,
    block_size: int,
    compress_ratio: int,
    topk: int,
    layout: str,
    slots: bool = False,
    impl: str = AUTO,
) -> torch.Tensor:
    pages = IndexerLayout(block_size)
    Checks("indexer_select").page_start("k_cache", k_cache, pages)
    num_tokens, num_heads, max_blocks = q.shape[0], int(q.shape[1]), block_table.shape[1]
    if num_tokens == 0 or topk == 0:
        return q.new_empty((num_tokens, topk), dtype=torch.int32)
    scratch = _Scratch(launch, q, max_blocks * block_size, topk, LEAST, LONG)
    sizes = {**indexer.tile(num_heads), **scratch.sizes}
    # no fewer rows of a product than its warps take, and capacity for two tiles
    sizes["STEP"] = min(max(sizes["STEP"], 16 * sizes["num_warps"]), scratch.capacity // 2)
    table = (block_table, block_table.stride(0), block_table.stride(1))
    requests, positions = (req_indices, req_indices.stride(0)), positions.reshape(-1)
    launch(select_keys_kernel)[scratch.programs,](
        *strided(q.view(torch.uint8)), num_heads,
        *strided(weights), *paged(k_cache), *strided(positions), *requests,
        *table, block_table.shape[0], max_blocks, *scratch.arguments,
        RATIO=compress_ratio, BLOCK_SIZE=block_size, DATA_BYTES=pages.data_bytes,
        SCALE_BYTES=pages.scale_bytes, STAGES=STAGES, SLOTS=slots, **sizes,
    )  # fmt: skip
    return scratch.merged((*requests, *table, max_blocks), block_size, slots)
