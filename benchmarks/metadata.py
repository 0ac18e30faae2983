"""Benchmark decode metadata against its roofline, eager PyTorch and vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import vllm_metadata
from benchmarks.baselines.vllm_metadata import BaselineMismatch
from benchmarks.harness.batches import (
    Batch,
    draw_batch,
    input_bytes,
    mixed_lengths,
    output_bytes,
    rotating_sets,
)
from benchmarks.harness.measure import Checked, Function, OpBench
from benchmarks.harness.memory import Copies
from benchmarks.harness.timing import Capture, host_us
from benchmarks.harness.work import Args, Case, Work, same_bytes
from dsv4_ops.attention.metadata import (
    AttentionSpec,
    BlockTables,
    DecodeMetadata,
    build_decode_metadata,
)

_REQUESTS, _NEXT_N, _LONGEST = (1, 8, 32, 128, 512), (1, 2, 4), 131072
_CONTEXTS, _CONTEXT_REQUESTS = (1024, 16384, 131072, 1048576), 128
_MOST_TOKENS, _SMALL_MODEL = 1048576, 16384
"""Maximum tokens per request in the tables: for DeepSeek-V4-Flash, and in a smoke run."""


def _spec(small: bool) -> AttentionSpec:
    return AttentionSpec.deepseek_v4_flash(
        next_n=2 if small else 4, max_model_len=_SMALL_MODEL if small else _MOST_TOKENS
    )


def _cases(group: str, small: bool) -> list[Case]:
    """Make batches of mixed contexts, or of equal contexts."""
    spec, requests = _spec(small), _REQUESTS[:2] if small else _REQUESTS
    if group == "mixed":
        sizes = [n for n in _NEXT_N if n <= spec.next_n]
        return [_case(spec, count, next_n) for next_n in sizes for count in requests]
    contexts = [length for length in _CONTEXTS if length <= spec.max_model_len]
    count = _REQUESTS[1] if small else _CONTEXT_REQUESTS
    return [_case(spec, count, 1, length) for length in contexts]


CASES = {group: functools.partial(_cases, group) for group in ("mixed", "context")}


def _case(
    spec: AttentionSpec,
    requests: int,
    next_n: int,
    context: int | None = None,
    *,
    timed: bool = True,
) -> Case:
    shown = "mixed" if context is None else str(context)
    return Case(
        case="mixed" if context is None else "context", shape=f"{requests} x {next_n}, {shown}",
        build=functools.partial(metadata_work, spec, requests, next_n, context),
        rows=requests * next_n, requests=requests, timed=timed,
        labels={"next_n": next_n, "context": shown},
    )  # fmt: skip


@functools.cache
def builder(spec: AttentionSpec) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of the builder's six tensors that returns all fields."""
    names = tuple(DecodeMetadata.__dataclass_fields__)

    def build(*given: Tensor) -> tuple[Tensor, ...]:
        starts, lens, slots, *tables = given
        found = build_decode_metadata(spec, starts, lens, slots, BlockTables(*tables))
        return tuple([getattr(found, name) for name in names])

    return build


def metadata_work(
    spec: AttentionSpec, requests: int, next_n: int, context: int | None, device: torch.device
) -> Work:
    """Make batches of one size, with random or equal lengths."""

    def draw(seed: int) -> Batch:
        lengths = torch.full((requests,), context or 0, dtype=torch.int32)
        if context is None:
            generator = torch.Generator().manual_seed(seed)
            longest = min(_LONGEST, spec.max_model_len)
            lengths = mixed_lengths(requests, longest=longest, generator=generator)
        return draw_batch(spec, lengths, next_n=next_n, device=device, seed=seed)

    call, batches = builder(spec), [draw(1)]
    made = DecodeMetadata(*call(*batches[0].arguments()))
    moved = input_bytes(spec, batches[0]) + output_bytes(made)
    batches += [draw(seed) for seed in range(2, rotating_sets(moved, device) + 1)]
    return Work(
        call=call, sets=[batch.arguments() for batch in batches], moved_bytes=moved, eager=False,
        difference=differences, details=(spec, batches),
    )  # fmt: skip


def differences(args: Args, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Name the fields that differ from those of the reference."""
    names = DecodeMetadata.__dataclass_fields__
    pairs = zip(names, actual, expected, strict=True)
    found = {name: same_bytes(args, [left], [right]) for name, left, right in pairs}
    return "; ".join(f"{name}: {text}" for name, text in found.items() if text) or None


class Bench(OpBench):
    """Measure a step's metadata; every field must be exact."""

    groups, all_compare = CASES, True
    title = "Decode metadata of one step, microseconds; checked exactly before timing"
    notes = (
        "baseline_us: of kernels in the order of vLLM 0.22.1's builders, which for next_n = 4 also "
        "expand the indexer's block table, which ours does not need. Kernels count copies "
        "and fills.\n"
        "host_us: of the replay of a CUDA graph. Nothing empties the L2 before a replay.",
    )

    def __init__(self, device: torch.device, baseline: Path | None, *, budget_s: float) -> None:
        super().__init__(device, baseline, budget_s=budget_s)
        self.cold = None  # block tables stay in the L2 from one step to the next

    @classmethod
    def cases(cls, groups: Iterable[str], *, smoke: bool) -> list[Case]:
        # first a batch whose sizes all differ, because Dynamo would make equal sizes one symbol
        first = _case(_spec(smoke), 9 if smoke else 129, 2, timed=False)
        return [first, *super().cases(groups, smoke=smoke)]

    def load(self, folder: Path) -> Any:
        return vllm_metadata.load(folder)

    def loaded(self) -> Sequence[Any]:
        return [self.modules.comp]

    def _time_cuda(self, at: Checked, compiled: Function, copies: Copies) -> None:
        super()._time_cuda(at, compiled, copies)
        single = Capture([functools.partial(compiled, *at.work.sets[0])])
        at.row.host_us = host_us(single.graph.replay).median

    def time_baseline(self, at: Checked) -> None:
        row, work = at.row, at.work
        (spec, batches), expected = work.details, DecodeMetadata(*at.expected)
        try:
            found = vllm_metadata.measure(self.modules, spec, batches, expected)
        except BaselineMismatch:
            row.baseline_agrees = False
            raise
        row.baseline_agrees = True
        if found is not None:
            row.baseline_us, row.baseline_host_us = found.device_us.median, found.host_us.median
            row.baseline_activities = [list(each) for each in found.activities]


run = Bench.run
