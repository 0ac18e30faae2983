"""Find the sizes at which ``impl="auto"`` should select a library (``dispatch/choice.py``).

``python -m benchmarks.choice`` compares our kernels with the libraries, adapters included.
``dsv4_ops.dispatch.providers`` says where dsv4_ops looks for libraries.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks import mla
from benchmarks.cases.attention_cases import Shape, decode_work, paged_work, uniform
from benchmarks.cases.attention_draws import WINDOW
from benchmarks.cases.gathered_cases import gathered_work
from benchmarks.cases.indexer_cases import indexer_work
from benchmarks.cases.prefill_cases import selecting_cases
from benchmarks.harness.timing import Call, Capture, alternating_us
from benchmarks.harness.work import Work
from dsv4_ops.core.layout import PlainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.choice import ours, unusable
from dsv4_ops.dispatch.libraries import LIBRARIES
from dsv4_ops.dispatch.providers import flash_mla_plan

_DECODE, _PAGED, _DENSE = "sparse_mla_decode", "sparse_mla_decode_paged", "mla_decode"
_INDEXER = ("indexer_logits", "indexer_select")

SIZES: dict[str, list[tuple[int, int, int]]] = {
    _DECODE: [
        (tokens, heads, extra)
        for heads, some in ((64, (64, 96, 128, 256, 512)), (128, (32, 48, 64, 128, 256, 512)))
        for extra in (512, 1024)
        for tokens in some
    ],
    _PAGED: [(tokens, heads, 1024) for heads in (64, 128) for tokens in (128, 256, 512)],
    "sparse_mla_prefill": [
        (tokens, heads, rows)
        for heads, rows in ((64, 512), (128, 512), (128, 1024))
        for tokens in (256, 512, 2048)
    ],
    _DENSE: [
        (tokens, 128, rows)
        for rows in (4096, 8192, 16384, 32768, 131072)
        for tokens in (8, 16, 32, 64, 128)
    ],
    "sparse_mla_gathered": [(1, 64, 128), (1, 128, 640), (16, 64, 640), (64, 64, 640)],
    **{
        op: [(32, 64, 32768), (64, 64, 16384), (128, 64, 8192), (128, 64, 16384), (512, 64, 2048)]
        for op in _INDEXER
    },
}
"""Tokens, heads and rows, by op: rows of the compressed cache, of the list, or of a request."""

_GATHERED_ROWS = 30000


def calls(
    op: str, tokens: int, heads: int, rows: int, device: torch.device
) -> Sequence[Callable[..., object]]:
    """Make calls with full lists and rotating inputs; each call takes ``impl``."""
    if op == _DENSE:
        row = mla.Row(PlainLayout.tag, heads, tokens, rows)
        pool = mla.pool_of(row.layout, tokens * -(-rows // mla.BLOCK), device)
        return mla.Inputs(row, pool, device).ours()
    work = _work(op, tokens, heads, rows, device)
    return [functools.partial(work.call, *args) for args in work.sets]


def _work(op: str, tokens: int, heads: int, rows: int, device: torch.device) -> Work:
    if op in _INDEXER:
        smoke, context = device.type == "cpu", 4 * rows
        return indexer_work(op.removeprefix("indexer_"), tokens, context, device, smoke=smoke)
    if op == _DECODE:
        return decode_work(uniform(tokens, heads, rows), device)
    if op == _PAGED:
        return paged_work(Shape(heads, rows, (WINDOW,) * tokens, (rows,) * tokens), device)
    if op == "sparse_mla_prefill":
        (case,) = selecting_cases((tokens,), ((heads, rows),))
        return case.build(device)
    return gathered_work(tokens, heads, rows, _GATHERED_ROWS, device)


def forms(op: str, library: str, size: tuple[int, int, int]) -> dict[str, list[Call]]:
    """Make our calls, and the library's: planned in each call and, if possible, planned once."""
    tokens, heads, rows = size
    device = torch.device("cuda")
    made = calls(op, *size, device)

    def of(impl: str, **more: object) -> list[Call]:
        return [functools.partial(call, impl=impl, **more) for call in made]

    found = {name: of(name) for name in (ours(OPS[op]), library)}
    if op in (_DECODE, _PAGED):
        widths = {"swa_width": WINDOW, "extra_width": rows}
        plan = flash_mla_plan(tokens, num_heads=heads, **widths, device=device)
        found[f"{library}, planned"] = of(library, flash_mla_plan=plan)
    return found


def main() -> int:
    """Print a line per op, library and size; return 1 if no library runs here."""
    able = [name for name in LIBRARIES if not unusable(name)]
    for name in set(LIBRARIES) - set(able):
        print(f"{name}: {unusable(name)}", file=sys.stderr)
    for op, sizes in SIZES.items():
        for library in (name for name in able if name in OPS[op].providers):
            for each in sizes:
                compared = forms(op, library, each)
                timings = alternating_us([Capture(form) for form in compared.values()])
                named = zip(compared, timings, strict=True)
                text = ", ".join(f"{name} {us.median:.1f}" for name, us in named)
                print(f"{op}, {each[0]} tokens, {each[1]} heads, {each[2]} rows: {text}")
    return 0 if able else 1


if __name__ == "__main__":
    sys.exit(main())
