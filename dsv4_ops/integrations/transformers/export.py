"""The decode step of a patched model as an AOTInductor package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.attention import LayerCaches
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.refusal import refusal
from dsv4_ops.integrations.transformers.cache import PagedCache
from dsv4_ops.integrations.transformers.steps import check_cache, decode_step, spec_of
from dsv4_ops.integrations.transformers.tensors import (
    CacheTensors,
    PageTables,
    RopeTables,
    StepBatch,
)

_BATCH = ("tokens", "query_start_loc", "seq_lens", "rows")
_TABLES = ("swa", "compressed", "c4_states", "c128_states")


class DecodeModule(nn.Module):
    """``decode_step`` over a flat list of tensors, which is what a package takes.

    Args:
        model: A patched model.
        cache: The cache whose sizes the step is for; it is not held, but for its RoPE tables.
        state_rings: As for ``decode_step``.
    """

    window_rope: Tensor
    compressed_rope: Tensor

    def __init__(self, model: Any, cache: PagedCache, *, state_rings: bool = True) -> None:
        super().__init__()
        self.model, self.state_rings = model, state_rings
        tensors = cache.tensors
        self.register_buffer("window_rope", tensors.rope.window, persistent=False)
        self.register_buffer("compressed_rope", tensors.rope.compressed, persistent=False)
        self._names = tuple(_cache_names(layer) for layer in tensors.layers)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Logits, [num_tokens, vocab_size]; the tensors are those of ``decode_inputs``."""
        batch, tables, caches = tensors[:4], tensors[4:8], iter(tensors[8:])
        layers = tuple(
            LayerCaches(**{name: next(caches) for name in names}) for names in self._names
        )
        rope = RopeTables(self.window_rope, self.compressed_rope)
        cache = CacheTensors(PageTables(*tables), rope, layers)
        rings = self.state_rings
        return decode_step(self.model, StepBatch(*batch), cache, state_rings=rings)


def decode_inputs(batch: StepBatch, cache: PagedCache) -> tuple[Tensor, ...]:
    """What a package of ``export_decode`` takes: the batch, the page tables, the caches of every
    layer, in the order that ``input_names`` names them.

    Args:
        batch: The step.
        cache: A cache of the sizes that the package was made for; it is written.
    """
    tables = [getattr(cache.tensors.tables, name) for name in _TABLES]
    caches = [
        getattr(layer, name) for layer in cache.tensors.layers for name in _cache_names(layer)
    ]
    return (*(getattr(batch, name) for name in _BATCH), *tables, *caches)


def input_names(cache: PagedCache) -> tuple[str, ...]:
    """Names of the inputs of a package, such as "tokens", "tables.swa", "layers.1.indexer"."""
    layers = enumerate(cache.tensors.layers)
    caches = [f"layers.{index}.{name}" for index, layer in layers for name in _cache_names(layer)]
    return (*_BATCH, *(f"tables.{name}" for name in _TABLES), *caches)


def _cache_names(layer: LayerCaches) -> tuple[str, ...]:
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
    """Compile ``decode_step`` into an AOTInductor package: no Python, nor this package, is needed
    where it runs.

    Args:
        model: A patched model. Its weights become part of the package.
        cache: A cache of the sizes that the package is for: rows, pages, longest request.
        path: Where the package goes; ends in ".pt2".
        num_reqs: Requests of a step, padding requests included; ``max_batch`` of the cache by
            default.
        tokens_per_request: Most tokens of a request in a step: 1 + speculative tokens. A step has
            num_reqs * tokens_per_request tokens, padding tokens last. A package of 1 relies on it:
            of a request with more tokens it may read states that the step has overwritten.

    Returns:
        The path. The package takes the tensors of ``decode_inputs`` and returns the logits; it
        writes the caches in place. Its metadata names its inputs, their dtypes and sizes, and the
        rings of the page tables (entry [row, block] is row * ring + block % ring; pages of a pool
        are no ring).

    Raises:
        ValueError, TypeError: a model that is not patched, a cache of another model or ``kv``,
            sizes out of range, a path of another ending.
        NotImplementedError: experts that need Python, as Hugging Face's "grouped_mm" does in
            float32 and on a CPU. Nothing is compiled then.
    """
    checks = Checks("export_decode")
    count = cache.max_batch if num_reqs is None else num_reqs
    checks.at_least(1, num_reqs=count, tokens_per_request=tokens_per_request)
    target = Path(path)
    if target.suffix != ".pt2":
        rule = 'end in ".pt2"'
        raise refusal(ValueError, "export_decode", "path", rule, repr(str(path)), "Rename it")
    spec = spec_of("export_decode", model)
    check_cache("export_decode", spec, cache.tensors)
    device = cache.device
    total = count * tokens_per_request
    steps = torch.arange(count + 1, dtype=torch.int32, device=device) * tokens_per_request
    batch = StepBatch(
        torch.zeros(total, dtype=torch.int64, device=device),
        steps,
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.full((count,), -1, dtype=torch.int32, device=device),
    )
    inputs = decode_inputs(batch, cache)
    module = DecodeModule(model, cache, state_rings=tokens_per_request > 1)
    program = torch.export.export(module, inputs, strict=False)
    _check_exportable(program)
    from dsv4_ops.lowering._compat import aoti_compile_and_package

    settings = {"aot_inductor.metadata": _metadata(model, cache, inputs)}
    made = aoti_compile_and_package(program, package_path=str(target), inductor_configs=settings)
    return Path(made)


def _check_exportable(program: torch.export.ExportedProgram) -> None:
    """Every op of the program exists where a package runs: transformers has one in Python."""
    for node in program.graph.nodes:
        if str(node.target).startswith("transformers."):
            raise refusal(
                NotImplementedError,
                "export_decode",
                "model",
                "be made of ops that exist without Python",
                f"the op {node.target}",
                'Call model.set_experts_implementation("batched_mm"), or use bfloat16 on a GPU',
            )


def _metadata(model: Any, cache: PagedCache, inputs: Sequence[Tensor]) -> dict[str, str]:
    """What a program needs to make the inputs of a package."""
    rings = dict(cache.rings)
    if cache.owns_pages:
        rings["compressed"] = cache.blocks_per_row
    described = [
        f"{name}:{str(tensor.dtype).removeprefix('torch.')}:{'x'.join(map(str, tensor.shape))}"
        for name, tensor in zip(input_names(cache), inputs, strict=True)
    ]
    return {
        "dsv4_ops.inputs": ";".join(described),
        "dsv4_ops.rings": ";".join(f"{name}:{rings[name]}" for name in _TABLES if name in rings),
        "dsv4_ops.max_len": str(cache.max_len),
        "dsv4_ops.vocab_size": str(model.config.vocab_size),
    }
