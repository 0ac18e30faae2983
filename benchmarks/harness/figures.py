"""Figures inside sentences of the generated pages, each computed from stored rows by name.

``python -m benchmarks.page`` rewrites ``<!-- = NAME -->figure<!-- / -->`` in a page.
"""

from __future__ import annotations

from benchmarks.harness.spans import Chosen, Figure, Form, between, brief, cell, most, span, values
from benchmarks.harness.stored import Row, Stored, number, percent


def _suffix(row: Row, suffix: str) -> bool:
    return str(row.get("variant")).endswith(suffix)


def _plan(expression: str, *, chosen: Chosen) -> Figure:
    """What making a plan takes: with it counted, less with it made before."""

    def figure(stored: Stored) -> str:
        rows = [row for row in stored.rows("sparse_mla") if row["case"] == "ragged" and chosen(row)]
        made = {(r["shape"], r["variant"]): r[expression] for r in rows if _suffix(r, ", planned")}
        found = [
            r[expression] - made[r["shape"], r["variant"].replace("planning counted", "planned")]
            for r in rows
            if _suffix(r, "planning counted")
        ]
        return between(found, brief)

    return figure


def _planned_costs(stored: Stored) -> str:
    """Of 8 requests, what a plan costs a layer that is given one."""
    rows = [r for r in stored.rows("sparse_mla") if r["case"] == "ragged" and r["requests"] == 8]
    bare = {(r["shape"], f"{r['variant']}, planned"): r["compiled_us"] for r in rows}
    found = [
        r["compiled_us"] - bare[r["shape"], r["variant"]] for r in rows if _suffix(r, ", planned")
    ]
    return between(found, brief)


def _slower(stored: Stored) -> str:
    """Rows of the second table of decodes in which FlashMLA is faster."""
    cases = ("window", "mtp", "paged", "ragged")
    rows = [row for row in stored.rows("sparse_mla") if row["case"] in cases]
    ratios = {f"{r['shape']}, {r['variant']}": r["compiled_us"] / r["baseline_us"] for r in rows}
    slow = [f"{name} ({100 * (by - 1):.1f} %)" for name, by in ratios.items() if by > 1]
    if not slow:
        return "every row"
    return f"all but {len(slow)} of {len(rows)} rows (longer: {'; '.join(slow)})"


def _slower_dense(stored: Stored) -> str:
    """Rows of dense MLA in which FlashMLA is more than 3 % faster."""
    ratios = values(stored, "mla", "ratio")
    return f"{sum(ratio < 1 / 1.03 for ratio in ratios)} of {len(ratios)}"


def _long(row: Row) -> bool:
    """Of many requests with long contexts in bf16."""
    many = int(row["batch"]) >= 32 and int(row["context"]) >= 32768
    return many and row["layout"] == "plain"


def _in_decode(row: Row) -> bool:
    return int(row["tokens"]) <= 1024


def _up_to_512(row: Row) -> bool:
    return int(row["tokens"]) <= 512


def _of_many(row: Row) -> bool:
    return int(row["tokens"]) > 512


def _slower_gathered(stored: Stored) -> str:
    shares = values(stored, "sparse_mla", "compiled_us / baseline_us", case="gathered")
    return percent(max(0.0, 100 * max(shares) - 100))


def _fused(stored: Stored) -> str:
    rows = [row for row in stored.rows("kv_cache") if row["case"] == "fused"]
    kernel = {r["shape"]: r["compiled_us"] for r in rows if r["variant"] == "kernel"}
    scatter = {r["shape"]: r["compiled_us"] for r in rows if r["variant"] == "scatter"}
    return between((scatter[shape] / kernel[shape] for shape in kernel), number)


def _of_fastest(stored: Stored) -> str:
    """How much longer what sizes choose takes than the faster way, of C4."""
    rows = [row for row in stored.rows("sparse_mla") if row["case"] == "prefill"]
    found = [
        row["compiled_us"] / min(row["pages_us"], row["copied_us"])
        for row in rows
        if not row["variant"] and row.get("pages_us") and row.get("copied_us")
    ]
    return percent(100 * max(0.0, max(found) - 1))


