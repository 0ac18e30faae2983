"""Cases of the compressor, in decode and prefill: it saves states and compresses full windows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dsv4_ops
from benchmarks.harness.batches import rotating_sets
from benchmarks.harness.draw import Draw
from benchmarks.harness.work import Args, Case, Work, differing_bytes
from dsv4_ops.core.layout import IndexerLayout, MainLayout, QuantizedLayout, StateLayout
from dsv4_ops.reference.compressor import compress_and_insert, save_compressor_states
from dsv4_ops.testing import case as testing
from dsv4_ops.testing.cases import compressor as testing_cases
from dsv4_ops.testing.contract.compare import assert_agrees

_EPS = 1e-6
_ROPE_DIM = 64
_CONTEXT = 4096  # position of the first window of a decode step: a multiple of the ratios
_STATES, _CACHE = 2, 9  # indices of the arguments that a call mutates
_EDGE_TOKENS = 24


@dataclass(frozen=True)
class Kind:
    """A compressor of DeepSeek-V4."""

    ratio: int
    overlap: bool
    state_block_size: int
    layout: QuantizedLayout

    @property
    def width(self) -> int:
        """Number of values per token of kv, and also of the score."""
        return self.layout.head_dim * (2 if self.overlap else 1)

    @property
    def window(self) -> int:
        """Tokens per window."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def states(self) -> StateLayout:
        return StateLayout(self.state_block_size, 2 * self.width)

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of ``save_and_compress``."""
        return {
            "compress_ratio": self.ratio, "overlap": self.overlap, "eps": _EPS,
            "state_block_size": self.state_block_size, "block_size": self.layout.block_size,
            "layout": self.layout.tag,
        }  # fmt: skip


KINDS = {
    "c4": Kind(4, True, 4, MainLayout(64)),
    "c4_indexer": Kind(4, True, 4, IndexerLayout(64)),
    "c128": Kind(128, False, 8, MainLayout(2)),
}


@functools.cache
def save_and_compress(kind: str) -> Callable[..., None]:
    """Return the call that a layer makes in every step, for one kind of compressor."""
    return functools.partial(dsv4_ops.save_and_compress, **KINDS[kind].settings)


def reference(kind: Kind, *args: Any) -> None:
    """Run the references of saving and of compressing. The second gets only tokens that complete a
    window, and reads other rows from the saved states, to save memory."""
    save_compressor_states(
        *args[:3], *args[4:6], compress_ratio=kind.ratio, block_size=kind.state_block_size
    )
    compress_and_insert(*_finishing(kind, args), **kind.settings)


def _finishing(kind: Kind, args: Args) -> Args:
    """Return the arguments of ``compress_and_insert`` for the tokens that complete a window."""
    kv_score, ape, states, table, _, positions, requests, *rest, slots = args
    tokens = ((positions + 1) % kind.ratio == 0).nonzero()[:, 0]
    where = (positions[tokens], requests[tokens])
    return (kv_score[tokens], ape, states, table, *where, *rest, slots[tokens])


def differences(
    kind: Kind, args: Args, actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> str | None:
    """Describe a difference: states must be equal, and rows within the float64 budget."""
    if not differing_bytes(actual, expected):
        return None
    if wrong := differing_bytes(actual[:1], expected[:1]):
        return f"{wrong} of {expected[0].nbytes} bytes of the states differ from the reference"
    saved = (*args[:_STATES], expected[0], *args[_STATES + 1 :])
    tensors = tuple(tensor.cpu() for tensor in _finishing(kind, saved))
    case = testing.Case("bench", tensors, kind.settings)
    pair = [[results[1].cpu()] for results in (actual, expected)]
    try:
        assert_agrees("compressor", testing_cases.compress_and_insert, case, *pair)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None


@dataclass(frozen=True)
class Step:
    """Position and request of each token. States contain all earlier tokens that a step needs."""

    positions: tuple[int, ...]
    req_indices: tuple[int, ...]

    @property
    def requests(self) -> int:
        return max(self.req_indices) + 1

    def finished(self, kind: Kind) -> int:
        return sum((position + 1) % kind.ratio == 0 for position in self.positions)


def decode_step(kind: Kind, requests: int, *, finishing: bool) -> Step:
    """Make a token per request; all tokens end a window if ``finishing``, else one in ``ratio``."""
    last = kind.ratio - 1
    offsets = [last if finishing else request % kind.ratio for request in range(requests)]
    return Step(tuple(_CONTEXT + offset for offset in offsets), tuple(range(requests)))


def prefill_step(tokens: int) -> Step:
    """Make one whole request."""
    return Step(tuple(range(tokens)), (0,) * tokens)


def compressor_cases(kind: str, decode: Sequence[int], prefill: Sequence[int]) -> list[Case]:
    """Make a case with absent tokens and slots, decode steps, and prefills."""
    spec = KINDS[kind]
    edges = functools.partial(_edge_work, kind)
    cases = [Case(kind, "absent slots and padding", edges, rows=_EDGE_TOKENS, timed=False)]
    for variant in ("spread", "finishing"):
        for requests in decode:
            step = decode_step(spec, requests, finishing=variant == "finishing")
            cases.append(_case(kind, f"decode, {requests}", step, variant))
    cases += [_case(kind, f"prefill, {tokens}", prefill_step(tokens)) for tokens in prefill]
    return cases


def _case(kind: str, shape: str, step: Step, variant: str = "") -> Case:
    build = functools.partial(step_work, kind, step)
    tokens = len(step.positions)
    return Case(kind, shape, build, rows=tokens, requests=step.requests, variant=variant)


def moved_bytes(kind: Kind, step: Step) -> int:
    """Return the bytes of projections, states, rows and indices that a step must move."""
    tokens, dim = len(step.positions), kind.layout.head_dim
    here = set(zip(step.req_indices, step.positions, strict=True))
    stored, finished = 0, step.finished(kind)
    for request, position in here:
        if (position + 1) % kind.ratio == 0:
            window = range(max(position - kind.window + 1, 0), position)
            stored += sum((request, place) not in here for place in window)
    projections = tokens * 2 * kind.width * 4
    rows = finished * (kind.layout.row_bytes + _ROPE_DIM * 4)
    pages = -(-stored // kind.state_block_size)
    return 2 * projections + stored * 2 * dim * 4 + rows + pages * 4 + tokens * (8 + 8 + 8 + 4)


def step_work(kind: str, step: Step, device: torch.device) -> Work:
    """Build a case; every input set has its own states and cache."""
    spec, draw = KINDS[kind], Draw(device, len(step.positions))
    moved = moved_bytes(spec, step)
    angles = draw.normal(max(step.positions) + 1, _ROPE_DIM // 2)
    weights = draw.normal(spec.layout.head_dim), torch.cat([angles.cos(), angles.sin()], 1)
    ape = draw.normal(spec.ratio, spec.width)
    positions, requests = torch.tensor(step.positions, device=device), draw.ints(*step.req_indices)
    sets: list[Args] = []
    for _ in range(rotating_sets(moved, device)):
        states, table = _states(spec, step, draw)
        pages = table[requests.long(), positions // spec.state_block_size].long()
        state_slots = pages * spec.state_block_size + positions % spec.state_block_size
        where = (table, state_slots, positions.clone(), requests.clone())
        kv_score = draw.normal(len(step.positions), 2 * spec.width)
        sets.append((kv_score, ape, states, *where, *weights, *_cache(spec, step, positions, draw)))
    return Work(
        save_and_compress(kind), sets, moved, written=(_STATES, _CACHE),
        reference=functools.partial(reference, spec),
        difference=functools.partial(differences, spec),
    )  # fmt: skip


def _states(kind: Kind, step: Step, draw: Draw) -> tuple[Tensor, Tensor]:
    """Make full states, and a table of random blocks for all tokens that a step may read."""
    size = kind.state_block_size
    first = max(min(step.positions) - kind.window + 1, 0) // size
    last = (max(step.positions) // kind.ratio + 1) * kind.ratio // size
    needed = step.requests * (last - first)
    table = torch.full((step.requests, last), -1, dtype=torch.int32, device=draw.device)
    table[:, first:] = draw.order(needed).view(step.requests, last - first)
    return draw.normal(*kind.states.shape(needed)), table


def _cache(kind: Kind, step: Step, positions: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Make a cache of random bytes, and a random slot for every token that completes a window."""
    size = kind.layout.block_size
    pages = max(2, step.requests, -(-step.finished(kind) // size))
    finishes = (positions + 1) % kind.ratio == 0
    order = draw.order(pages * size, torch.int64)
    slots = torch.where(finishes, order[finishes.cumsum(0) - 1], -1)
    return draw.junk(kind.layout, pages), slots


def _edge_work(kind: str, device: torch.device) -> Work:
    """Build a case with padding, and with absent requests, slots and blocks."""
    work = step_work(kind, decode_step(KINDS[kind], _EDGE_TOKENS, finishing=True), device)
    _, _, _, table, state_slots, positions, requests, *_, slots = work.sets[0]
    state_slots[::5] = torch.tensor([-1, 2**40, -(2**63), 2**63 - 1, -7], device=device)
    positions[1::8], requests[2::8], slots[3::8] = -1, _EDGE_TOKENS, -1
    table[4::8] = -1
    slots[7] = 2**62
    return dataclasses.replace(work, sets=work.sets[:1], moved_bytes=0)
