"""Benchmark DeepSeek-V3: decode steps beside Hugging Face's own, prefills over long contexts."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.harness import report
from benchmarks.harness.memory import ColdCache, Copies
from benchmarks.harness.options import add_cases, chosen_device, sizes
from benchmarks.harness.report import Report
from benchmarks.harness.timing import Call, Capture, summary
from benchmarks.run import WrongResult
from dsv4_ops.attention import (
    MlaCache,
    MlaInputs,
    MlaSpec,
    MlaWeights,
    build_mla_step,
    mla_layer,
)
from dsv4_ops.core.layout import MlaDsFp8Layout, MlaFp8Layout, PlainLayout
from dsv4_ops.lowering import mla as lowering
from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.ops.mla import mla_expand_kv, mla_insert_kv, split_kv_b_proj
from dsv4_ops.ops.mla_context import max_context_chunks
from dsv4_ops.reference import mla as reference

GROUPS = ("insert", "expand", "prefill", "memory", "decode")

_STEPS, _STOCK_STEPS, _ROUNDS = 30, 5, 3
_SMALL = {"num_heads": 2, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_SMALL |= {"kv_lora_rank": 64}

Say = Callable[[str], None]


@dataclass
class Row:
    """A step of the model, or the memory of a prefill.

    Args:
        case: "decode" or "memory".
        context: Tokens before the step's.
        batch: Requests.
        stock_ms: Hugging Face's compiled step; None where its memory does not suffice.
        step_ms: Of the patched model, one CUDA graph for all contexts.
        graphs: Graphs that were compiled for all contexts.
        chunk_rows: Rows of the workspace that chunks of the context are expanded in.
        peak_gib: What a layer allocates at most.
        whole_gib: The same with the context as one chunk.
    """

    case: str
    context: int
    batch: int = 1
    stock_ms: float | None = None
    step_ms: float | None = None
    graphs: int | None = None
    chunk_rows: int | None = None
    peak_gib: float | None = None
    whole_gib: float | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has."""
    add_cases(parser, GROUPS)
    parser.add_argument("--batches", type=sizes, default=(8,), metavar="A,B,..", help="default: 8")
    parser.add_argument("--contexts", type=sizes, metavar="A,B,..", help="default: 4k, 32k")


def wall_ms(call: Call, steps: int) -> float:
    """Median time from one call to the next; the host never waits between them."""
    call()
    samples = []
    for _ in range(_ROUNDS):
        _wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        _wait()
        samples.append((time.perf_counter() - start) / steps * 1e3)
    return float(summary(samples).median)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_ms(call: Call, device: torch.device) -> float:
    """Device time of a CUDA graph of the call; on the CPU the call's own."""
    if device.type == "cpu":
        return wall_ms(call, 2)
    return float(Capture([call]).device_us().median) / 1e3