def _packages(rows: Chosen) -> Figure:
    def figure(stored: Stored) -> str:
        kept = [r for r in stored.rows("sparse_mla") if r["case"] == "packages" and rows(r)]
        found = [r["package_us"] - r["compiled_us"] for r in kept if r["package_us"] is not None]
        return f"{min(found):.1f} to {max(found):.1f}"

    return figure


def _busy(stored: Stored) -> str:
    """The largest share of its time for which Hugging Face's step keeps the GPU busy at the sizes
    that the host bounds."""
    rows = stored.rows("model")
    bound = [r for r in rows if r["batch"] == 1 or (r["batch"], r["context"]) == (8, 4096)]
    return percent(max(100 * row["stock_busy_ms"] / row["stock_ms"] for row in bound))


def _runs(field: str, batch: int, context: int) -> Figure:
    """Of all stored runs of a point."""

    def figure(stored: Stored) -> str:
        rows = stored.runs("model")
        same = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        return between([row[field] for row in same if row.get(field) is not None], number)

    return figure


def _model_runs(stored: Stored) -> str:
    """How many stored runs the points have."""
    points = [(row["batch"], row["context"]) for row in stored.runs("model")]
    return between([float(points.count(point)) for point in set(points)], lambda v: f"{v:.0f}")


def _model(field: str, batch: int, context: int, form: Form = number) -> Figure:
    return cell("model", field, form=form, batch=batch, context=context)


def _mla(field: str, case: str, shape: str, variant: str = "", form: Form = number) -> Figure:
    return cell("sparse_mla", field, form=form, case=case, shape=shape, variant=variant)


def _precision(field: str, model: str, form: Form, *, default: bool) -> Figure:
    """Over the tokens of both paths, of the mode that ``patch`` has by default or of Hugging Face,
    both in bfloat16."""
    if not default:
        return span("precision", field, form=form, model=model, weights="bf16", runs="Hugging Face")
    return span(
        "precision", field, form=form, model=model, weights="bf16", runs="patched", kv="fp8",
        precision="serve",
    )  # fmt: skip


def _layer(model: str, shape: str) -> Figure:
    return cell(
        "layer", "compiled_us / baseline_us", form=_share, case="c4", shape=f"{model}, {shape}",
        variant="",
    )  # fmt: skip


def _share(value: float) -> str:
    return percent(100 * value)


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _text_loss(field: str) -> Figure:
    """Of all tokens of a trained model: both paths, each by its number of tokens."""

    def figure(stored: Stored) -> str:
        rows = [row for row in stored.rows("precision") if row.get(field) is not None]
        tokens = sum(row["tokens"] for row in rows)
        return number(sum(row["tokens"] * row[field] for row in rows) / tokens)

    return figure


def _tenths(value: float) -> str:
    return f"{value:.1f} %"


def _heads(count: int, keys: str) -> str:
    return f"{count} x 64 heads, {keys}"


_PAGED, _C4 = "128+1024", "128+512"
_BEHIND = "C128, behind 2048 tokens"
_TABLE = "C128, behind 2048 tokens, table of 8192 rows"
_LONG = "C128, behind 983040 tokens"

