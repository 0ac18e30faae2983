"""Benchmark all layers of DeepSeek-V4-Flash on several GPUs: decode steps, prefills and the start.

Each GPU has one process (a rank). The model has random weights in the released precision. Hugging
Face's plans split it over the ranks, which share the rows of the caches. First, logits and caches
of six layers on all GPUs are compared with those on one GPU. Decodes attend to random cache rows,
not to a prefilled context. ``--model pro --layers N`` measures the first layers of Pro.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.flash_soak import Soak
from benchmarks.harness.options import chosen_device, size, sizes
from benchmarks.harness.ranks import Ranks, replays_us, run_ranks
from benchmarks.harness.report import one_line
from benchmarks.harness.steps import MODELS, fill, flash_config, step_batch
from benchmarks.harness.timing import Capture, device_activities, wait, wall_us
from benchmarks.run import WrongResult
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.testing.stored_rows import differences

_CHECKED_LAYERS, _CHECKED_TOKENS, _MOST_ERROR, _ROWS_ERROR = 6, 24, 0.05, 0.1
"""Layers of the check, minimum tokens to check a decode, and limits of the relative errors of
logits and of cache rows. Errors are medians; for a compiled decode, the lower quartile, because at
near ties rounding selects other experts (43 layers: 9 of 24 tokens were off by more than 0.05).
Values off by 0.05 give e4m3 codes (steps of 1/8) off by about (0.05 / 8) ** 0.5 = 0.08."""
_DRAFTED = 2
"""Tokens per request in a step that verifies one draft."""
_ACCEPTED = (0.0, 0.5, 0.9)
"""Assumed shares of accepted drafts."""
_REPLAYS, _PREFILLS = 8, 3
_CHUNK = 4096
_BYTES_PER_MS = {"H200": 4.8e9, "H100": 3.35e9}
"""Memory bandwidth, by a part of the GPU's name."""
_LONG = 131072
"""Longer contexts are measured last, in another cache with wider block tables."""
_RESERVED_GB = 1.6
"""Memory for graphs and activations of decode steps, in addition to the cache."""
_COLLECTIVES = ("nccl", "merge_ranks", "gather_ranks")


@dataclass(kw_only=True)
class FlashRow:
    """A phase of the start, a decode step or a prefill. Times are the same on all ranks."""

    model: str
    part: str  # "start", "check", "decode", "draft" (one per request), "soak" or "prefill"
    layers: int
    ranks: int  # processes, with a GPU each
    phase: str | None = None  # of the start
    start: str | None = None  # "cold" if torch's folder of compiled code was empty, else "warm"
    requests: int | None = None
    tokens: int | None = None  # new tokens of all requests
    context: int | None = None  # earlier tokens of each request
    seconds: float | None = None  # of a phase, the check or the soak
    step_ms: float | None = None
    tokens_per_s: float | None = None
    per_s_none: float | None = None  # tokens/s at each share of _ACCEPTED (also the next two)
    per_s_half: float | None = None
    per_s_most: float | None = None
    roofline_ms: float | None = None
    kernels: float | None = None  # kernels of the step per layer
    collectives_pct: float | None = None  # share of the kernels' time, including waits
    weights_gb: float | None = None  # on this GPU (also the next two)
    cache_gb: float | None = None
    peak_gb: float | None = None  # the allocator's maximum
    logits_error: float | None = None  # median over a check's tokens, or error of a soak's request
    worst_error: float | None = None
    same_keys: bool | None = None  # whether split and whole models store the same bytes in layer 0
    rows_error: float | None = None  # median over a cache's rows; the largest of all caches
    note: str | None = None  # why a point did not run, or more about the row
    error: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=size, metavar="N", help="default: all")
    add("--model", choices=tuple(MODELS), default="flash", help="default: %(default)s")
    add("--layers", type=size, help="default: all; 4 on a CPU")
    add("--batches", type=sizes, help="requests; default: 1,8,32")
    add("--contexts", type=sizes, help="tokens; default: 4096,32768,131072")
    add("--prefills", type=sizes, help="tokens; default: 1024,4096,16384")
    add("--heads", choices=("split", "whole"), default="split", help="default: %(default)s")
    add("--experts", choices=("whole", "parts"), default="whole", help="default: %(default)s")
    add("--backend", help="of torch.compile; default: inductor, and none on a CPU")
    add("--generate", type=size, metavar="N", help="call generate for N tokens, in place of steps")
    add("--soak", type=size, metavar="N", help="decode steps of requests that come and go")
    add("--no-check", action="store_true", help="time without the comparison with one GPU")


