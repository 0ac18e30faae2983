"""Compile the steps of a patched model to AOTInductor packages."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.steps.step import (
    check_cache,
    check_is_batch,
    check_model,
    check_paged,
    decode_step,
    prefill_step,
    spec_of,
)
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

_log = logging.getLogger(__name__)

_BATCH = ("tokens", "query_start_loc", "seq_lens", "rows")
_COUNTERS = ("dropped", "seq_lens", "written")


class DecodeModule(nn.Module):
    """A module that runs ``decode_step`` on a flat list of tensors, for ``torch.export``.

    Args:
        model: A patched model.
        cache: A cache with the sizes of the package. The RoPE tables of the cache become part of
            the module.
        state_rings: See ``decode_step``.
    """

    def __init__(self, model: Any, cache: PagedCache, *, state_rings: bool = True) -> None:
        super().__init__()
        self.model, self.state_rings = model, state_rings
        tensors = cache.tensors
        for name, table in vars(tensors.rope).items():
            self.register_buffer(f"{name}_rope", table, persistent=False)
        self._rope, self._rope_names = type(tensors.rope), tuple(vars(tensors.rope))
        self._tables, self._num_tables = type(tensors.tables), len(_table_names(cache))
        self._made_for = tensors.made_for
        self._layers = tuple((type(layer), _cache_names(layer)) for layer in tensors.layers)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Run the step on the tensors of ``decode_inputs``; return logits."""
        start = len(_BATCH) + self._num_tables
        batch, tables = StepBatch(*tensors[:4]), self._tables(*tensors[4:start])
        dropped, seq_lens, written = tensors[start : start + len(_COUNTERS)]
        caches = iter(tensors[start + len(_COUNTERS) :])
        layers = tuple(
            kind(**{name: next(caches) for name in names}) for kind, names in self._layers
        )
        rope = self._rope(**{name: getattr(self, f"{name}_rope") for name in self._rope_names})
        cache = CacheTensors(tables, rope, layers, dropped, seq_lens, written, self._made_for)
        return self.step(batch, cache)

    def step(self, batch: StepBatch, cache: CacheTensors) -> Tensor:
        """Run the step of this module."""
        return decode_step(self.model, batch, cache, state_rings=self.state_rings)


class PrefillModule(DecodeModule):
    """A module that runs ``prefill_step`` on a flat list of tensors."""

    def __init__(self, model: Any, cache: PagedCache, *, has_context: bool = True) -> None:
        super().__init__(model, cache)
        self.has_context = has_context

    def step(self, batch: StepBatch, cache: CacheTensors) -> Tensor:
        """Run the step of this module."""
        return prefill_step(self.model, batch, cache, has_context=self.has_context)


def decode_inputs(batch: StepBatch, cache: PagedCache) -> tuple[Tensor, ...]:
    """Return the inputs of a package that ``export_decode`` or ``export_prefill`` made.

    The inputs are the batch, the block tables, the tensors ``dropped``, ``seq_lens`` and
    ``written`` of the cache, and the caches of every layer, in the order of ``input_names``.

    Args:
        batch: The step, with exactly as many requests as the package has (``num_reqs``), some of
            which may be padding. A package reads past the end of smaller tensors, unless the
            environment variable AOTI_RUNTIME_CHECK_INPUTS=1 lets torch check sizes.
        cache: A cache with the sizes of the package. The package writes to this cache.

    Raises:
        TypeError: ``batch`` is not a ``StepBatch``, or ``cache`` is not a ``PagedCache``.
    """
    check_is_batch("decode_inputs", batch)
    check_paged("decode_inputs", cache)
    tables = vars(cache.tensors.tables).values()
    caches = [
        getattr(layer, name) for layer in cache.tensors.layers for name in _cache_names(layer)
    ]
    counters = (getattr(cache.tensors, name) for name in _COUNTERS)
    return (*(getattr(batch, name) for name in _BATCH), *tables, *counters, *caches)


def input_names(cache: PagedCache) -> tuple[str, ...]:
    """Return the names of a package's inputs: "tokens", "tables.swa", "layers.1.indexer", ..."""
    check_paged("input_names", cache)
    layers = enumerate(cache.tensors.layers)
    caches = [f"layers.{index}.{name}" for index, layer in layers for name in _cache_names(layer)]
    tables = [f"tables.{name}" for name in _table_names(cache)]
    counters = ("dropped", *(f"cache.{name}" for name in _COUNTERS[1:]))
    return (*_BATCH, *tables, *counters, *caches)


def _table_names(cache: PagedCache) -> tuple[str, ...]:
    return tuple(vars(cache.tensors.tables))


def _cache_names(layer: Any) -> tuple[str, ...]:
    return tuple(name for name, tensor in vars(layer).items() if tensor is not None)


