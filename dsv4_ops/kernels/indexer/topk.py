"""Launchers of the lightning indexer's selection: a first pass over parts of rows, then merges."""

from typing import Any

import torch
import triton

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.ints import positive
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import AUTO
from dsv4_ops.kernels.arguments import paged, strided
from dsv4_ops.kernels.indexer import logits as indexer
from dsv4_ops.kernels.indexer.topk_merge import merge_groups_kernel, merge_parts_kernel
from dsv4_ops.kernels.indexer.topk_partial import select_keys_kernel, select_logits_kernel
from dsv4_ops.kernels.indexer.topk_stored import (
    keep_keys_kernel,
    score_keys_kernel,
    select_kept_kernel,
)
from dsv4_ops.kernels.launcher import Launcher

PROGRAMS = 396
"""Programs of the first pass, each with a scratch row: three per SM of an H200."""

CAPACITY = 2048
"""Capacity of a scratch row in keys, unless twice topk is more."""

MERGE_CAPACITY = 4096
"""Maximum keys of one merge, unless twice topk is more."""

GROUPS = 8
"""Maximum number of groups of a row. Lists are grouped if one merge cannot hold their keys."""

WIDE, WIDE_GROUP = 1024, 8192
"""Lists of at least WIDE keys are merged in groups of WIDE_GROUP keys, because one merge holds few
such lists. So rows of up to 32768 keys need no more passes than they need with narrow lists."""

MIN_PART = 256
"""Minimum keys of a part."""

SHORT_PART = 200
"""Use one merge for a row if its parts then have at most SHORT_PART * num_tokens keys each.

Times on an H100 with top 512 and one token per request: 32 requests of 32k keys take 29.4 us, and
48.5 us with several merges; 14 requests of 128k keys take 53.4 us, and 57.1 us with several merges.
8 requests of 128k keys have longer parts and use several merges: 40.0 us, and 46.6 us with one
merge."""

STORED_TOPK, STORED_BYTES = 2048, 2**29
"""If topk is at least STORED_TOPK, the keys of all scores are stored, unless the workspace would
exceed STORED_BYTES. NVIDIA's GPUs other than Hopper store no keys, because there the bits of a
score may depend on the number of warps of a program."""

SAMPLE, DEVIATIONS = 8192, 5
"""Maximum number of keys in the sample of a row; and number of standard deviations by which the
expected number of kept keys exceeds topk. So only one row in millions keeps too few keys."""

KEEP_PARTS, KEEP_PROGRAMS, KEEP_STEP, KEEP_WARPS = 32, 264, 2048, 8
"""Maximum number of parts of a row, target number of programs, keys per step, and warps of the
kernel that keeps keys."""

KEPT_CAPACITY, KEPT_WARPS = 8192, 16
"""Maximum number of keys (kept keys, or all keys of a row) that a program selects from, unless 2 *
topk is more; and warps."""

LOGITS_STEP, LOGITS_MIN_PART = 512, 2048
"""If the kernel reads logits: keys per step, and minimum number of keys of a part."""

STAGES = 3