def run(options: argparse.Namespace) -> None:
    from dsv4_ops.lowering._compat import cache_dir

    device = chosen_device(options)
    on_cpu = device.type == "cpu"
    options.layers = options.layers or (4 if on_cpu else MODELS[options.model]["num_hidden_layers"])
    options.batches = options.batches or ((1, 2) if on_cpu else (1, 8, 32))
    options.contexts = options.contexts or ((64, 300) if on_cpu else (4096, 32768, 131072))
    options.prefills = options.prefills or ((48,) if on_cpu else (1024, 4096, 16384))
    options.backend = options.backend or (None if on_cpu else "inductor")
    options.start = "warm" if any(Path(cache_dir()).iterdir()) else "cold"
    # weights come from tensors twice as large, which would fragment memory
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run_ranks(FlashRanks, options, device, options.gpus)


class FlashRanks(Ranks):
    """The measurements in one process; the most important rows come first."""

    title = "Flash in the released precision"
    notes = (
        "step_ms: of a decode, median over replays of a CUDA graph on all GPUs at once; of a "
        "prefill, of graphs of chunks of at most 4096 tokens by the clock. tokens_per_s: of all "
        "requests.",
        "roofline_ms: bytes of one GPU over 3.35 (H100) or 4.8 TB/s (H200): weights without "
        "experts and embedding, experts * (1 - (1 - 6 / 256) ** tokens), and cache rows. These "
        "are, in a layer, 128 of 584 bytes; in C4 layers a key of 132 bytes for every 4 tokens and "
        "512 rows, in C128 layers a row for every 128 tokens, both divided by the GPUs that share "
        "them. Pro has 384 experts and selects 1024 rows.",
        "draft: a step that verifies one draft of each request; models that are split have no "
        "draft layer, so its time is missing. per_s_none, per_s_half, per_s_most: tokens per "
        "second if none, half or 9 of 10 drafts are right.",
        "kernels and collectives_pct: of the second of two replays on the first GPU, by "
        "torch.profiler.",
    )

    def run(self) -> None:
        from dsv4_ops.integrations import transformers as v4

        self.layers: int = self.options.layers
        if self.world > 1 and not self.options.no_check:
            self.check()
        with self.phase("build") as row:
            model = self.model(self.layers, split=True)
            row.weights_gb = sum(_own(each).nbytes for each in model.parameters()) / 1e9
        with self.phase("patch"):
            self.patch(model, split=True)
        if self.options.generate:
            self.generate(model)
            return
        weights, step = Weights.of(model), self.compiled(model, v4.decode_step)
        for are_long in (False, True):
            contexts = [each for each in self.options.contexts if (each > _LONG) == are_long]
            if contexts:
                Decodes(self, model, weights, step, contexts).run()
            if not are_long:
                self.prefills(model)

    def generate(self, model: Any) -> None:
        """Time ``generate`` after the longest prompt; a size's third prefill captures its graph."""
        prompt, new = max(self.options.prefills), self.options.generate
        ids = torch.arange(prompt, device=self.device)[None] % 250 + 3
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for name in ("first generate", *("generate again",) * 3):
            with self.phase(name):
                texts = model.generate(ids, max_new_tokens=new, **settings)
            if texts.shape[1] != prompt + new:
                raise WrongResult(f"a text has {texts.shape[1] - prompt} of {new} tokens")

    def free(self) -> None:
        """Free memory that no tensor uses."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    @property
    def rate(self) -> float | None:
        """Return the GPU's memory bandwidth in bytes per ms, or None if it is not known."""
        name = torch.cuda.get_device_name(self.device) if self.cuda else "H100"
        return next((rate for part, rate in _BYTES_PER_MS.items() if part in name), None)

    def row(self, part: str, **fields: Any) -> FlashRow:
        """Make a row with the model, layers and ranks of this run."""
        model = self.options.model
        return FlashRow(model=model, part=part, layers=self.layers, ranks=self.world, **fields)

    def keep(self, row: FlashRow) -> None:
        if self.cuda:
            row.peak_gb = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        super().keep(row)

    @contextmanager
    def phase(self, name: str) -> Iterator[FlashRow]:
        """Time a phase of the start."""
        row = self.row("start", phase=name, start=self.options.start)
        began = time.perf_counter()
        self.say(f"{name} ...")
        yield row
        wait(self.device)
        row.seconds = time.perf_counter() - began
        self.keep(row)

    def model(self, layers: int, *, split: bool) -> Any:
        """Build the first layers of the model, or this rank's part of them."""
        from dsv4_ops.testing.released_model import released_model, split_over

        plan, config = None, flash_config(layers, self.options.model, small=not self.cuda)
        if split and self.world > 1:
            settings = {"heads": self.options.heads == "split", "experts": self.options.experts}
            plan = split_over(self.world, **settings)
        return released_model(config, device=self.device, distributed=plan)

    def patch(self, model: Any, *, split: bool) -> Any:
        """Patch a model. Ranks that split the model's heads share its caches."""
        from dsv4_ops.attention import ContextParallel
        from dsv4_ops.integrations import transformers as v4

        parallel = None
        if split and self.world > 1 and self.options.heads == "split":
            parallel = ContextParallel.of(via="symmetric_memory" if self.cuda else "reduce_scatter")
        return v4.patch(model, parallel=parallel)

    def check(self) -> None:
        """Compare logits and caches of a few layers on all ranks with those on each rank alone."""
        row, began = self.row("check"), time.perf_counter()
        row.layers = layers = min(_CHECKED_LAYERS, self.layers)
        self.say(f"{layers} layers on {self.world} ranks against one ...")
        (ours, cache), (one, whole) = (
            _checked(self.patch(self.model(layers, split=split), split=split))
            for split in (True, False)
        )
        self.free()
        errors = (ours - one).norm(dim=-1) / one.norm(dim=-1)
        found: list[Any] = [None] * self.world
        mine = float(errors.median()), float(errors.max()), differences(cache, whole)
        dist.all_gather_object(found, mine)
        row.logits_error, row.worst_error, _ = map(max, zip(*found, strict=True))
        caches = [each for _, _, of_rank in found for each in of_rank]
        row.same_keys = all(each.is_equal for each in caches if each.layer == 0)
        row.rows_error, _, layer, name, _ = max(caches)
        row.note = f"rows_error is of {name} in layer {layer}"
        if not (row.logits_error < _MOST_ERROR and row.rows_error < _ROWS_ERROR and row.same_keys):
            text = f"{row.logits_error=:.3f}, {row.rows_error=:.3f}, {row.same_keys=}"
            row.error = one_line(WrongResult(text))
        row.seconds = time.perf_counter() - began
        self.keep(row)
        dist.barrier()  # if a rank ends early, rank 0 has kept the row
        if row.error:
            raise WrongResult(row.error)

    def compiled(self, model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile the step by kind of layer, for all sizes; without a backend, return it eager."""
        from dsv4_ops.integrations import transformers as v4

        if self.options.backend is None:
            return functools.partial(step, model)
        settings = {"mode": "regional", "dynamic": True, "backend": self.options.backend}
        return v4.compile_step(model, step, **settings)

    def prefills(self, model: Any) -> None:
        """Measure the wall time of prompts in chunks; a GPU replays a graph for each chunk."""
        from dsv4_ops.integrations import transformers as v4
        from dsv4_ops.integrations.transformers.generation import kept

        self.free()
        prompts = sorted(self.options.prefills)
        chunk = min(_CHUNK, max(prompts))
        cache = v4.PagedCache.for_model(
            model, max_batch_size=1, max_cache_len=max(prompts), max_chunk=chunk
        )
        row = cache.add("prompt", max(prompts))
        step: Any = self.compiled(model, v4.prefill_step)
        captures = kept.keeps_on(self.device) and self.options.backend is not None
        pool, steps = kept.pool_of(self.device) if captures else None, dict[int, Any]()

        def prefill(tokens: int) -> None:
            cache.seq_lens.zero_()
            for first in range(0, tokens, chunk):
                count = min(chunk, tokens - first)
                if captures and count not in steps:
                    steps[count] = kept.KeptStep(step, cache.tensors, 1, count, True, pool)
                batch = step_batch([count], [first + count], self.device, [row])
                steps.get(count, step)(batch, cache.tensors)

        with self.phase("first prefill"):
            prefill(prompts[0])
        for tokens in prompts:
            found = self.row("prefill", requests=1, tokens=tokens, context=0)
            with self.measured(found):
                for _ in range(kept.WARM_CALLS + 1 if captures else 1):
                    prefill(tokens)  # compiles kernels for these sizes, and captures
                seconds = []
                for _ in range(_PREFILLS if self.cuda else 1):
                    wait(self.device)
                    dist.barrier()
                    began = time.perf_counter()
                    prefill(tokens)
                    wait(self.device)
                    seconds.append(time.perf_counter() - began)
                found.step_ms = statistics.median(seconds) * 1e3
                found.tokens_per_s = tokens / found.step_ms * 1e3
                _raise_if_dropped(cache)


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights that this rank reads."""

    dense: int  # weights that every step reads: all but experts and the embedding
    experts: int  # routed experts
    chosen: float  # share of the experts that a token selects

    @classmethod
    def of(cls, model: Any) -> Weights:
        """Count the bytes of this rank's weights, without the embedding."""
        sizes = {name: _own(each).nbytes for name, each in model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        dense = sum(sizes.values()) - experts - sizes["model.embed_tokens.weight"]
        config = model.config
        return cls(dense, experts, config.num_experts_per_tok / config.n_routed_experts)

    def read(self, tokens: int) -> float:
        """Return the weight bytes that a step of ``tokens`` reads if routers select at random."""
        hit: float = 1 - (1 - self.chosen) ** tokens
        return self.dense + self.experts * hit


class Decodes:
    """Times decode steps of all batches and contexts, with one cache and one compiled step."""

    def __init__(
        self, ranks: FlashRanks, model: Any, weights: Weights, step: Callable[..., Any],
        contexts: list[int],
    ) -> None:  # fmt: skip
        from dsv4_ops.integrations import transformers as v4

        ranks.free()  # the cache and graphs of earlier measurements
        self.ranks, self.model, self.weights = ranks, model, weights
        self.spec = model.dsv4_ops_spec
        self.shares = 1 if self.spec.parallel is None else ranks.world
        self.batches, self.contexts = ranks.options.batches, contexts
        self.sizes = {
            "max_batch_size": max(self.batches),
            "max_cache_len": max(self.contexts) + _DRAFTED + 1,
            "max_chunk": min(256, max(self.contexts)),
            "next_n": _DRAFTED,
        }
        most = self._most_blocks(v4)
        points = [(batch, context) for context in self.contexts for batch in self.batches]
        self.needed = {point: self._blocks(*point) for point in points}
        self.fits = [point for point in points if self.needed[point] <= most]
        blocks = max((self.needed[point] for point in self.fits), default=1)
        self.cache = v4.PagedCache.for_model(model, num_blocks=blocks, **self.sizes)
        fill(self.cache)
        self.bytes = sum(self.cache.memory().values())
        self.step = functools.partial(step, state_rings=False)
        self.eager = functools.partial(v4.decode_step, model, state_rings=False)
        self.graphs: dict[tuple[int, int], tuple[Any, Any]] = {}

    def run(self) -> None:
        """Time decodes of all batches and contexts that fit, then steps with drafts."""
        ranks = self.ranks
        with ranks.phase("first decode") as row:
            self.place(1, min(self.contexts), 1)
            self.step(self.batch(1, min(self.contexts), 1), self.cache.tensors)
            row.cache_gb = self.bytes / 1e9
        for (batch, context), needed in self.needed.items():
            if (batch, context) not in self.fits:
                note = f"not run: {needed} blocks of a cache do not fit beside the weights"
                ranks.keep(ranks.row("decode", requests=batch, context=context, note=note))
        for batch, context in self.fits:
            self.measure("decode", batch, context, 1)
        for batch, context in self.fits:
            self.measure("draft", batch, context, _DRAFTED)
        if ranks.options.soak and self.graphs and max(self.contexts) <= _LONG:
            self.soak(ranks.options.soak)
        self.graphs.clear()

    def soak(self, steps: int) -> None:
        """Run requests that come and go, in the largest batch's graph."""
        ranks, requests = self.ranks, max(batch for batch, each in self.graphs if each == 1)
        batch, capture = self.graphs[requests, 1]
        for number in list(self.cache.requests):
            self.cache.free(number)

        def step() -> Tensor:
            if capture is not None:
                capture.graph.replay()
            logits: Tensor = capture.outputs[0] if capture else self.step(batch, self.cache.tensors)
            return logits

        row, began = ranks.row("soak", requests=requests), time.perf_counter()
        with ranks.measured(row):
            run = Soak(self.cache, batch, step)
            row.logits_error = run.run(steps)
            row.seconds, row.tokens = time.perf_counter() - began, run.tokens
            row.note = f"{steps} steps, {run.arrivals} arrivals, {run.preemptions} preemptions"
            _raise_if_dropped(self.cache)
            if not row.logits_error < _MOST_ERROR:
                raise WrongResult(f"a request is off by {row.logits_error:.3f} among others")

    def measure(self, part: str, requests: int, context: int, each: int) -> None:
        """Measure a row. If its graph is new, compare it with the eager step, and profile it."""
        ranks, tokens = self.ranks, requests * each
        row = ranks.row(part, requests=requests, tokens=tokens, context=context)
        with ranks.measured(row):
            self.place(requests, context, each)
            is_new = (requests, each) not in self.graphs
            if is_new:
                self._capture(requests, context, each)
            batch, capture = self.graphs[requests, each]
            batch.seq_lens.fill_(context + each)
            self.cache.seq_lens.fill_(context)
            read = self.weights.read(tokens) + requests * self.row_bytes(context)
            row.roofline_ms = None if ranks.rate is None else read / ranks.rate
            if capture is None:
                call = functools.partial(self.step, batch, self.cache.tensors)
                row.step_ms = wall_us(call, ranks.device, budget_s=0).median / 1e3
            else:
                row.step_ms = replays_us(capture.graph, _REPLAYS) / 1e3
                if is_new:
                    self._profile(row, capture)
            row.tokens_per_s = requests / row.step_ms * 1e3
            if each > 1:
                per_s, row.tokens_per_s = row.tokens_per_s, None
                row.per_s_none, row.per_s_half, row.per_s_most = (
                    per_s * (1 + accepted) for accepted in _ACCEPTED
                )
            _raise_if_dropped(self.cache)

    def place(self, requests: int, context: int, each: int) -> None:
        """Assign blocks and cache rows to requests, in the order of the requests' numbers."""
        for number in list(self.cache.requests):
            self.cache.free(number)
        for number in range(requests):
            assert self.cache.add(number, context + each) == number
        self.cache.seq_lens.fill_(context)

    def batch(self, requests: int, context: int, each: int) -> Any:
        """Return the next tokens of all requests."""
        return step_batch([each] * requests, [context + each] * requests, self.ranks.device)

    def row_bytes(self, context: int) -> float:
        """Return the cache bytes that a decode of one request reads on this rank: the window, the
        indexer's keys and the selected rows of C4 layers, and all rows of C128 layers."""
        config, row = self.model.config, MainLayout.data_bytes + MainLayout.scale_bytes
        key = IndexerLayout.data_bytes + IndexerLayout.scale_bytes
        window = min(config.sliding_window, context) * row
        compressed = {
            "window": 0,
            "c4": context // 4 * key + min(config.index_topk, context // 4) * row,
            "c128": context // 128 * row,
        }
        return float(sum(window + compressed[kind] / self.shares for kind in self.spec.kinds))

    def _capture(self, requests: int, context: int, each: int) -> None:
        """Compare a compiled step with the eager step, and capture the compiled step."""
        ranks, batch = self.ranks, self.batch(requests, context, each)
        capture = None
        if ranks.options.backend is not None:
            errors = []
            for _ in range(-(-_CHECKED_TOKENS // (requests * each))):
                batch.tokens.copy_(torch.randint_like(batch.tokens, 3, 250))
                dist.broadcast(batch.tokens, 0)
                self.cache.seq_lens.fill_(context)
                expected = self.eager(batch, self.cache.tensors)
                self.cache.seq_lens.fill_(context)
                found = self.step(batch, self.cache.tensors)
                errors.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
            error = float(torch.cat(errors).float().quantile(0.25))
            ranks.say(f"decode of {requests} x {each}: compiled and eager differ by {error:.4f}")
            if not error < _MOST_ERROR:
                raise WrongResult(f"a compiled decode of {requests} x {each} is off by {error:.3f}")
        if ranks.cuda:
            self.cache.seq_lens.fill_(context)
            capture = Capture([lambda: self.step(batch, self.cache.tensors)])
        self.graphs[requests, each] = batch, capture

    def _profile(self, row: FlashRow, capture: Capture) -> None:
        """Profile the second of two replays, because ranks begin the first at different times."""

        def twice() -> None:
            capture.graph.replay()
            capture.graph.replay()

        activities = device_activities(twice)
        activities = activities[len(activities) // 2 :]
        busy = sum(activity.us for activity in activities)
        is_sent = [any(name in each.name.lower() for name in _COLLECTIVES) for each in activities]
        sent = sum(each.us for each, sends in zip(activities, is_sent, strict=True) if sends)
        row.kernels = len(activities) / self.ranks.layers
        row.collectives_pct = 100 * sent / max(busy, 1e-9)

    def _blocks(self, requests: int, context: int) -> int:
        tokens: int = self.spec.block_tokens
        return requests * -(-(context + _DRAFTED) // tokens)

    def _most_blocks(self, v4: Any) -> float:
        """Return how many blocks fit into free memory."""
        if not self.ranks.cuda:
            return float("inf")
        # a block's bytes do not depend on ranks, which a cache on the meta device cannot query
        made = functools.partial(v4.PagedCache, self.model.config, device="meta", **self.sizes)
        one, two = (sum(made(num_blocks=count).memory().values()) for count in (1, 2))
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        left = torch.tensor([free], device=self.ranks.device)
        dist.all_reduce(left, dist.ReduceOp.MIN)  # all ranks make caches of one size
        return float((float(left) - _RESERVED_GB * 1e9 - (2 * one - two)) // (two - one))


def _own(parameter: Any) -> Any:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _checked(model: Any) -> tuple[Tensor, Any]:
    """Return logits of prefills and decodes beyond a window, and the cache."""
    from dsv4_ops.integrations import transformers as v4

    requests, length, steps = (4, 300, 4) if model.device.type == "cuda" else (2, 140, 2)
    cache = v4.PagedCache.for_model(
        model, max_batch_size=requests, max_cache_len=length + steps, max_chunk=length
    )
    rows = [cache.add(number, length + steps) for number in range(requests)]
    batch = step_batch([length] * requests, [length] * requests, cache.device, rows)
    logits = [v4.prefill_step(model, batch, cache)]
    for number in range(1, steps + 1):
        batch = step_batch([1] * requests, [length + number] * requests, cache.device, rows)
        logits.append(v4.decode_step(model, batch, cache))
    _raise_if_dropped(cache)
    return torch.cat(logits).float(), cache


def _raise_if_dropped(cache: Any) -> None:
    if int(cache.tensors.dropped):
        raise WrongResult(f"the cache dropped {int(cache.tensors.dropped)} tokens")
