"""Tables of the generated pages: their rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.stored import Row, number, percent


@dataclass(frozen=True)
class Table:
    """What a table shows.

    Args:
        file: Name of the JSONL file, without its suffix.
        origins: Whether the runs of its rows are named below it.
        columns: Heading and cell of each column.
        cases: Cases that belong to it; empty for all.
        chosen: Whether a row of these cases does.
    """

    file: str
    columns: Sequence[tuple[str, Callable[[Row], str]]]
    cases: tuple[str, ...] = ()
    chosen: Callable[[Row], bool] = bool
    origins: bool = True

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """The rows that belong to it."""
        return [
            row
            for row in rows
            if (not self.cases or row["case"] in self.cases) and self.chosen(row)
        ]


_COMBINES = ("reduce_scatter", "all_to_all", "symmetric_memory")
_GATHERS = ("all_gather", "symmetric_memory")
_GATHERED = (
    ("queries of 64 heads", "queries", 64),
    ("of 128", "queries", 128),
    ("candidates", "candidates", 0),
)


class _Merges(Table):
    """A line a number of tokens, with the times of all collectives and numbers of heads."""

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """Lines, and which rows each is ``of``."""
        found: dict[int, Row] = {}
        for row in super().kept(rows):
            line = found.setdefault(row["tokens"], {"tokens": row["tokens"], "of": []})
            line[f"{row['variant']} {row['heads']}"] = row["us"]
            line["of"].append(row)
        return list(found.values())


class _SharedLayers(Table):
    """A line of requests and their context, with the times of what GPUs share."""

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """Lines, and which rows each is ``of``."""
        found: dict[tuple[str, ...], Row] = {}
        for row in super().kept(rows):
            has_kind = row["group"] == "v4_layer"
            named = row["variant"] if has_kind else f", {row['variant']}"
            kind, _, variant = named.partition(", ")
            shape = f"{row['tokens']} x {row['context'] // 1024}k"
            line = found.setdefault((kind, shape), {"kind": kind, "shape": shape, "of": []})
            line[variant] = row["us"]
            line["of"].append(row)
        return list(found.values())


def _gain(row: Row) -> str:
    """One GPU's time over the shortest of GPUs that share rows."""
    shared = [us for name, us in row.items() if name.startswith("context parallel")]
    return f"{row['one GPU'] / min(shared):.2f}" if shared else "-"


def _of_baseline(row: Row) -> str:
    baseline = row["baseline_us"]
    return percent(100 * row["compiled_us"] / baseline if baseline else None)


def us(field: str) -> Callable[[Row], str]:
    """A column of microseconds."""
    return lambda row: number(row.get(field))


def share(field: str) -> Callable[[Row], str]:
    """A column of percentages."""
    return lambda row: percent(row.get(field))


def _label(row: Row) -> str:
    return f"{row['shape']}, {row['variant']}" if row.get("variant") else str(row["shape"])


def _tried(row: Row) -> str:
    return f"{row['case']}: {_label(row)}"


def _times(row: Row) -> str:
    """How many times the roofline."""
    return number(row["compiled_us"] / row["roofline_us"]) if row.get("roofline_us") else "-"


def _shape(row: Row) -> str:
    return f"{row['batch']} x {row['context'] // 1024}k"


def _dense(row: Row) -> str:
    return f"{row['heads']}, {_shape(row)}"


def _hugging_face(row: Row) -> str:
    if row.get("stock_ms") is None:
        return "out of memory"
    return f"{number(row['stock_ms'])}, {number(row['stock_busy_ms'])}, {row['stock_kernels']}"


def _kernels(row: Row) -> str:
    return f"{row.get('stock_kernels') or '-'}, {row['kernels']}"


_SHORT = ((1, 4096), (1, 131072), (8, 4096), (8, 32768), (32, 32768), (128, 4096))


def _mode(row: Row) -> str:
    if row["runs"] != "patched":
        return f"{row['runs']}, {row['weights']}"
    default = " (default)" if (row["kv"], row["precision"]) == ("fp8", "serve") else ""
    return f"ours, {row['weights']}, kv {row['kv']}, {row['precision']}{default}"


def _copied(row: Row) -> str:
    return f"ours, cache {row['cache']}" if row["runs"] == "patched" else str(row["runs"])


def _change(row: Row, value: str, error: str, form: str) -> str:
    """With the half width of its interval."""
    return "-" if row.get(value) is None else f"{row[value]:+{form}} ± {row[error]:{form}}"