def v3_shaped(device: torch.device) -> Any:
    """A model with 4 layers of DeepSeek-V3's sizes, 16 experts and random weights."""
    import transformers

    from dsv4_ops.testing.models import MLA_YARN, small_mla_config

    config: Any
    if device.type == "cpu":
        config = small_mla_config(num_hidden_layers=2, attn_implementation="sdpa")
    else:
        config = transformers.DeepseekV3Config(
            num_hidden_layers=4,
            first_k_dense_replace=1,
            n_routed_experts=16,
            rope_parameters=dict(MLA_YARN),
            max_position_embeddings=163840,
            attn_implementation="sdpa",
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.DeepseekV3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    rotary = model.model.rotary_emb  # made in bfloat16, other than ``from_pretrained`` makes it
    model.model.rotary_emb = type(rotary)(config).to(device)
    for name, weight in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        weight.data.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else weight.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def _stock_step(model: Any, batch: int, context: int) -> Call:
    """Hugging Face's compiled step over a StaticCache of ``context`` rows: all of them are expanded
    and attended to, whichever exist."""
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    ids = torch.arange(batch, device=model.device)[:, None]
    model(ids, None, None, cache, use_cache=True)  # by position: its name depends on transformers
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
    return lambda: compiled(ids, None, None, cache, use_cache=True).logits


def decode(
    say: Say,
    add: Callable[[Row], None],
    device: torch.device,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> None:
    """Decode steps of the patched model, one graph for all contexts of a batch."""
    from dsv4_ops.integrations import transformers as hf

    model = v3_shaped(device)
    stock: dict[tuple[int, int], float | str] = {}
    for batch in batches:
        for context in contexts:
            torch._dynamo.reset()
            try:
                stock[batch, context] = wall_ms(_stock_step(model, batch, context), _STOCK_STEPS)
            except torch.OutOfMemoryError:
                stock[batch, context] = "out of memory"
            if device.type == "cuda":
                torch.cuda.empty_cache()
            say(f"Hugging Face compiled, {batch} x {context}: {stock[batch, context]} ms")
    hf.patch(model, kv="bf16")
    options: dict[str, Any] = {}
    if device.type == "cuda":
        options = {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}
    say("\n| requests x context | Hugging Face compiled ms | patched ms | times faster | graphs |")
    say("|---|---|---|---|---|")
    for batch in batches:
        cache = hf.PagedCache.for_model(
            model, max_batch_size=batch, max_cache_len=max(contexts) + 64
        )
        for layer in cache.tensors.layers:
            layer.kv.normal_()
        rows = torch.arange(batch, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        lens = torch.zeros_like(rows)
        step = hf.StepBatch(rows.long(), starts, lens, rows)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(hf.decode_step, fullgraph=True, dynamic=False, options=options)
        call = functools.partial(compiled, model, step, cache.tensors)
        for context in contexts:
            lens.fill_(context)
            cache.seq_lens.fill_(context)
            for _ in range(3):
                call()
            ms, old = wall_ms(call, _STEPS), stock[batch, context]
            ratio = f"{old / ms:.1f}" if isinstance(old, float) else ""
            shown = f"{old:.2f}" if isinstance(old, float) else old
            graphs = counters["stats"]["unique_graphs"]
            stock_ms = old if isinstance(old, float) else None
            add(Row("decode", context, batch, stock_ms, step_ms=ms, graphs=graphs))
            say(f"| {batch} x {context} | {shown} | {ms:.3f} | {ratio} | {graphs} |")


class Prefill:
    """A layer of V3, a request of so many new tokens over a context, in chunks of ``rows``."""

    def __init__(
        self, device: torch.device, new: int, cached: int, rows: int, **changed: Any
    ) -> None:
        sizes_of = _SMALL if device.type == "cpu" else {}
        self.spec = spec = MlaSpec.deepseek_v3(
            **{
                **sizes_of,
                "context": "chunked",
                "workspace_rows": rows,
                "max_chunks": max_context_chunks(
                    num_reqs=1, max_model_len=cached, workspace_rows=rows
                ),
                **changed,
            }
        )
        made = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        width = spec.qk_nope_head_dim + spec.v_head_dim
        self.w_kv_b = made(spec.num_heads * width, spec.kv_lora_rank) * spec.kv_lora_rank**-0.5
        w_uk_t, w_uv = split_kv_b_proj(
            self.w_kv_b,
            num_heads=spec.num_heads,
            qk_nope_head_dim=spec.qk_nope_head_dim,
            v_head_dim=spec.v_head_dim,
        )
        angles = torch.rand(cached + new, spec.qk_rope_head_dim, device=device)
        self.weights = MlaWeights(angles, w_uk_t, w_uv, self.w_kv_b)
        columns = -(-(cached + new) // spec.block_size)
        self.cache = MlaCache.allocate(spec, columns, device=device)
        self.cache.kv.normal_()
        q = made(new, spec.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        self.inputs = MlaInputs(q, made(new, spec.kv_lora_rank), made(new, spec.qk_rope_head_dim))
        starts = torch.tensor([0, new], dtype=torch.int32, device=device)
        lens = torch.tensor([cached + new], dtype=torch.int32, device=device)
        table = torch.arange(columns, dtype=torch.int32, device=device)[None]
        self.step = build_mla_step(spec, starts, lens, table, num_tokens=new)
        self.new, self.keys = new, cached + new

    def ours(self) -> Tensor:
        return mla_layer(self.spec, self.inputs, self.weights, self.cache, self.step)

    def expansion(self) -> Call:
        """The product with kv_b_proj of all keys."""
        latents = torch.randn(self.keys, self.spec.kv_lora_rank, device=self.w_kv_b.device)
        return functools.partial(torch.nn.functional.linear, latents.bfloat16(), self.w_kv_b)

    def flash_attention(self) -> Call:
        """FlashAttention 2 over keys and padded values that are there: one causal call."""
        spec, q = self.spec, self.inputs.q
        shape = (self.keys, spec.num_heads, q.shape[2])
        k = torch.randn(shape, device=q.device, dtype=torch.bfloat16)
        v = torch.randn(shape, device=q.device, dtype=torch.bfloat16)
        bounds = [
            torch.tensor([0, count], dtype=torch.int32, device=q.device)
            for count in (self.new, self.keys)
        ]
        forward = torch.ops.aten._flash_attention_forward.default
        sizes_ = (*bounds, self.new, self.keys, 0.0, True, False)
        return lambda: forward(q, k, v, *sizes_, scale=spec.softmax_scale)


def prefill(say: Say, device: torch.device, small: bool) -> None:
    """2048 tokens on 32k of context: ours, and FlashAttention and the expansion apart."""
    new, context = (64, 256) if small else (2048, 32768)
    case = Prefill(device, new, context, context)
    expansion = device_ms(case.expansion(), device)
    flash = float("nan") if device.type == "cpu" else device_ms(case.flash_attention(), device)
    say(f"\n{new} tokens on {context}: FlashAttention {flash:.3f}, expansion {expansion:.3f} ms\n")
    say("| form | ms | of both |\n|---|---|---|")
    forms: dict[str, Callable[[], Any]] = {}
    impls = ("auto",) if device.type == "cpu" else ("auto", "triton")
    for impl in impls:
        made = case if impl == "auto" else Prefill(device, new, context, context, impl=impl)
        forms[f"chunk of the context, impl={impl}"] = made.ours
        compiled = torch.compile(made.ours, fullgraph=True, dynamic=False)
        forms[f"the same compiled, impl={impl}"] = compiled
    forms["absorbed"] = Prefill(device, new, context, context, context="absorbed").ours
    for name, call in forms.items():
        call()
        ms = device_ms(call, device)
        say(f"| {name} | {ms:.3f} | {ms / (flash + expansion):.3f} |")


def expand(say: Say, device: torch.device, small: bool) -> None:
    """The expansion of a chunk of which some rows are used, and the product of all."""
    rows, heads = (256, 2) if small else (32768, 128)
    kv_c = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
    w_kv_b = torch.randn(heads, 256, 512, device=device, dtype=torch.bfloat16)
    product = functools.partial(torch.nn.functional.linear, kv_c, w_kv_b.flatten(0, 1))
    say(f"\n| of {rows} rows used | ms | product of all ms |\n|---|---|---|")
    whole = device_ms(product, device)
    for used in (rows, rows // 2, rows // 8, 0):
        count = torch.tensor([used], dtype=torch.int32, device=device)
        call = functools.partial(mla_expand_kv, kv_c, w_kv_b, count)
        found, wanted = call()[:used].flatten(1).float(), product()[:used].float()
        worst = float((found - wanted).abs().max()) if used else 0.0
        if not worst < 1.0:  # values of 22 on average, in bf16
            raise WrongResult(f"mla_model: the expansion differs by {worst}")
        say(f"| {used} | {device_ms(call, device):.3f} | {whole:.3f} |")


def memory(say: Say, add: Callable[[Row], None], device: torch.device) -> None:
    """Peak of what a layer allocates while contexts grow, with chunks of one size and without."""
    if device.type == "cpu":
        return
    rows = 16384
    say(f"\n| context | chunks of {rows} rows, GiB | one chunk, GiB |\n|---|---|---|")
    for context in (16384, 32768, 65536, 131072):
        peaks: list[float | None] = []
        for size in (rows, context):
            case = Prefill(device, 512, context, size)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            try:
                case.ours()
                peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            except torch.OutOfMemoryError:
                peaks.append(None)
            del case
            torch.cuda.empty_cache()
        cells = ("out of memory" if peak is None else f"{peak:.2f}" for peak in peaks)
        say(f"| {context} | {' | '.join(cells)} |")
        chunked, whole = peaks
        add(Row("memory", context, chunk_rows=rows, peak_gib=chunked, whole_gib=whole))


def insert(say: Say, device: torch.device, small: bool) -> None:
    """The insert's kernel and Inductor's code of the reference, beside a copy of its bytes."""
    copies = 1.0 if device.type == "cpu" else Copies(device, ColdCache(device)).bytes_per_us
    say("\n| rows | tokens | us | Inductor us | copy us |\n|---|---|---|---|---|")
    decomposed = Decompose(reference.mla_insert_kv)
    layouts = {PlainLayout.tag: 1152, MlaFp8Layout.tag: 576, MlaDsFp8Layout.tag: 656}
    for layout, row_bytes in layouts.items():
        spec = MlaSpec.deepseek_v3(layout=layout)
        cache = MlaCache.allocate(spec, 1024, device=device)
        settings: dict[str, Any] = {"block_size": 64, "layout": layout}
        compiled = torch.compile(
            functools.partial(mla_insert_kv, **settings), fullgraph=True, dynamic=False
        )
        for tokens in (128, 8192):
            made = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
            slots = torch.randperm(65536, device=device)[:tokens]
            tensors = (made(tokens, 512), made(tokens, 64), cache.kv, slots, cache.scale)
            ours = functools.partial(mla_insert_kv, *tensors, **settings)
            of_inductor = functools.partial(compiled, *tensors)
            times = [1e3 * device_ms(ours, device)]
            with mock.patch.object(lowering, "mla_insert_kv", decomposed):
                times.append(1e3 * device_ms(of_inductor, device))
            moved = tokens * (1152 + row_bytes) / copies / 2
            say(f"| {layout} | {tokens} | {times[0]:.1f} | {times[1]:.1f} | {moved:.1f} |")


_OF_OPS = {"insert": insert, "expand": expand, "prefill": prefill}


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Time the cases of the command line; tables, and rows of steps and of memory, go to
    ``options.out``."""
    device = chosen_device(options)
    small = device.type == "cpu" or options.smoke
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    output: Report[Row] = Report(options.out, "mla_model", report.stamp(device, options.command))
    say(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}")
    contexts = options.contexts or ((128, 256) if small else (4096, 32768))
    for group in options.cases or GROUPS:
        if group == "decode":
            decode(say, output.add, device, options.batches, contexts)
        elif group == "memory":
            memory(say, output.add, device)
        else:
            _OF_OPS[group](say, device, small)
    output.path(".md").write_text("\n".join(lines) + "\n")