FIGURES: dict[str, Figure] = {
    # metadata
    "metadata_us": span("metadata", "device_us", form=brief),
    "metadata_host_us": span("metadata", "host_us", form=brief),
    "metadata_vllm_us": span("metadata", "baseline_device_us", form=brief),
    "metadata_vllm_host_us": span("metadata", "baseline_host_us", form=brief),
    "metadata_times": span("metadata", "baseline_device_us / device_us", form=brief),
    "metadata_times_whole": span(
        "metadata", "baseline_device_us + baseline_host_us / device_us + host_us", form=brief
    ),
    # caches
    "insert_times": span("kv_cache", "baseline_us / compiled_us", form=brief, case="insert"),
    "gather_times": span("kv_cache", "baseline_us / compiled_us", form=brief, case="gather"),
    "insert_host_us": span("kv_cache", "host_us", form=brief, case="insert"),
    "insert_vllm_host_us": span("kv_cache", "baseline_host_us", form=brief, case="insert"),
    "gather_bandwidth": span(
        "kv_cache", "pct_of_bandwidth", form=percent, case="gather",
        chosen=lambda row: row["shape"] in ("1x32768 rows", "4x8192 rows"),
    ),
    "copy_bandwidth_8192": span(
        "kv_cache", "roofline_us / copy_us", form=_share, case="gather", shape="1x8192 rows"
    ),
    "copy_bandwidth_32768": span(
        "kv_cache", "roofline_us / copy_us", form=_share, case="gather", shape="1x32768 rows"
    ),
    "gather_four_times": lambda stored: brief(
        values(stored, "kv_cache", "compiled_us", shape="1x32768 rows", case="gather")[0]
        / values(stored, "kv_cache", "compiled_us", shape="1x8192 rows", case="gather")[0]
    ),
    "scatter_times": _fused,
    # sparse MLA, decode
    "decode_times": span(
        "sparse_mla", "baseline_us / eager_us", "baseline_us / compiled_us", case="decode"
    ),
    "decode_8_over_1": lambda stored: number(
        values(stored, "sparse_mla", "compiled_us", case="decode", shape=_heads(8, _C4))[0]
        / values(stored, "sparse_mla", "compiled_us", case="decode", shape=_heads(1, _C4))[0]
    ),
    "decode_roofline": most("sparse_mla", "pct_of_roofline", form=percent, case="decode"),
    "window_times": span("sparse_mla", "baseline_us / compiled_us", case="window"),
    "decode_slower": _slower,
    "ragged_times": span(
        "sparse_mla", "baseline_us / compiled_us", case="ragged",
        chosen=lambda row: row["variant"] in ("C4", "C128"),
    ),
    "ragged_times_planned": span(
        "sparse_mla", "baseline_us / compiled_us", case="ragged",
        chosen=lambda row: _suffix(row, ", planned"),
    ),
    "ragged_times_counted": span(
        "sparse_mla", "baseline_us / compiled_us", case="ragged",
        chosen=lambda row: _suffix(row, "planning counted"),
    ),
    "ragged_64": _mla("compiled_us", "ragged", _heads(64, _PAGED), "C128"),
    "ragged_64_planned": _mla("compiled_us", "ragged", _heads(64, _PAGED), "C128, planned"),
    "ragged_64_counted": _mla(
        "compiled_us", "ragged", _heads(64, _PAGED), "C128, planning counted"
    ),
    "ragged_256": _mla("compiled_us", "ragged", _heads(256, _PAGED), "C128"),
    "ragged_256_planned": _mla("compiled_us", "ragged", _heads(256, _PAGED), "C128, planned"),
    "ragged_256_counted": _mla(
        "compiled_us", "ragged", _heads(256, _PAGED), "C128, planning counted"
    ),
    "ragged_512": _mla("compiled_us", "ragged", _heads(512, _PAGED), "C128"),
    "ragged_512_planned": _mla("compiled_us", "ragged", _heads(512, _PAGED), "C128, planned"),
    "plan_us_128": _plan("compiled_us", chosen=lambda row: row["requests"] <= 128),
    "plan_us_256": _plan("compiled_us", chosen=lambda row: row["requests"] == 256),
    "plan_us_512": _plan("compiled_us", chosen=lambda row: row["requests"] == 512),
    "plan_vllm_us": _plan("baseline_us", chosen=bool),
    "planned_costs_8": _planned_costs,
    # dense MLA
    "mla_times_few": span("mla", "ratio", chosen=lambda row: row["batch"] <= 8),
    "mla_times_128": span("mla", "ratio", heads=128, chosen=lambda row: row["batch"] > 8),
    "mla_times_16": span("mla", "ratio", heads=16, chosen=lambda row: row["batch"] > 8),
    "mla_slower": _slower_dense,
    "mla_roofline_128": span("mla", "pct_of_roofline", form=percent, heads=128, chosen=_long),
    "mla_roofline_16": span("mla", "pct_of_roofline", form=percent, heads=16, chosen=_long),
    "v3_times_4k": cell("mla_model", "stock_ms / step_ms", case="decode", context=4096),
    "v3_times_32k": cell("mla_model", "stock_ms / step_ms", case="decode", context=32768),
    "mla_peak": cell("mla_model", "peak_gib", case="memory", context=131072),
    "mla_whole": cell("mla_model", "whole_gib", case="memory", context=131072),
    # experts
    "experts_times": span("experts", "ratio", case="fp4", chosen=_in_decode),
    "humming_few": span("experts", "humming_us / us", case="fp4", chosen=_up_to_512),
    "humming_many": span("experts", "humming_us / us", case="fp4", chosen=_of_many),
    "experts_8": cell("experts", "us", form=_whole, case="fp4", tokens=8),
    "experts_64": cell("experts", "us", form=_whole, case="fp4", tokens=64),
    "experts_bf16": span("experts", "ratio", case="bf16"),
    # sparse MLA, prefill
    "prefill_times": span("sparse_mla", "baseline_whole_us / compiled_us", case="prefill"),
    "prefill_times_c4_2048": _mla("whole_times_faster", "prefill", _heads(2048, _C4)),
    "prefill_times_short": _mla(
        "whole_times_faster", "prefill", _heads(2048, "128+32"), _BEHIND
    ),
    "prefill_times_missed": span(
        "sparse_mla", "whole_times_faster", case="prefill", rows=2048,
        chosen=lambda row: row["shape"] != _heads(2048, _C4) and "behind" not in row["variant"],
    ),
    "prefill_floor_missed": span(
        "sparse_mla", "pct_of_roofline", form=percent, case="prefill", rows=2048,
        chosen=lambda row: row["shape"] != _heads(2048, _C4) and "behind" not in row["variant"],
    ),
    "prefill_share": span(
        "sparse_mla", "compiled_us / baseline_whole_us", case="prefill",
        chosen=lambda row: row["rows"] >= 512 and "behind" not in row["variant"],
    ),
    "prefill_share_our_gather": span(
        "sparse_mla", "compiled_us / baseline_our_gather_us", case="prefill",
        chosen=lambda row: row["rows"] >= 512 and "behind" not in row["variant"],
    ),
    "prefill_share_few": span(
        "sparse_mla", "compiled_us / baseline_whole_us", case="prefill",
        chosen=lambda row: row["rows"] <= 8,
    ),
    "prefill_one": _mla("compiled_us", "prefill", _heads(1, "128+1025"), "C128"),
    "prefill_one_pages": _mla("pages_us", "prefill", _heads(1, "128+1025"), "C128"),
    "prefill_of_fastest": _of_fastest,
    "table_64": _mla("compiled_us", "prefill", _heads(64, "128+17"), _TABLE),
    "table_64_pages": _mla("pages_us", "prefill", _heads(64, "128+17"), _TABLE),
    "table_128_copied": _mla("copied_us", "prefill", _heads(128, "128+17"), _TABLE),
    "table_128_pages": _mla("pages_us", "prefill", _heads(128, "128+17"), _TABLE),
    "table_512": _mla("compiled_us", "prefill", _heads(512, "128+20"), _TABLE),
    "table_512_pages": _mla("pages_us", "prefill", _heads(512, "128+20"), _TABLE),
    "long_64": _mla("compiled_us", "prefill", _heads(64, "128+7681"), _LONG),
    "long_64_pages": _mla("pages_us", "prefill", _heads(64, "128+7681"), _LONG),
    "long_128_copied": _mla("copied_us", "prefill", _heads(128, "128+7681"), _LONG),
    "long_128_pages": _mla("pages_us", "prefill", _heads(128, "128+7681"), _LONG),
    "gathered_share": span("sparse_mla", "compiled_us / baseline_us", case="gathered"),
    "gathered_worst": _slower_gathered,
    "gathered_times_few": span(
        "sparse_mla", "baseline_us / compiled_us", case="gathered",
        chosen=lambda row: row["rows"] <= 128,
    ),
    "gathered_times_many": span(
        "sparse_mla", "baseline_us / compiled_us", case="gathered",
        chosen=lambda row: row["rows"] >= 512,
    ),
    "package_few_us": _packages(lambda row: row["rows"] <= 256),
    "package_8_us": _packages(
        lambda row: row["rows"] <= 8 and row["variant"] in ("decode", "paged", "prefill")
    ),
    "package_many": span(
        "sparse_mla", "package_us / compiled_us", case="packages",
        chosen=lambda row: row["rows"] >= 512,
    ),
    # compressor, indexer
    "compressor_floors": span(
        "compressor", "compiled_us / roofline_us", chosen=lambda row: row["rows"] >= 4096
    ),
    "indexer_times": span("indexer", "baseline_us / compiled_us", form=brief, case="select"),
    "indexer_share": span("indexer", "compiled_us / baseline_us", case="select"),
    # model
    "model_8_4k": _model("times_faster", 8, 4096, brief),
    "model_8_32k": _model("times_faster", 8, 32768, brief),
    "model_1_128k": _model("times_faster", 1, 131072, brief),
    "model_kernels": most("model", "kernels_per_layer", form=_whole),
    "model_metadata": most("model", "metadata_pct", form=percent),
    "model_roofline": span("model", "pct_of_roofline", form=percent),
    "model_eager_ms": span("model", "eager_ms", form=brief),
    "model_busy": _busy,
    "model_runs": _model_runs,
    "runs_8_4k_stock": _runs("stock_ms", 8, 4096),
    "runs_8_4k_stock_busy": _runs("stock_busy_ms", 8, 4096),
    "runs_8_4k_compiled": _runs("stock_compiled_ms", 8, 4096),
    "runs_8_4k_ours": _runs("step_ms", 8, 4096),
    "runs_1_4k_stock": _runs("stock_ms", 1, 4096),
    "runs_1_4k_compiled": _runs("stock_compiled_ms", 1, 4096),
    "runs_1_4k_ours": _runs("step_ms", 1, 4096),
    "runs_32_32k_stock": _runs("stock_ms", 32, 32768),
    # precision
    "trained_steps": span("precision", "train_steps", form=_whole, model="trained"),
    "trained_loss": _text_loss("float32_loss"),
    "trained_unigram": span("precision", "unigram_loss", model="trained"),
    "trained_bigram": span("precision", "bigram_loss", model="trained"),
    "precision_prefill_tokens": span("precision", "tokens", form=_whole, case="prefill"),
    "precision_decode_tokens": span("precision", "tokens", form=_whole, case="decode"),
    "precision_last": most("precision", "last", form=lambda value: f"{value + 1:.0f}"),
    # quality
    "quality_targets": most("quality", "targets", form=_whole),
    "quality_accuracy": span("quality", "accuracy_pct", form=percent, runs="Hugging Face",
        weights="fp32", selection="all"),
    "quality_best": span("quality", "accuracy_pct", form=percent, runs="Hugging Face",
        selection="best 4"),
    "quality_shuffled": span("quality", "accuracy_pct", form=percent,
        selection="best 4, of shuffled keys"),
    "quality_opposite": span("quality", "accuracy_pct", form=percent,
        selection="best 4, of opposite keys"),
    "quality_nats": most("quality", "nll_change", form="{:.3f}".format, selection="all"),
    "quality_train": span("quality", "train_seconds", form=_whole, weights="bf16", cache="fp8"),
    # layer
    "layer_window": span("layer", "compiled_us / baseline_us", form=_share, case="window"),
    "layer_c4": span("layer", "compiled_us / baseline_us", case="c4"),
    "layer_c128": span("layer", "compiled_us / baseline_us", form=_share, case="c128"),
    "layer_flash_8": _layer("Flash", "8 x 16384 tokens"),
    "layer_flash_64": _layer("Flash", "64 x 16384 tokens"),
    "layer_pro_8": _layer("Pro", "8 x 16384 tokens"),
    "layer_pro_64": _layer("Pro", "64 x 16384 tokens"),
    "layer_flash_long": _layer("Flash", "8 x 131072 tokens"),
    "layer_pro_long": _layer("Pro", "8 x 131072 tokens"),
}  # fmt: skip
"""Every figure by the name that the pages call it."""

for _of in ("random", "trained"):
    for _who, _default in (("default", True), ("bf16", False)):
        FIGURES |= {
            f"{_of}_{_who}_rms": _precision("rms_pct", _of, percent, default=_default),
            f"{_of}_{_who}_median": _precision("median_pct", _of, percent, default=_default),
            f"{_of}_{_who}_argmax": _precision("argmax_pct", _of, _tenths, default=_default),
        }
    FIGURES[f"{_of}_cache_rms"] = span(
        "precision", "rms_pct", form=percent, model=_of, weights="fp32", kv="fp8"
    )