@torch.no_grad()
def export_decode(
    model: Any,
    cache: PagedCache,
    *,
    path: str | os.PathLike[str],
    num_reqs: int | None = None,
    tokens_per_request: int = 1,
) -> Path:
    """Compile ``decode_step`` into an AOTInductor package that runs without Python.

    The compilation takes minutes for a large model. The phases of the compilation are logged at
    level INFO, or printed in a terminal.

    Args:
        model: A patched model. Its weights become part of the package.
        cache: A cache with the sizes of the package: rows, blocks, longest request.
        path: Path of the package, ending in ".pt2".
        num_reqs: Requests per step, including padding requests; ``max_batch_size`` by default.
        tokens_per_request: Maximum tokens of a request in a step: 1 + speculative tokens. Every
            step has num_reqs * tokens_per_request tokens, with padding at the end. A package for 1
            token does not check this maximum: a request with more tokens may read overwritten
            states.

    Returns:
        The path. The package takes the tensors of ``decode_inputs``, writes the caches and returns
        the logits. The package adds the number of tokens that it cannot store to its input
        "dropped"; read this input at the end or from time to time. The metadata has the dtype and
        the size of each input, ``max_cache_len``, the size of the vocabulary, and the ring length
        of each block table that shares no pool (entry [row, block] is row * ring + block % ring).
        The metadata also has ``CacheTensors.made_for``, which the package does not check.

    Raises:
        ValueError, TypeError: the model is not patched, the cache is for another model or ``kv``, a
            size is out of range, or the path does not end in ".pt2".
        NotImplementedError: the experts need Python, as Hugging Face's "grouped_mm" does in float32
            and on a CPU, or Hugging Face split the model over ranks. Nothing is compiled.
    """
    op = "export_decode"
    Checks(op).at_least(1, tokens_per_request=tokens_per_request)
    count, target = _checked(op, model, cache, path, num_reqs)
    inputs = decode_inputs(padding_batch(cache, count, count * tokens_per_request), cache)
    module = DecodeModule(model, cache, state_rings=tokens_per_request > 1)
    _report(op, "tracing the step")
    program = torch.export.export(module, inputs, strict=False)
    return _package(op, program, target, _metadata(model, cache, inputs))


@torch.no_grad()
def export_prefill(
    model: Any,
    cache: PagedCache,
    *,
    path: str | os.PathLike[str],
    num_reqs: int | None = None,
    max_tokens: int | None = None,
    has_context: bool = True,
) -> Path:
    """Compile ``prefill_step`` into an AOTInductor package for any number of tokens.

    A step may mix whole prompts, chunks and decodes. Together with a package of ``export_decode``
    for a cache of the same sizes, this package serves requests without Python. Both packages use
    the same caches and block tables, but each has its own copy of the weights.

    Args:
        model: A patched model. Its weights become part of the package.
        cache: A cache with the sizes of the package: rows, blocks, longest request and chunk.
        path: Path of the package, ending in ".pt2".
        num_reqs: Requests per step, including padding requests; ``max_batch_size`` by default.
        max_tokens: Maximum tokens of a step, at least 2; num_reqs * ``max_chunk`` by default. The
            package does not check this maximum.
        has_context: See ``prefill_step``. With False, the package only runs the first chunks of
            prompts.

    Returns:
        The path. The package takes the tensors of ``decode_inputs``, with 1 to max_tokens tokens
        and at most ``max_chunk`` tokens per request. The package writes the caches and returns the
        logits of every request's last token, [num_reqs, vocab_size]. The metadata is like the
        metadata of ``export_decode``, but has "num_tokens" as the size of the input "tokens", and
        also max_tokens, has_context, and max_chunk (at most ``index_topk`` if the package needs
        short requests).

    Raises:
        ValueError, TypeError, NotImplementedError: see ``export_decode``.
    """
    op = "export_prefill"
    count, target = _checked(op, model, cache, path, num_reqs)
    most = max(count * cache.max_chunk, 2) if max_tokens is None else max_tokens
    Checks(op).at_least(2, max_tokens=most)
    Checks(op).flag("has_context", has_context)
    example = min(most, 2 * count + 1)  # torch.export specialises 0, 1 and equal sizes
    inputs = decode_inputs(padding_batch(cache, count, example), cache)
    _report(op, "tracing the step")
    program = torch.export.export(
        PrefillModule(model, cache, has_context=has_context),
        inputs,
        dynamic_shapes=prefill_shapes(inputs, most),
        strict=False,
    )
    chunk, first = cache.max_chunk, spec_of(op, model).most_first_tokens
    if not has_context and first is not None:
        chunk = min(chunk, first)
    more = {"max_tokens": most, "max_chunk": chunk, "has_context": has_context}
    metadata = _metadata(model, cache, inputs, {"tokens": "num_tokens"})
    more_text = {f"dsv4_ops.{name}": str(value) for name, value in more.items()}
    return _package(op, program, target, metadata | more_text)


