"""Benchmark MLA over all rows or selected rows, against its roofline and FlashMLA."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from benchmarks.baselines import flash_mla
from benchmarks.harness import builds
from benchmarks.harness.draw import Draw
from benchmarks.harness.measure import FLOP_PER_US, run_kernels
from benchmarks.harness.options import sizes
from benchmarks.harness.timing import Call
from benchmarks.run import WrongResult
from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout

CASES = {
    "bf16": PlainLayout.tag,
    "fp8": MlaFp8Layout.tag,
    "ds_fp8": MlaDsFp8Layout.tag,
    "selected_bf16": PlainLayout.tag,
    "selected_ds_fp8": MlaDsFp8Layout.tag,
}
"""Layout of the rows of each group; groups with ``selected_`` time ``mla_sparse``."""

TOPK = 2048
"""Selected rows per token."""

RANK, WIDTH, BLOCK = 512, 576, 64
SCALE = 192**-0.5

_ROTATED = 2**28
"""Bytes of the rows of all input sets: several times the L2."""

_MOST_SETS = 64
_CONTEXTS = (4096, 32768, 131072)
_BATCHES = (1, 8, 32, 64, 128)
_HEADS = (128, 16)
_MOST_DIFFERENCE = 1e-2
"""Maximum difference from FlashMLA: outputs are averages of normal values, in bf16."""


@dataclass
class Row:
    """Times in microseconds: medians of CUDA graph replays, in alternating samples."""

    layout: str  # layout of the rows
    heads: int
    batch: int  # requests with one token each
    context: int
    topk: int | None = None  # selected rows per token; None for all rows
    us: float | None = None
    flash_mla_us: float | None = None  # decode, planned before; for selected bf16 rows, prefill
    roofline_us: float | None = None  # the longer of bytes at a copy's rate and FLOP at 790 TFLOP/s
    max_diff: float | None = None  # maximum difference from FlashMLA's output
    error: str | None = None

    def compare(self, bytes_per_us: float) -> None:
        self.roofline_us = roofline_us(self, bytes_per_us)

    @property
    def keys(self) -> int:
        """Return the number of rows that a token sees."""
        return self.context if self.topk is None else min(self.topk, self.context)


class Inputs:
    """The input sets of a case over one pool of rows; each set has its own table and queries."""

    def __init__(self, row: Row, pool: Tensor, device: torch.device) -> None:
        self.row, self.device, self.cache = row, device, pool
        columns = -(-row.context // BLOCK)
        pages = row.batch * columns
        ranges = pool.shape[0] // pages
        size = row.batch * row.keys * pool.shape[2] * pool.element_size()
        # if rows are selected, sets share blocks and read a few rows of each block
        most = _MOST_SETS if row.topk is not None else min(_MOST_SETS, ranges)
        draw = Draw(device, 0)
        self.lens = torch.full((row.batch,), row.context, dtype=torch.int32, device=device)
        self.requests = torch.arange(row.batch, dtype=torch.int32, device=device)
        self.sets: list[tuple[Tensor, Tensor]] = []
        for number in range(max(1, min(most, -(-_ROTATED // size)))):
            table = (draw.order(pages) + number % ranges * pages).view(row.batch, columns)
            if row.topk is not None:  # rows in the order of positions, as from an indexer
                scores = draw.uniform(row.batch, row.context)
                rows = scores.topk(row.keys).indices.sort().values
                table = table.gather(1, rows // BLOCK) * BLOCK + rows % BLOCK
            self.sets.append((draw.normal(row.batch, row.heads, WIDTH).bfloat16(), table.int()))

    def ours(self) -> list[Call]:
        """Make calls of ``mla_decode``, or of ``mla_sparse``."""
        if self.row.topk is not None:
            call = functools.partial(
                ops.mla_sparse, softmax_scale=SCALE, block_size=BLOCK, layout=self.row.layout
            )
            cache, lens = self.cache, self.lens
            return [functools.partial(call, q, cache, rows, lens) for q, rows in self.sets]
        scale = None
        if self.row.layout == MlaFp8Layout.tag:
            scale = torch.full((1,), 0.5, device=self.device)
        call = functools.partial(
            ops.mla_decode, kv_scale=scale, softmax_scale=SCALE, block_size=BLOCK,
            layout=self.row.layout,
        )  # fmt: skip
        where = (self.cache, self.lens, self.requests)
        return [functools.partial(call, q, *where, table) for q, table in self.sets]

    def of_flash_mla(self, library: Any) -> list[Call]:
        """Make calls of FlashMLA: its prefill for selected plain rows, or else a planned decode."""
        rows, selects, sets = self.cache[:, :, None], self.row.topk is not None, self.sets
        is_prefill = selects and self.row.layout == PlainLayout.tag
        any_heads = hasattr(library.ops, "permute_q_b_proj")  # vLLM 0.33 also prefills 16 heads
        if selects and not (is_prefill and any_heads):  # vLLM pads fewer heads to 64
            pad = (0, 0, 0, max(64 - self.row.heads, 0))
            sets = [(torch.nn.functional.pad(q, pad), each) for q, each in sets]
        if is_prefill:
            op, rest = library.ops.sparse_prefill_fwd, (SCALE, RANK, None, None, None)
            rows = self.cache.view(-1, 1, WIDTH)
            return [functools.partial(op, q, rows, each[:, None], *rest) for q, each in sets]

        def attend(q: Tensor, where: Tensor, *plan: Any) -> Any:
            if not selects:
                settings = (RANK, self.lens, where, SCALE, False, *plan, None)
                return library.ops.dense_decode_fwd(q[:, None], rows, *settings)
            settings = (None, None, *plan, None, None, None, RANK, SCALE, None)
            return library.ops.sparse_decode_fwd(q[:, None], rows, where[:, None], *settings)

        plan = attend(*sets[0], None, None)[2:]
        return [functools.partial(attend, q, where, *plan) for q, where in sets]


def roofline_us(row: Row, bytes_per_us: float) -> float:
    """Return the time of the bytes or of the FLOP, whichever is longer."""
    row_bytes = {PlainLayout.tag: 2 * WIDTH, MlaFp8Layout.tag: WIDTH, MlaDsFp8Layout.tag: 656}
    moved = row.batch * row.keys * row_bytes[row.layout]
    moved += row.batch * row.heads * (WIDTH + RANK) * 2
    flop = 2 * row.batch * row.heads * row.keys * (WIDTH + RANK)
    return max(moved / bytes_per_us, flop / FLOP_PER_US)


def checked_calls(
    row: Row, device: torch.device, *, pool: Tensor, library: Any
) -> dict[str, list[Call]]:
    """Compare our op with FlashMLA, and return the calls of the two."""
    inputs = Inputs(row, pool, device)
    forms = {"us": inputs.ours()}
    comparable = row.layout == PlainLayout.tag or row.topk is not None
    if library is not None and comparable:
        forms["flash_mla_us"] = inputs.of_flash_mla(library)
        ours, baseline = (calls[0]()[0].squeeze(1).float() for calls in forms.values())
        row.max_diff = float((baseline[:, : row.heads] - ours).abs().max())
        if not row.max_diff < _MOST_DIFFERENCE:
            raise WrongResult(f"differs from FlashMLA by {row.max_diff:.3g}")
    return forms


def pool_of(layout: str, blocks: int, device: torch.device) -> Tensor:
    """Sample rows of normal values, or of FP8 codes without NaN."""
    if layout == PlainLayout.tag:
        pool = torch.empty(blocks, BLOCK, WIDTH, dtype=torch.bfloat16, device=device)
        return pool.normal_()
    row_bytes = WIDTH if layout == MlaFp8Layout.tag else 656
    pool = torch.randint(0x20, 0x48, (blocks, BLOCK, row_bytes), dtype=torch.uint8, device=device)
    if layout == MlaDsFp8Layout.tag:
        scales = torch.full((4,), 0.5, device=device).view(torch.uint8)
        pool[..., RANK : RANK + 16] = scales
        pool[..., RANK + 16 :] = torch.ones(64, device=device).bfloat16().view(torch.uint8)
    return pool


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, default in (("batches", _BATCHES), ("contexts", _CONTEXTS)):
        some: Any = {"type": sizes, "default": default, "metavar": "A,B,.."}
        parser.add_argument(f"--{name}", help=f"default: {', '.join(map(str, default))}", **some)


def _cases(options: argparse.Namespace, library: Any) -> Iterator[tuple[Row, Any]]:
    contexts = options.contexts[:1] if options.smoke else options.contexts
    for group in options.cases or CASES:
        blocks = max(options.batches) * max(contexts) // BLOCK
        pool = pool_of(CASES[group], blocks, torch.device("cuda"))
        calls = functools.partial(checked_calls, pool=pool, library=library)
        for heads, context, batch in itertools.product(_HEADS, contexts, options.batches):
            topk = TOPK if "selected" in group else None
            yield Row(CASES[group], heads, batch, context, topk), calls
        del pool, calls


def run(options: argparse.Namespace) -> None:
    library = None if options.baseline is None else flash_mla.load(options.baseline)
    run_kernels(options, _cases(options, library), baseline=library and builds.names(library))
