"""Caches and CUDA graphs that ``generate`` keeps on a model for its next calls.

A graph holds the addresses of a cache, so a model keeps a cache together with its graphs. A call
takes a kept cache for itself, so concurrent calls use different caches. A call gives its cache back
at the end, except after an error. ``generate`` never returns a kept cache to its caller.

Ranks that share the rows of a cache make the same calls. Before a call, the ranks compare their
kept caches. After a capture, the ranks compare whether all have a graph. Otherwise they could hang.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.attention import ContextParallel
from dsv4_ops.integrations.transformers.architectures.base import draft_of
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.steps.compiled import CompiledStep
from dsv4_ops.integrations.transformers.steps.dry_runs import padding
from dsv4_ops.integrations.transformers.steps.eager import EagerStep
from dsv4_ops.integrations.transformers.steps.step import prefill_step, spec_of
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

DEVICES = ("cuda",)
"""Types of device on which calls keep caches: those with CUDA graphs."""

WARM_CALLS = 2
"""Number of calls of a step before a CUDA graph captures it."""

MOST_CACHES = 2
MOST_GRAPHS = 12
"""Maximum number of graphs of a cache. Each graph has its own maximum number of texts and, for a
prefill, of tokens."""
LEAST_TOKENS, MOST_TOKENS = 64, 2048
"""Minimum and maximum tokens of a captured prefill. In longer prefills, the host is faster than the
GPU."""
LEAST_CHUNK = 256
"""Minimum ``max_chunk`` of kept caches, so that short prompts share a cache."""

MOST_OF_MEMORY = 1 / 16
"""Fraction of the device's memory that kept caches may take."""

STEPS = "dsv4_ops_decode_steps"
"""Attribute of a patched model that holds its ``CompiledSteps``."""


def empty_cache(model: Any) -> None:
    """Free the caches and CUDA graphs that ``generate`` keeps on a patched model.

    The next call of ``generate`` makes new caches and graphs. The memory goes back to torch's
    allocator; ``torch.cuda.empty_cache`` then frees this memory for other processes. ``unpatch``
    also calls this function.

    Raises:
        ValueError: the model is not patched.

    Example:
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations import transformers as v4
        >>> v4.empty_cache(v4.patch(small_model(), kv="fp32", precision="reference"))
    """
    spec_of("empty_cache", model)
    kept: KeptCaches = getattr(model, STEPS).kept
    kept.clear()


class NoGraph(RuntimeError):
    """No rank has a graph of a step, and the step did not run."""