def prefill_shapes(inputs: Sequence[Tensor], max_tokens: int) -> tuple[Any, ...]:
    """Return the ``dynamic_shapes`` of ``PrefillModule``: only the first input, the tokens, has a
    dynamic size."""
    num_tokens = torch.export.Dim("num_tokens", min=1, max=max_tokens)
    return (({0: num_tokens}, *(None for _ in inputs[1:])),)


def _checked(
    op: str, model: Any, cache: PagedCache, path: str | os.PathLike[str], num_reqs: int | None
) -> tuple[int, Path]:
    """Check the arguments; return the requests per step and the path."""
    spec, checks = spec_of(op, model), Checks(op)
    check_paged(op, cache)
    count = cache.max_batch_size if num_reqs is None else num_reqs
    target = checks.path("path", path)
    checks.at_least(1, num_reqs=count)
    if target.suffix != ".pt2":
        raise argument_error(op, "path", must='end in ".pt2"', got=repr(str(path)), do="Rename it")
    if not target.parent.is_dir():
        raise argument_error(
            op,
            "path",
            must="be in a folder that is there",
            got=repr(str(path)),
            do="Make the folder",
        )
    check_cache(op, spec, cache.tensors)
    check_model(op, model, cache.device)
    split = next((name for name, each in model.named_parameters() if hasattr(each, "to_local")), "")
    if split:
        raise argument_error(
            op,
            "model",
            must="be whole on every rank",
            got=f"{split!r} as Hugging Face split it",
            do="torch.export takes no DTensor: compile the step, or load the model without a plan",
            kind=NotImplementedError,
        )
    return count, target


def padding_batch(cache: PagedCache, count: int, num_tokens: int) -> StepBatch:
    """Return a batch that has only padding requests."""
    steps = torch.arange(count + 1, device=cache.device) * num_tokens // count
    return StepBatch(
        torch.zeros(num_tokens, dtype=torch.int64, device=cache.device),
        steps.to(torch.int32),
        torch.zeros(count, dtype=torch.int32, device=cache.device),
        torch.full((count,), -1, dtype=torch.int32, device=cache.device),
    )


def _package(
    op: str, program: torch.export.ExportedProgram, target: Path, metadata: dict[str, str]
) -> Path:
    _check_exportable(op, program)
    from dsv4_ops.lowering._compat import aoti_compile_and_package

    _report(op, "compiling kernels and C++, which takes minutes for a large model")
    settings = {"aot_inductor.metadata": metadata}
    package = aoti_compile_and_package(program, package_path=str(target), inductor_configs=settings)
    _report(op, f"wrote {package}")
    return Path(package)


def _report(op: str, phase: str) -> None:
    """Log a phase at level INFO; if this level is off and stderr is a terminal, print the phase."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s: %s", op, phase)
    elif sys.stderr.isatty():
        print(f"{op}: {phase}", file=sys.stderr, flush=True)


def _check_exportable(op: str, program: torch.export.ExportedProgram) -> None:
    """Refuse transformers' ops that are implemented in Python."""
    advice = 'Call model.set_experts_implementation("batched_mm"), or use bfloat16 on a GPU'
    for node in program.graph.nodes:
        if str(node.target).startswith("transformers."):
            raise argument_error(
                op,
                "model",
                must="be made of ops that exist without Python",
                got=f"the op {node.target}",
                do=advice,
                kind=NotImplementedError,
            )


def _metadata(
    model: Any,
    cache: PagedCache,
    inputs: Sequence[Tensor],
    sizes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the metadata that a caller needs to allocate the inputs of a package.

    ``sizes`` maps an input of dynamic size to the name of this size.
    """
    tables, rings = vars(cache.tensors.tables), dict(cache.rings)
    if cache.owns_blocks:
        pool = next(name for name, table in tables.items() if table is cache.tensors.tables.pool)
        rings[pool] = cache.blocks_per_row
    inputs_text = [
        f"{name}:{str(tensor.dtype).removeprefix('torch.')}:"
        + sizes.get(name, "x".join(map(str, tensor.shape)))
        for name, tensor in zip(input_names(cache), inputs, strict=True)
    ]
    return {
        "dsv4_ops.inputs": ";".join(inputs_text),
        "dsv4_ops.rings": ";".join(f"{name}:{rings[name]}" for name in tables if name in rings),
        "dsv4_ops.max_cache_len": str(cache.max_cache_len),
        "dsv4_ops.made_for": cache.tensors.made_for,
        "dsv4_ops.vocab_size": str(model.config.vocab_size),
    }