def _fixed(row: Row, field: str, form: str) -> str:
    """A share with as many digits as its neighbours, beside which it is read."""
    return "-" if row.get(field) is None else f"{row[field]:{form}} %"


def _gathered(row: Row) -> str:
    if row.get("gathered_rows") is None:
        return "-"
    return f"{row['context']}, {row['gathered_rows']}"


def _long_prefill(row: Row) -> bool:
    """Of a step that is mostly prefill, behind the longest prefix."""
    return int(row["rows"]) >= 512 and "behind" not in (row.get("variant") or "")


_ATTENTION = (
    ("tokens x heads, keys", _label),
    ("ours, us", us("eager_us")),
    ("compiled for any size", us("compiled_us")),
    ("FlashMLA", us("baseline_us")),
    ("of the roofline", share("pct_of_roofline")),
)
_PREFILL = (
    *_ATTENTION[:4],
    ("our kernel over its rows", us("gathered_us")),
    ("vLLM's gather", us("baseline_gather_us")),
    ("its indices", us("baseline_combine_us")),
    ("gather, indices and FlashMLA", us("baseline_whole_us")),
    ("that over ours", us("whole_times_faster")),
    ("with our gather in place of vLLM's", us("baseline_our_gather_us")),
    ("ours with FlashMLA", us("flash_mla_us")),
    ("vLLM's sequence over that", us("whole_times_flash_mla")),
    ("context, rows gathered", _gathered),
    _ATTENTION[4],
)
_VARIANTS = (
    ("tokens x heads, keys", _label),
    ("ours, by size, us", us("compiled_us")),
    ("from the blocks", us("pages_us")),
    ("by a copy", us("copied_us")),
    ("FlashMLA alone", us("baseline_us")),
    ("gather, indices and FlashMLA", us("baseline_whole_us")),
    ("that over ours", us("whole_times_faster")),
)
_BESIDE_ONE = (
    ("that over ours", us("times_faster")),
    ("of the roofline", share("pct_of_roofline")),
)
_PRECISION = (
    ("what runs, weights", _mode),
    ("path", lambda row: str(row["case"])),
    ("rms", share("rms_pct")),
    ("median token", share("median_pct")),
    ("largest, deviations", us("max_std")),
    ("same argmax", lambda row: _fixed(row, "argmax_pct", ".1f")),
    ("KL, 0.001 nats", us("kl_millinats")),
)
_CACHE = (
    ("rows", _tried),
    ("ours, us", us("compiled_us")),
    ("vLLM", us("baseline_us")),
    ("copy of as many bytes", us("copy_us")),
    ("of that copy", share("pct_of_copy")),
    ("of a copy of 256 MiB", share("pct_of_bandwidth")),
)
_QUALITY = (
    ("weights, activations", lambda row: f"{row['weights']}, {row['activations']}"),
    ("what runs", _copied),
    ("accuracy", lambda row: _fixed(row, "accuracy_pct", ".1f")),
    ("change, points", lambda row: _change(row, "changed_pct", "pct_error", ".1f")),
    ("nats", lambda row: f"{row['nll']:.3f}"),
    ("change", lambda row: _change(row, "nll_change", "nll_error", ".3f")),
)
_SELECTED = ("rows selected", lambda row: str(row["selection"]))


def _of_ranks(ranks: int, file: str, suffix: str) -> dict[str, Table]:
    """The tables of GPUs that share rows, of so many ranks."""

    def of(group: str) -> Callable[[Row], bool]:
        return lambda row: bool(row["group"] == group and row["ranks"] == ranks)

    found: dict[str, Table] = {
        "merges": _Merges(
            file,
            (
                ("tokens", lambda row: str(row["tokens"])),
                *(
                    (f"`{via}`, {heads} heads", us(f"{via} {heads}"))
                    for via in _COMBINES
                    for heads in (64, 128)
                ),
            ),
            chosen=of("combine"),
        ),
        "gathers": _Merges(
            file,
            (
                ("tokens", lambda row: str(row["tokens"])),
                *(
                    (f"{what} by `{via}`", us(f"{name}, {via} {heads}"))
                    for what, name, heads in _GATHERED
                    for via in _GATHERS
                ),
            ),
            chosen=of("gather"),
        ),
        "shared_layers": _SharedLayers(
            file,
            (
                ("requests x context", lambda row: row["shape"]),
                ("one GPU, us", us("one GPU")),
                ("heads split alone", us("tensor parallel")),
                *((f"rows shared, `{via}`", us(f"context parallel, {via}")) for via in _COMBINES),
                ("times one GPU's speed", _gain),
            ),
            chosen=of("layer"),
        ),
        "shared_v4_layers": _SharedLayers(
            file,
            (
                ("kind", lambda row: row["kind"]),
                ("requests x context", lambda row: row["shape"]),
                ("one GPU, us", us("one GPU")),
                ("heads split alone", us("tensor parallel")),
                ("rows shared, `symmetric_memory`", us("context parallel, symmetric_memory")),
                ("times one GPU's speed", _gain),
            ),
            chosen=of("v4_layer"),
        ),
    }
    return {name + suffix: table for name, table in found.items()}