class KeptStep:
    """A step of up to ``rows`` texts that uses a kept cache and has input tensors of its own.

    After ``WARM_CALLS`` calls, a CUDA graph captures the step. Later calls of ``generate`` replay
    the graph if neither the model nor the addresses of its weights have changed. Launch grids
    depend on sizes alone, so one graph serves all context lengths.

    Args:
        step: The step.
        cache: The cache.
        rows: Maximum number of texts; the other requests of the step are padding.
        tokens: Maximum tokens of a prefill batch; None for a decode.
        has_context: See ``prefill_step``; read for a prefill.
        pool: Memory pool of the graph.
        any_rows: Whether a batch may use any rows of the cache. Otherwise, request r uses row r.
        ranks: The ranks that share the cache, all of which run the step.
    """

    def __init__(
        self,
        step: CompiledStep | EagerStep,
        cache: CacheTensors,
        rows: int,
        tokens: int | None,
        has_context: bool,
        pool: Any,
        any_rows: bool = False,
        ranks: ContextParallel | None = None,
    ) -> None:
        # Python frees attributes in order, and a graph must be freed before its pool
        self._replay: Callable[[], None] | None = None
        self._step, self._cache, self._pool = step, cache, pool
        starts = torch.arange(rows + 1, dtype=torch.int32, device=cache.device)
        batch = padding(tokens or rows, rows, cache.device)
        self._batch = replace(batch, rows=starts[:-1].clone())
        self._any_rows, self._ranks = any_rows, ranks
        self._inputs: tuple[str, ...] = ("tokens", "seq_lens", *(("rows",) if any_rows else ()))
        self._options: dict[str, bool] = {}
        if tokens is None:
            self._batch = replace(self._batch, query_start_loc=starts)
            self._options = {"state_rings": False}
        else:  # a prefill may have fewer tokens; tokens after the last text are padding
            self._inputs += ("query_start_loc",)
            self._options = {"has_context": has_context}
        self._form: Any = None
        self._logits: Tensor | None = None
        self._calls, self._begins = 0, True

    def begin(self) -> None:
        """Prepare for a call of ``generate``, or for the requests of another session."""
        self._batch.seq_lens.zero_()  # the cache no longer has the texts of the previous call
        self._begins = True

    def __call__(self, batch: StepBatch, _: CacheTensors) -> Tensor:
        """Run the step; return the logits of each request, which the next call overwrites."""
        for name in self._inputs:
            new = getattr(batch, name)
            getattr(self._batch, name)[: len(new)].copy_(new)
        num_reqs = len(batch.seq_lens)
        if num_reqs < len(self._batch.seq_lens):  # the other requests become padding
            self._batch.seq_lens[num_reqs:] = 0
            if "query_start_loc" in self._inputs:
                ends = batch.query_start_loc
                self._batch.query_start_loc[len(ends) :] = ends[-1:]
        # compare here, not in ``begin``: Hugging Face changes the configuration while it decodes
        begins, self._begins = self._begins and self._calls > 0, False
        if begins and self._has_changed():
            self._replay, self._calls = None, 0
        if self._replay is None and self._calls == WARM_CALLS:
            self._form = self._found()
            self._capture()
        if self._replay is None:
            self._calls += 1
            self._run()
            if self._calls == 1:  # so that ``_has_changed`` sees changes before a capture
                self._form = self._found()
        else:
            self._replay()
        assert self._logits is not None
        return self._logits[:num_reqs]

    def _has_changed(self) -> bool:
        """Whether the model has changed, on any rank, since the step ran."""
        changed = self._form is None or self._form != self._found()
        return self._on_any_rank(changed)

    def _on_any_rank(self, condition: bool) -> bool:
        ranks, device = self._ranks, self._cache.device
        if ranks is not None and ranks.differing(device, condition=condition):
            return True
        return condition

    def _capture(self) -> None:
        """Capture the step. If a rank cannot, no rank has a graph: a decode of ``generate`` runs
        without a graph from now on, and other steps raise ``NoGraph``. Without other ranks,
        ``generate`` raises the error of the capture."""
        found: Exception | None = None
        try:
            self._replay = captured(self._run, self._pool)
        except Exception as error:
            if self._ranks is None and not self._any_rows:
                raise
            found = error.with_traceback(None)  # its frames would hold the memory of the capture
        if not self._on_any_rank(found is not None):
            return
        self._replay = None
        if self._any_rows or "query_start_loc" in self._inputs:
            raise NoGraph(f"{type(found).__name__}: {found}" if found else "another rank failed")

    def _run(self) -> None:
        self._logits = self._step(self._batch, self._cache, **self._options)

    def _found(self) -> Any:
        return self._step.form(self._batch, self._cache, **self._options)


class KeptSteps:
    """The steps that use a cache, and two memory pools: one that the graphs of all decodes share,
    and one for prefills. Graphs can share a pool, because only one graph runs at a time.

    Args:
        cache: The cache.
        most: Maximum number of steps. One step more drops the least recently used step.
        any_rows: See ``KeptStep``.
    """

    def __init__(self, cache: PagedCache, most: int, any_rows: bool = False) -> None:
        self.cache, self.most, self.any_rows = cache, most, any_rows
        self.pools: dict[bool, Any] = {}
        self._steps: dict[Any, KeptStep] = {}

    def of(
        self,
        step: CompiledStep | EagerStep,
        rows: int,
        tokens: int | None,
        has_context: bool = True,
    ) -> KeptStep:
        """Return the step of these sizes. For ``tokens`` and ``has_context``, see ``KeptStep``."""
        key = step, rows, tokens, has_context
        found = self._steps.pop(key, None)
        if found is None:
            decodes = tokens is None
            if decodes not in self.pools:
                self.pools[decodes] = pool_of(self.cache.device)
            pool, ranks = self.pools[decodes], self.cache.spec.parallel
            sizes = self.cache.tensors, rows, tokens, has_context
            found = KeptStep(step, *sizes, pool, self.any_rows, ranks)
        self._steps[key] = found
        if len(self._steps) > self.most:
            del self._steps[next(iter(self._steps))]
        return found

    def begin(self) -> None:
        """Prepare all steps for other requests."""
        for each in self._steps.values():
            each.begin()

    def drop_prefills(self) -> None:
        """Free the graphs of prefills and their pool."""
        self._steps = {key: each for key, each in self._steps.items() if key[2] is None}
        self.pools.pop(False, None)

    def clear(self) -> None:
        """Free all graphs and pools."""
        self._steps.clear()
        self.pools.clear()


