"""Requests that share blocks of states which one of them fills in the same step, as in a prefix
cache: each row has the bits that its request has alone."""

from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import StateLayout
from tests.helpers import i32, i64
from tests.support.compressor_steps import SPECS, random_weights
from tests.support.sampled import sampled

MAX = {"C4": 30, "C4 indexer": 30, "C128 narrow": 300}


@dataclass
class Request:
    """``shared`` tokens are those of request ``parent``; ``before`` were in an earlier step."""

    parent: int
    shared: int
    before: int
    length: int


@st.composite
def batches(draw, kind: str) -> tuple[list[Request], int]:
    """Requests, each of which shares blocks of one before it, and a seed."""
    spec, longest = SPECS[kind], MAX[kind]
    size, ratio = spec["state_block_size"], spec["ratio"]
    near = [r * ratio + d for r in (1, 2) for d in (-1, 0, 1, size - 1, size, size + 1)]
    lengths = st.sampled_from([n for n in near if n > 0]) | st.integers(1, longest)
    requests = [Request(0, 0, 0, draw(lengths))]
    requests[0].before = draw(st.sampled_from([0, 0, size, requests[0].length - 1]))
    requests[0].before = min(requests[0].before, requests[0].length - 1)
    for _ in range(draw(st.integers(1, 3))):
        parent = draw(st.integers(0, len(requests) - 1))
        whole = requests[parent].length // size
        shared = size * draw(st.sampled_from([whole, whole, whole - 1, 0]) | st.integers(0, whole))
        shared = max(shared, 0)
        rest = draw(st.sampled_from([1, 2, ratio - 1, ratio, ratio + 1]))
        requests.append(Request(parent, shared, shared, min(shared + rest, 2 * longest)))
    return requests, draw(st.integers(0, 99))


class Step:
    """The tensors of a batch whose requests share blocks, and each request alone."""

    def __init__(self, kind: str, requests: list[Request], seed: int) -> None:
        self.spec, self.requests, self.rng = SPECS[kind], requests, Random(seed)
        self.weights = random_weights(kind, 1)
        made = torch.Generator().manual_seed(seed)
        size, width = self.spec["state_block_size"], self.weights["ape"].shape[1]
        columns = max(each.length for each in requests) // size + 1
        self.table = torch.full((len(requests) + 1, columns), -1, dtype=torch.int32)
        pages = list(range(columns * len(requests)))
        self.rng.shuffle(pages)
        self.rows: list[Tensor] = []
        for number, each in enumerate(requests):
            first = self.rows[each.parent][: each.shared] if number else torch.zeros(0, 2 * width)
            own = torch.randn(each.length - each.shared, 2 * width, generator=made)
            self.rows.append(torch.cat([first, own]))
            self.table[number, : each.shared // size] = self.table[
                each.parent, : each.shared // size
            ]
            for column in range(each.shared // size, -(-each.length // size)):
                self.table[number, column] = pages.pop()
        self.states = torch.full(
            StateLayout(size, 2 * width).shape(columns * len(requests)), float("nan")
        )

    def alone(self, number: int) -> Tensor:
        """Rows of all windows of a request."""
        rows, length = self.rows[number], self.requests[number].length
        tokens = list(range(length))
        slots = [
            position if (position + 1) % self.spec["ratio"] == 0 else -1 for position in tokens
        ]
        cache = torch.zeros(length, 1, self.spec["head_dim"])
        table = torch.full((1, 1), -1, dtype=torch.int32)
        self._call(rows, self.states[:0], table, [-1] * length, tokens, [0] * length, cache, slots)
        return cache[:, 0]

    def run(self, save_first: bool) -> list[tuple[int, int, Tensor]]:
        """Request, position and row of every window that the step completes."""
        first = self.requests[0]
        if first.before:  # an earlier step
            rows, own = self.rows[0][: first.before], list(range(first.before))
            slots = [self._slot(0, position) for position in own]
            cache = torch.zeros(1, 1, self.spec["head_dim"])
            self._call(
                rows, self.states, self.table, slots, own, [0] * len(own), cache, [-1] * len(own)
            )
        order = list(range(len(self.requests)))
        self.rng.shuffle(order)
        tokens = [
            (number, position)
            for number in order
            for position in range(self.requests[number].before, self.requests[number].length)
        ]
        padding = self.rng.choice((0, 2))
        requests = [number for number, _ in tokens] + [-1, len(self.requests)][:padding]
        positions = [position for _, position in tokens] + [-1, -1][:padding]
        slots = [self._slot(*token) for token in tokens] + [-1] * padding
        finish = [
            token if (position + 1) % self.spec["ratio"] == 0 else -1
            for token, (_, position) in enumerate(tokens)
        ] + [-1] * padding
        kv_score = torch.stack([self.rows[number][position] for number, position in tokens])
        kv_score = torch.cat([kv_score, torch.full((padding, kv_score.shape[1]), float("nan"))])
        cache = torch.zeros(len(tokens), 1, self.spec["head_dim"])
        batch = (kv_score, self.states, self.table, slots, positions, requests, cache, finish)
        self._call(*batch, save_first=save_first)
        return [
            (*tokens[token], cache[token, 0]) for token in range(len(tokens)) if finish[token] >= 0
        ]

    def _slot(self, number: int, position: int) -> int:
        """The slot of a state; that of a state that no window of another call reads may be -1."""
        size = self.spec["state_block_size"]
        ends = {each.shared for each in self.requests if each.shared} | {self.requests[0].before}
        window = self.spec["ratio"] * (2 if self.spec["overlap"] else 1)
        if self.rng.random() < 0.3 and not any(0 < end - position <= window for end in ends):
            return -1
        return int(self.table[number, position // size]) * size + position % size

    def _call(
        self,
        kv_score: Tensor,
        states: Tensor,
        table: Tensor,
        state_slots: list[int],
        positions: list[int],
        requests: list[int],
        cache: Tensor,
        slots: list[int],
        save_first: bool = True,
    ) -> None:
        ops.save_and_compress(
            kv_score,
            self.weights["ape"],
            states,
            table,
            i64(state_slots),
            i64(positions),
            i32(requests),
            self.weights["norm_weight"],
            self.weights["cos_sin_cache"],
            cache,
            i64(slots),
            compress_ratio=self.spec["ratio"],
            overlap=self.spec["overlap"],
            eps=1e-6,
            state_block_size=self.spec["state_block_size"],
            block_size=1,
            layout="plain",
            save_first=save_first,
        )


@pytest.mark.parametrize("kind", MAX)
def test_a_request_that_shares_blocks_of_this_step_has_the_bits_that_it_has_alone(
    kind: str,
) -> None:
    compared, wrong = [0], [0]

    @sampled(120)
    @given(batches(kind))
    def compare(batch: tuple[list[Request], int]) -> None:
        step, read_first = Step(kind, *batch), Step(kind, *batch)
        alone = [step.alone(number) for number in range(len(batch[0]))]
        found = step.run(save_first=True)
        for number, position, row in found:
            assert torch.equal(row, alone[number][position]), (batch, number, position)
        compared[0] += len(found)
        for number, position, row in read_first.run(save_first=False):
            wrong[0] += not torch.equal(row, alone[number][position])

    compare()
    assert compared[0] > 20
    assert wrong[0] > 3, "the other order is wrong somewhere, or nothing is shared"