TABLES = {
    "metadata": Table(
        "metadata",
        (
            ("requests x tokens, context", lambda row: f"{row['requests']} x {row['next_n']}, "
             f"{row['context']}"),
            ("ours on the device, us", us("device_us")),
            ("on the host", us("host_us")),
            ("vLLM on the device", us("baseline_device_us")),
            ("on the host", us("baseline_host_us")),
        ),
    ),
    "caches": Table(
        "kv_cache",
        _CACHE,
        ("insert", "gather", "gather_all", "indexer_insert", "indexer_gather", "plain_insert"),
    ),
    "indices": Table("kv_cache", _CACHE[:3], ("combine", "mixed", "fused")),
    "decode": Table("sparse_mla", _ATTENTION, ("decode",)),
    "other_decode": Table(
        "sparse_mla",
        (("kind: tokens x heads, keys", _tried), *_ATTENTION[1:]),
        ("window", "mtp", "paged", "ragged"),
    ),
    "prefill": Table("sparse_mla", _PREFILL, ("prefill",), _long_prefill),
    "variants": Table("sparse_mla", _VARIANTS, ("prefill",)),
    "gathered": Table(
        "sparse_mla",
        (
            ("tokens x heads, keys", _label),
            ("ours, us", us("compiled_us")),
            ("FlashMLA", us("baseline_us")),
            *_BESIDE_ONE,
        ),
        ("gathered",),
    ),
    "packages": Table(
        "sparse_mla",
        (
            ("form", lambda row: str(row["variant"])),
            ("tokens x heads, keys", lambda row: str(row["shape"])),
            ("package, us", us("package_us")),
            ("compiled for any size", us("compiled_us")),
            ("eager", us("eager_us")),
            ("FlashMLA", us("baseline_us")),
        ),
        ("packages",),
    ),
    "mla": Table(
        "mla",
        (
            ("heads, requests x context", _dense),
            ("ours, us", us("us")),
            ("FlashMLA", us("flash_mla_us")),
            ("that over ours", us("ratio")),
            ("of the roofline", share("pct_of_roofline")),
        ),
        chosen=lambda row: row["layout"] == "plain",
    ),
    "mla_codes": Table(
        "mla",
        (
            ("layout", lambda row: f"`{row['layout']}`"),
            ("heads, requests x context", _dense),
            ("us", us("us")),
            ("of the roofline", share("pct_of_roofline")),
        ),
        chosen=lambda row: row["layout"] != "plain" and row["batch"] in (8, 64),
    ),
    "v3": Table(
        "mla_model",
        (
            ("requests x context", _shape),
            ("Hugging Face, compiled, ms", us("stock_ms")),
            ("patched, one CUDA graph, ms", us("step_ms")),
            ("times faster", lambda row: number(row["stock_ms"] / row["step_ms"])),
            ("graphs", lambda row: str(row["graphs"])),
        ),
        ("decode",),
    ),
    "mla_memory": Table(
        "mla_model",
        (
            ("context", lambda row: f"{row['context'] // 1024}k"),
            ("chunks of 16k rows, GiB", us("peak_gib")),
            ("one chunk, GiB", us("whole_gib")),
        ),
        ("memory",),
    ),
    "experts": Table(
        "experts",
        (
            ("weights, tokens", lambda row: f"{row['case'].upper()}, {row['tokens']}"),
            ("ours, us", us("us")),
            ("bf16, torch's grouped products", us("baseline_us")),
            ("that over ours", us("ratio")),
            ("of a copy", share("pct_of_copy")),
        ),
    ),
    "compressor": Table(
        "compressor",
        (
            ("kind: step", _tried),
            ("us", us("compiled_us")),
            ("times the roofline", _times),
            ("copy of as many bytes", us("copy_us")),
        ),
        chosen=lambda row: row["rows"] >= 128,
    ),
    "indexer": Table(
        "indexer",
        (
            ("requests x context", _label),
            ("ours, us", us("compiled_us")),
            ("DeepGEMM's logits and `torch.topk`", us("baseline_us")),
            ("of the roofline", share("pct_of_roofline")),
        ),
        ("select",),
    ),
    "logits": Table(
        "indexer",
        (
            ("requests x context", _label),
            ("ours, us", us("compiled_us")),
            ("DeepGEMM", us("baseline_us")),
            *_BESIDE_ONE,
        ),
        ("logits",),
    ),
    "layer": Table(
        "layer",
        (
            ("kind: model, requests x context", _tried),
            ("ours, us", us("compiled_us")),
            ("baselines", us("baseline_us")),
            ("ours of baseline", _of_baseline),
            ("kernels", lambda row: str(row["kernels"])),
        ),
    ),
    "model": Table(
        "model",
        (
            ("requests x context", _shape),
            ("Hugging Face: ms, busy, kernels", _hugging_face),
            ("Hugging Face, compiled", us("stock_compiled_ms")),
            ("patched, eager", us("eager_ms")),
            ("one CUDA graph: ms, busy", lambda row: f"{number(row['step_ms'])}, "
             f"{number(row['busy_ms'])}"),
            ("times faster", us("times_faster")),
            ("kernels per layer", lambda row: f"{row['kernels_per_layer']:.0f}"),
            ("metadata", share("metadata_pct")),
            ("of the roofline", share("pct_of_roofline")),
        ),
    ),
    "model_released": Table(
        "model_released",
        (
            ("requests x context", _shape),
            ("one CUDA graph: ms, busy", lambda row: f"{number(row['step_ms'])}, "
             f"{number(row['busy_ms'])}"),
            ("kernels per layer", lambda row: f"{row['kernels_per_layer']:.0f}"),
            ("projections and head, us", lambda row: number(row["stages"]["projections"])),
            ("experts", lambda row: number(row["stages"]["experts"])),
            ("attention, caches, indexer", lambda row: number(sum(
                row["stages"][name] for name in ("attention", "indexer", "insert", "compressor")
            ))),
            ("the rest", lambda row: number(row["stages"]["norms, routers, streams, metadata"])),
            ("of the roofline", share("pct_of_roofline")),
        ),
    ),
    "model_short": Table(
        "model",
        (
            ("requests x context", _shape),
            ("Hugging Face eager, ms", us("stock_ms")),
            ("compiled, ms", us("stock_compiled_ms")),
            ("dsv4_ops, ms", us("step_ms")),
            ("speedup over eager", us("times_faster")),
            ("over compiled", lambda row: number(
                row["stock_compiled_ms"] / row["step_ms"] if row.get("stock_compiled_ms") else None
            )),
            ("kernels: Hugging Face, dsv4_ops", _kernels),
        ),
        chosen=lambda row: (row["batch"], row["context"]) in _SHORT,
        origins=False,
    ),
    **_of_ranks(2, "context_parallel", ""),
    **_of_ranks(4, "context_parallel_four", "_four"),
    "split_models": Table(
        "context_parallel",
        (
            ("model", lambda row: row["group"].partition("_")[0].upper()),
            ("requests x context", lambda row: f"{row['tokens']} x {row['context'] // 1024}k"),
            ("on each GPU", lambda row: row["variant"]),
            ("step, ms", lambda row: number(row["us"] / 1e3)),
            ("kernels per layer", lambda row: f"{row['kernels']:.0f}"),
            ("caches of a GPU, GB", lambda row: number(row["cache_gb"])),
        ),
        chosen=lambda row: bool(row["group"].endswith("_model") and row["ranks"] == 2),
    ),
    "precision_random": Table("precision", _PRECISION, chosen=lambda row: row["model"] == "random"),
    "precision_trained": Table(
        "precision",
        (*_PRECISION, ("perplexity", lambda row: _fixed(row, "perplexity_pct", "+.2f"))),
        chosen=lambda row: row["model"] == "trained",
    ),
    "quality": Table("quality", (*_QUALITY[:2], _SELECTED, *_QUALITY[2:])),
    "quality_text": Table("quality_text", _QUALITY, chosen=lambda row: not row["error"]),
}  # fmt: skip
"""Every table by the name that the page calls it."""