@dataclass
class KeptCache:
    """A cache, and the steps that read and write this cache.

    Attributes:
        cache: The cache, whose rows own their blocks.
        made_for: The properties of the model on which the cache depends.
        epoch: Number of calls of ``KeptCaches.clear`` before the cache was made.
        number: Serial number of the cache, the same on all ranks.
        chunk: Maximum tokens of each prompt in a prefill step of the current call.
        prefill: The step that runs prompts; None if the graphs of prefills do not fit into memory.
    """

    cache: PagedCache
    made_for: Any
    epoch: int
    prefill: EagerStep | None
    number: int = 0
    chunk: int = field(init=False)
    steps: KeptSteps = field(init=False)

    def __post_init__(self) -> None:
        self.chunk = self.cache.max_chunk
        self.steps = KeptSteps(self.cache, MOST_GRAPHS)

    def step(
        self,
        step: CompiledStep | EagerStep,
        rows: int,
        tokens: int | None = None,
        has_context: bool = True,
    ) -> KeptStep:
        """Return a step of at least ``rows`` texts for a new call of ``generate``. For ``tokens``
        and ``has_context``, see ``KeptStep``."""
        rows = min(rounded(rows, 1), self.cache.max_batch_size)
        found = self.steps.of(step, rows, tokens, has_context)
        found.begin()
        return found

    def drop_prefills(self) -> None:
        """Free the graphs of prefills and their pool, and empty the cache."""
        self.steps.drop_prefills()
        self.prefill = None
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        self.cache.reset()
        self.cache.tensors.dropped.zero_()

    def covers(self, sizes: tuple[int, int, int]) -> bool:
        """Whether rows, positions and ``max_chunk`` are at least these sizes."""
        return all(mine >= other for mine, other in zip(self.sizes, sizes, strict=True))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, positions of a row, and ``max_chunk``."""
        return self.cache.max_batch_size, self.cache.max_cache_len, self.cache.max_chunk

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return _nbytes(self.cache)


class KeptCaches:
    """The kept caches of a model, most recently used first."""

    def __init__(self) -> None:
        self._caches: list[KeptCache] = []
        self._lock = threading.Lock()
        self._epoch, self._made = 0, 0

    def take(self, model: Any, rows: int, length: int, chunk: int) -> KeptCache:
        """Return an empty kept cache of at least these sizes, or a new cache."""
        sizes, made_for = (rows, length, chunk), _made_for(model)
        with self._lock:
            self._caches = [each for each in self._caches if each.made_for == made_for]
            fit = [each for each in self._caches if each.covers(sizes)]
            found = min(fit, key=lambda each: each.nbytes, default=None)
            if found is not None:
                self._caches.remove(found)
        del fit  # a new cache may need the memory
        if self._differs(model, found, sizes):
            found = None
        if found is not None:
            found.reset()
        else:
            with self._lock:
                self._made += 1
            cache, prefill = self._new(model, sizes), EagerStep(model, prefill_step)
            found = KeptCache(cache, made_for, self._epoch, prefill, self._made)
        found.chunk = chunk
        return found

    def _differs(self, model: Any, found: KeptCache | None, sizes: tuple[int, int, int]) -> bool:
        """Whether ranks have found different caches. Raise if their calls need different sizes."""
        ranks = spec_of("generate", model).parallel
        if ranks is None:
            return False
        asked = dict(zip(("batch size", "max_cache_len", "max_chunk"), sizes, strict=True))
        number = None if found is None else found.number
        differing = ranks.differing(model.device, number=number, **asked)
        if not asked.keys().isdisjoint(differing):
            ranks.agree("generate", "call", model.device, **asked)
        return bool(differing)

    def _new(self, model: Any, sizes: tuple[int, int, int]) -> PagedCache:
        """Make a cache that also fits slightly larger calls. Make a cache of exactly these sizes if
        the larger cache could not be kept, or if memory is short on any rank; if memory is short,
        also free the kept caches."""
        rows, length, chunk = sizes
        ranks = spec_of("generate", model).parallel
        longest = rounded(length, spec_of("generate", model).block_tokens)
        error = torch.OutOfMemoryError("another rank is out of memory")
        larger = rounded(rows, 1), longest, max(chunk, min(LEAST_CHUNK, longest))
        for tried in dict.fromkeys((larger, sizes)):
            cache: PagedCache | None = None
            try:
                cache = _cache(model, *tried)
            except torch.OutOfMemoryError as found:
                error = found.with_traceback(None)  # its frames would hold memory
            failed, wasteful = cache is None, False
            if cache is not None and tried != sizes:
                wasteful = _nbytes(cache) > most_bytes(cache.device)
            if ranks is not None:
                differing = ranks.differing(model.device, failed=failed, wasteful=wasteful)
                failed, wasteful = failed or "failed" in differing, wasteful or bool(differing)
            if cache is not None and not failed and not wasteful:
                return cache
            del cache
            if failed:
                self.clear()
        raise error

    def give_back(self, cache: KeptCache) -> None:
        """Keep a cache that a call took. Drop the caches that this cache can replace, and the
        least recently used caches beyond the limits."""
        with self._lock:
            if cache.epoch != self._epoch:
                return
            others = [each for each in self._caches if not cache.covers(each.sizes)]
            left, self._caches = most_bytes(cache.cache.device), []
            for each in (cache, *others):
                if each.nbytes <= left and len(self._caches) < MOST_CACHES:
                    self._caches.append(each)
                    left -= each.nbytes

    def clear(self) -> None:
        """Free all caches. A cache that a call has taken is freed at the end of the call."""
        with self._lock:
            self._caches.clear()
            self._epoch += 1


def _made_for(model: Any) -> Any:
    spec, has_draft = spec_of("generate", model), draft_of(model) is not None
    return spec.fingerprint, spec.kv, model.device, has_draft, torch.is_inference_mode_enabled()


def _cache(model: Any, rows: int, length: int, chunk: int) -> PagedCache:
    return PagedCache.for_model(model, max_batch_size=rows, max_cache_len=length, max_chunk=chunk)


def _nbytes(cache: PagedCache) -> int:
    return sum(cache.memory().values())


def rounded(length: int, least: int) -> int:
    """Round a size up, so that slightly larger calls use the same cache or graph. The increase is
    below ``least`` or below a quarter of the size, whichever is larger. With ``least`` 1, sizes up
    to 8 stay the same."""
    step = max(least, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def keeps_on(device: torch.device) -> bool:
    """Whether calls on a device keep caches."""
    return device.type in DEVICES


def most_bytes(device: torch.device) -> float:
    """Return the number of bytes that kept caches may take."""
    return MOST_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory


def pool_of(device: torch.device) -> Any:
    """Return a memory pool that outlives its CUDA graphs: torch raises for the handle of a pool
    whose last graph is gone."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def captured(run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Capture a function in a CUDA graph, and return the function that replays the graph on the
    same tensors. During the capture, other threads may use the GPU, but may not capture or
    synchronise; the graph does not contain their work."""
    graph, handle = torch.cuda.CUDAGraph(), None if pool is None else pool.id
    stream = _capture_stream(torch.cuda.current_device())
    settings: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
    with _capturing, torch.cuda.graph(graph, pool=handle, **settings):
        run()
    return graph.replay


_capturing = threading.Lock()
"""Held during a capture, because CUDA allows one per process."""


@functools.cache
def _capture_stream(device: int) -> Any:
    """Return the stream of a GPU's captures. Graphs of one stream share the memory of a pool."""
    return torch.cuda.Stream(device)
