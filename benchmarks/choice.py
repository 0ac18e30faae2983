"""Compare our kernels with the libraries, adapters included, to find the sizes at which
``impl="auto"`` selects a library (``is_faster`` in ``dispatch/choice.py``).

Run it on the GPU as ``python -m benchmarks.choice``. ``dsv4_ops.dispatch.providers`` says where
libraries are found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.timing import Capture, alternating_us
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.choice import ours, unusable
from dsv4_ops.dispatch.layers import adapter
from dsv4_ops.dispatch.libraries import LIBRARIES

_SETS, _BLOCKS, _DENSE_BLOCKS = 4, 3000, 65536
_DECODE, _PAGED, _GATHERED = "sparse_mla_decode", "sparse_mla_decode_paged", "sparse_mla_gathered"
_PREFILL, _DENSE = "sparse_mla_prefill", "mla_decode"
_INDEXER = ("indexer_logits", "indexer_select")

Like = dict[str, Any]

SIZES: dict[str, list[tuple[int, int, int]]] = {
    _DECODE: [
        (tokens, heads, extra)
        for heads, some in ((64, (64, 96, 128, 256, 512)), (128, (32, 48, 64, 128, 256, 512)))
        for extra in (512, 1024)
        for tokens in some
    ],
    _PAGED: [(tokens, heads, 1024) for heads in (64, 128) for tokens in (128, 256, 512)],
    _PREFILL: [
        (tokens, heads, rows)
        for heads, rows in ((64, 512), (128, 512), (128, 1024))
        for tokens in (256, 512, 2048)
    ],
    _DENSE: [
        (tokens, 128, rows)
        for rows in (4096, 8192, 16384, 32768, 131072)
        for tokens in (8, 16, 32, 64, 128)
    ],
    _GATHERED: [(1, 64, 128), (1, 128, 640), (16, 64, 640), (64, 64, 640)],
    **{
        op: [(32, 64, 32768), (64, 64, 16384), (128, 64, 8192), (128, 64, 16384), (512, 64, 2048)]
        for op in _INDEXER
    },
}
"""Tokens, heads, and rows: of the compressed cache, of the list, or of a request."""

CONTEXT = 16384
"""Positions before the tokens of a prefill, which belong to one C4 request."""


def like(op: str, tokens: int, heads: int, rows: int, device: str = "cuda") -> Like:
    """Return the shapes of a call, in the form that ``example`` takes."""

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
        return shape, dtype, torch.device(device)

    if op in _INDEXER:
        pages = IndexerLayout(64).shape(_BLOCKS)
        found = {
            "q": tensor(tokens, heads, 128, dtype=torch.float8_e4m3fn),
            "weights": tensor(tokens, heads, dtype=torch.float32),
            "k_cache": tensor(*pages, dtype=torch.uint8),
            "req_indices": tensor(tokens),
            "block_table": tensor(tokens, rows // 64),
            "block_size": 64,
            "layout": IndexerLayout.tag,
        }
        if op == "indexer_logits":
            return {**found, "lens": tensor(tokens), "num_rows": rows}
        positions = tensor(tokens, dtype=torch.int64)
        return {**found, "positions": positions, "compress_ratio": 4, "topk": 512}
    if op == _DENSE:
        return {
            "q": tensor(tokens, heads, 576, dtype=torch.bfloat16),
            "kv_cache": tensor(_DENSE_BLOCKS, 64, 576, dtype=torch.bfloat16),
            "seq_lens": tensor(tokens),
            "req_indices": tensor(tokens),
            "block_table": tensor(tokens, rows // 64),
            **dict.fromkeys(("query_start_loc", "plan", "q_scale", "kv_scale")),
            "softmax_scale": 192**-0.5,
            "kv_lora_rank": 512,
            "block_size": 64,
            "layout": PlainLayout.tag,
            "num_splits": 0,
            "batch_invariant": False,
        }
    found = {
        "q": tensor(tokens, heads, 512, dtype=torch.bfloat16),
        "attn_sink": tensor(heads, dtype=torch.float32),
        "softmax_scale": 512**-0.5,
    }
    if op == _GATHERED:
        lists = {"indices": tensor(tokens, rows), "lens": tensor(tokens)}
        return {**found, "kv": tensor(30000, 512, dtype=torch.bfloat16), **lists}
    if op == _PREFILL:
        return {**found, **_prefill(tensor, tokens, rows)}
    size = 2 if op == _PAGED else 64
    window = {"swa_indices": tensor(tokens, 128), "swa_lens": tensor(tokens)}
    for source, rows_of_page in (("swa", 64), ("extra", size)):
        pages = MainLayout(rows_of_page).shape(_BLOCKS * 64 // rows_of_page)
        found |= {f"{source}_cache": tensor(*pages, dtype=torch.uint8)}
        found |= {f"{source}_block_size": rows_of_page}
    table = {"req_indices": tensor(tokens), "extra_block_table": tensor(tokens, rows // size)}
    extra = table if op == _PAGED else {"extra_indices": tensor(tokens, rows)}
    rest = {"layout": MainLayout.tag, "num_splits": 0, "batch_invariant": False}
    none = {"positions": None, "cos_sin_cache": None, "plan": None, "flash_mla_plan": tensor(1)}
    return {**found, **window, **extra, "extra_lens": tensor(tokens), **rest, **none}


def _prefill(tensor: Callable[..., Any], tokens: int, rows: int) -> Like:
    """Make tokens of one request, each with a selection of ``rows`` rows."""
    context, ratio, size = CONTEXT + tokens, 4, 64
    found: Like = {}
    for source, held in (("swa", context), ("extra", context // ratio)):
        pages = MainLayout(size).shape(_BLOCKS)
        found |= {f"{source}_cache": tensor(*pages, dtype=torch.uint8)}
        found |= {f"{source}_block_table": tensor(1, -(-held // size))}
        found |= {f"{source}_block_size": size}
    batch = {"positions": tensor(tokens, dtype=torch.int64), "req_indices": tensor(tokens)}
    numbers = {"window_size": 128, "compress_ratio": ratio, "layout": MainLayout.tag}
    return {**found, **batch, "topk_indices": tensor(tokens, rows), **numbers}


def example(op: str, like: dict[str, Any]) -> dict[str, Any]:
    """Make arguments of these shapes, with full lists of random rows."""
    made = {
        name: _tensor(*value) if isinstance(value, tuple) and len(value) == 3 else value
        for name, value in like.items()
    }
    for name, rows in _rows(made).items():
        made[name].random_(0, max(rows, 1))
    for name in ("lens", "seq_lens", "swa_lens", "extra_lens"):
        if isinstance(made.get(name), Tensor):
            made[name].fill_(_most(name, made))
    if op == "indexer_select":
        made["positions"].fill_(_table_rows(made, "block_table") * made["compress_ratio"] - 1)
    requests = made.get("req_indices")
    if op == "sparse_mla_prefill":
        _prefilled(made)
    elif isinstance(requests, Tensor):
        table = made["block_table"] if "block_table" in made else made["extra_block_table"]
        count = torch.arange(len(requests), device=requests.device)
        requests.copy_(count % max(table.shape[0], 1))
    if isinstance(made.get("flash_mla_plan"), Tensor):
        made["flash_mla_plan"] = _plan(made)
    return made


def _prefilled(made: dict[str, Any]) -> None:
    """Make the last tokens of requests that fill their tables, the same number for each, and select
    rows that all of them may see."""
    token = torch.arange(made["positions"].shape[0], device=made["positions"].device)
    each = max(-(-len(token) // max(made["swa_block_table"].shape[0], 1)), 1)
    rows = _table_rows(made, "swa_block_table", "swa_block_size")
    if isinstance(made["extra_block_table"], Tensor):
        extra = _table_rows(made, "extra_block_table", "extra_block_size")
        rows = min(rows, (extra + 1) * made["compress_ratio"] - 1)
    made["req_indices"].copy_(token // each)
    made["positions"].copy_((rows - each + token % each).clamp(min=0))
    if isinstance(made["topk_indices"], Tensor):
        visible = max((rows - each + 1) // made["compress_ratio"], 1)
        made["topk_indices"].random_(0, visible)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _rows(made: dict[str, Any]) -> dict[str, int]:
    """Return the number of rows or blocks that the entries of each list are sampled from."""
    found = {}
    for source in ("swa", "extra"):
        if isinstance(made.get(f"{source}_indices"), Tensor):
            size = made[f"{source}_block_size"]
            found[f"{source}_indices"] = made[f"{source}_cache"].shape[0] * size
    tables = {"swa_block_table": "swa_cache", "extra_block_table": "extra_cache"}
    tables["block_table"] = "kv_cache" if "kv_cache" in made else "k_cache"
    for name, cache in tables.items():
        if isinstance(made.get(name), Tensor):
            found[name] = made[cache].shape[0]
    if "indices" in made:
        found["indices"] = made["kv"].shape[0]
    return found


def _most(name: str, made: dict[str, Any]) -> int:
    if name == "extra_lens" and "extra_block_table" in made:
        return _table_rows(made, "extra_block_table", "extra_block_size")
    if name in ("lens", "seq_lens") and "block_table" in made:
        return _table_rows(made, "block_table")
    return int(made[name.replace("lens", "indices")].shape[1])


def _table_rows(made: dict[str, Any], table: str, size: str = "block_size") -> int:
    return int(made[table].shape[1] * made[size])


def _plan(made: dict[str, Any]) -> Tensor:
    q, extra = made["q"], 0
    if "extra_block_table" in made:
        extra = _table_rows(made, "extra_block_table", "extra_block_size")
    elif isinstance(made.get("extra_indices"), Tensor):
        extra = made["extra_indices"].shape[1]
    widths = (made["swa_indices"].shape[1], extra)
    planned: Tensor = adapter("flash_mla").plan_for(*q.shape[:2], *widths, q.device).schedule
    return planned


def captured(op: str, impl: str, sets: list[Like], *, planned: bool = False) -> Capture:
    """Time calls in a CUDA graph over rotating inputs."""
    run = OPS[op].reference
    if impl != "reference":
        from dsv4_ops.kernels.launcher import EAGER  # imports triton

        run = functools.partial(OPS[op].launcher(impl), EAGER)
    changed = {"flash_mla_plan": None} if "flash_mla_plan" in sets[0] and not planned else {}
    return Capture([functools.partial(run, **{**made, **changed}) for made in sets])


def main() -> int:
    """Print a line per op and sizes; exit status 1 if no library runs here."""
    able = [name for name in LIBRARIES if not unusable(name)]
    for name in set(LIBRARIES) - set(able):
        print(f"{name}: {unusable(name)}", file=sys.stderr)
    for op, sizes in SIZES.items():
        spec = OPS[op]
        for library in (name for name in able if name in spec.providers):
            for each in sizes:
                sets = [example(op, like(op, *each)) for _ in range(_SETS)]
                forms = {name: captured(op, name, sets) for name in (ours(spec), library)}
                if sets[0].get("flash_mla_plan") is not None:
                    forms[f"{library}, planned"] = captured(op, library, sets, planned=True)
                timings = zip(forms, alternating_us(list(forms.values())), strict=True)
                text = ", ".join(f"{name} {us.median:.1f}" for name, us in timings)
                print(f"{op}, {each[0]} tokens, {each[1]} heads, {each[2]} rows: {text}")
    return 0 if able else 1


if __name__ == "__main__":
    sys.exit(main())