def warps_for(capacity: int) -> int:
    """Return the warps for ``capacity`` keys: 16 keys per thread, but 4 to 16 warps."""
    return min(max(capacity // 512, 4), 16)


class _Scratch:
    """Scratch rows, the plan of each row's parts, and the constants of the first pass and of the
    merges."""

    def __init__(
        self,
        launch: Launcher,
        out: torch.Tensor,
        num_keys: int,
        topk: int,
        min_part: int,
        short_part: int,
    ) -> None:
        self.launch, self.out, self.topk, num_tokens = launch, out, topk, out.shape[0]
        self.width = triton.next_power_of_2(topk)
        self.capacity = max(CAPACITY, 2 * self.width)
        self.merge_capacity = max(MERGE_CAPACITY, self.capacity)
        self.groups = min(max(self.merge_capacity // self.width, 2), GROUPS)
        wide_group = WIDE_GROUP if self.width >= WIDE else 0
        self.group_capacity = max(self.merge_capacity, wide_group)
        sizes = ((PROGRAMS, self.capacity), (PROGRAMS, self.capacity), (num_tokens, 3))
        self.lists = tuple(map(out.new_empty, sizes))
        self.rows = torch.sym_min(num_tokens, PROGRAMS)
        max_lists = self.merge_capacity // self.width
        parts = torch.sym_min(
            (num_keys + min_part - 1) // min_part, PROGRAMS // torch.sym_max(num_tokens, 1)
        )
        if isinstance(parts, int):
            merged_part = (num_keys + max_lists - 1) // max_lists
            if merged_part <= short_part * num_tokens:
                parts = min(parts, max_lists)  # as ``partition`` does for each row
        self.max_parts = torch.sym_max(1, parts)
        self.programs = torch.sym_min(num_tokens * self.max_parts, PROGRAMS)
        self.arguments = (*self.lists, self.out, num_tokens, self.max_parts, topk)
        self.sizes = {
            "WIDTH": self.width,
            "CAPACITY": self.capacity,
            "MAX_WIDTH": self.capacity // 2,
            "MERGE_CAPACITY": self.merge_capacity,
            "GROUPS": self.groups,
            "GROUP_CAPACITY": self.group_capacity,
            "MIN_PART": min_part,
            "MAX_LISTS": max_lists,
            "SHORT_PART": short_part,
            "num_warps": warps_for(self.capacity),
        }

    def merge(self, table: tuple[Any, ...], block_size: int, slots: bool) -> torch.Tensor:
        """Merge the lists of the parts; return indices, or slots if ``slots``. ``table`` holds
        request indices and a block table, with their strides, and the table's width.

        A launch that would have nothing to merge is omitted, or has one program if sizes are
        symbolic."""
        is_static, num_tokens = isinstance(self.max_parts, int), self.out.shape[0]
        sizes = {"GROUPS": self.groups, "WIDTH": self.width, "STRIDE": self.capacity}
        if not is_static or self.max_parts * self.topk > self.merge_capacity:
            excess = self.max_parts * self.topk - self.merge_capacity
            has_groups = torch.sym_min(1, torch.sym_max(0, excess))
            self.launch(merge_groups_kernel)[1 + (self.rows * self.groups - 1) * has_groups,](
                *self.lists, num_tokens, self.topk,
                **sizes, MERGE_CAPACITY=self.merge_capacity, CAPACITY=self.group_capacity,
                num_warps=warps_for(self.group_capacity),
            )  # fmt: skip
        if not is_static or self.max_parts > 1:
            self.launch(merge_parts_kernel)[
                1 + (self.rows - 1) * torch.sym_min(1, self.max_parts - 1),
            ](
                *self.lists, self.out, num_tokens, self.topk, *table,
                **sizes, CAPACITY=self.merge_capacity, BLOCK_SIZE=block_size, SLOTS=slots,
                num_warps=warps_for(self.merge_capacity),
            )  # fmt: skip
        return self.out


def indexer_topk(
    launch: Launcher, logits: torch.Tensor, lens: torch.Tensor, *, topk: int
) -> torch.Tensor:
    num_tokens, num_columns = logits.shape
    out = logits.new_empty((num_tokens, topk), dtype=torch.int32)
    if num_tokens == 0 or topk == 0:
        return out
    scratch = _Scratch(launch, out, num_columns, topk, LOGITS_MIN_PART, 0)
    launch(select_logits_kernel)[scratch.programs,](
        *strided(logits), num_columns, *strided(lens), *scratch.arguments,
        STEP=LOGITS_STEP, **scratch.sizes,
    )  # fmt: skip
    return scratch.merge((lens, 0, lens, 0, 0, 0), 1, False)  # the table is not read without slots


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
    quantized = IndexerLayout(block_size)
    Checks("indexer_select").page_start("k_cache", k_cache, quantized)
    num_tokens, num_heads, max_blocks = q.shape[0], int(q.shape[1]), block_table.shape[1]
    out = q.new_empty((num_tokens, topk), dtype=torch.int32)
    if num_tokens == 0 or topk == 0:
        return out
    num_rows = max_blocks * block_size
    table = (block_table, block_table.stride(0), block_table.stride(1))
    requests, positions = (req_indices, req_indices.stride(0)), positions.reshape(-1)
    where = (*strided(positions), *requests, *table, block_table.shape[0], max_blocks)
    queries = (*strided(q.view(torch.uint8)), num_heads, *strided(weights), *paged(k_cache))
    pages = {"RATIO": compress_ratio, "BLOCK_SIZE": block_size}
    target = launch.target(q.device)
    bytes_of = {"DATA_BYTES": quantized.data_bytes, "SCALE_BYTES": quantized.scale_bytes}
    scored = {**pages, **bytes_of, "CONVERTS": launch.converts_codes(q.device)}
    scored |= indexer.tile_sizes(num_heads, target)
    stores = _stores(num_tokens, num_rows, topk) if target.large_tiles else 0
    is_static = isinstance(stores, int)
    if not is_static or stores:
        stored = launch if is_static else launch.predicated(stores)
        _select_stored(stored, stores, queries, where, num_rows, out, pages, scored, slots)
        if is_static:
            return out
        launch = launch.predicated(1 - stores)
    scratch = _Scratch(launch, out, num_rows, topk, MIN_PART, SHORT_PART)
    sizes = {**scored, **scratch.sizes}
    # a tile has at least 16 keys per warp, and at most half the keys that a scratch row holds
    sizes["STEP"] = min(max(sizes["STEP"], 16 * sizes["num_warps"]), scratch.capacity // 2)
    launch(select_keys_kernel)[scratch.programs,](
        *queries, *where, *scratch.arguments, STAGES=STAGES, SLOTS=slots, **sizes
    )
    return scratch.merge((*requests, *table, max_blocks), block_size, slots)


def _stores(num_tokens: int, num_rows: int, topk: int) -> int:
    """Return 1 if the keys of all scores are stored, else 0; for symbolic sizes, return a symbol.
    Both variants are then launched, and one of them has empty grids."""
    # a row has its scores, its sample, and lists of kept keys and of their rows
    workspace = 4 * num_tokens * (3 * num_rows + SAMPLE)
    stores: int = positive(STORED_BYTES + 1 - workspace) if topk >= STORED_TOPK else 0
    return stores


def _select_stored(
    launch: Launcher,
    stores: int,
    queries: tuple[Any, ...],
    where: tuple[Any, ...],
    num_rows: int,
    out: torch.Tensor,
    pages: dict[str, int],
    scored: dict[str, Any],
    slots: bool,
) -> None:
    """Select by stored keys. If ``stores`` is 0, each tensor of the workspace has two elements."""
    (num_tokens, topk), rows = out.shape, indexer.ROWS
    *tokens, _, _, _, num_reqs, _ = where

    def workspace(row: int) -> torch.Tensor:
        # at least 2 elements, because torch guards a size that may be 0 or 1
        return out.new_empty(torch.sym_max(2, num_tokens * stores * row))

    scores, samples = workspace(num_rows), workspace(SAMPLE)
    launch(score_keys_kernel)[num_tokens * ((num_rows + rows - 1) // rows),](
        *queries, *where, scores, samples, num_rows, topk, SAMPLE=SAMPLE,
        **scored, ROWS=rows, STAGES=indexer.STAGES, num_warps=indexer.WARPS,
    )  # fmt: skip
    width = triton.next_power_of_2(topk)
    maximum = max(KEPT_CAPACITY, 2 * width)
    parts = torch.sym_min(KEEP_PARTS, KEEP_PROGRAMS // torch.sym_max(num_tokens, 1))
    parts = torch.sym_max(1, torch.sym_min(parts, num_rows // KEEP_STEP))
    capacity = torch.sym_min((num_rows + parts - 1) // parts, maximum)
    lists = (workspace(parts * capacity), workspace(parts * capacity))
    counts, cuts = workspace(parts), workspace(1)
    is_static = isinstance(num_rows, int)
    if not is_static or num_rows > maximum:
        keep = launch if is_static else launch.predicated(positive(num_rows - maximum))
        keep(keep_keys_kernel)[num_tokens * parts,](
            scores, samples, num_rows, *tokens, num_reqs, *lists, counts, cuts,
            parts, capacity, topk,
            RATIO=pages["RATIO"], SAMPLE=SAMPLE, DEVIATIONS=DEVIATIONS, STEP=KEEP_STEP,
            CAPACITY=maximum, num_warps=KEEP_WARPS,
        )  # fmt: skip
    launch(select_kept_kernel)[num_tokens,](
        scores, num_rows, queries[-1], *where, *lists, counts, cuts, out,
        parts, capacity, topk,
        **pages, WIDTH=width, CAPACITY=maximum, MAX_PARTS=KEEP_PARTS, SLOTS=slots,
        num_warps=KEPT_WARPS,
    )  # fmt: skip
