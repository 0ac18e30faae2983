"""A small engine around the compressor: requests that grow by chunks, reused blocks of states, and
tables with stale entries."""

from random import Random
from typing import Any

import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout, StateLayout
from tests.helpers import i32, i64

KINDS: dict[str, dict[str, Any]] = {
    "C4": {"ratio": 4, "overlap": True, "head_dim": 512, "state_block_size": 4, "block_size": 64},
    "C4 indexer": {
        "ratio": 4, "overlap": True, "head_dim": 128, "state_block_size": 4, "block_size": 64
    },
    "C128": {
        "ratio": 128, "overlap": False, "head_dim": 512, "state_block_size": 8, "block_size": 2
    },
}  # fmt: skip
SPECS = {**KINDS, "C128 narrow": {**KINDS["C128"], "head_dim": 64}}
LAYOUTS = {"C4": "v4_fp8", "C4 indexer": "v4_indexer_fp8", "C128": "v4_fp8"}


def random_weights(kind: str, seed: int, num_positions: int = 4096) -> dict[str, Tensor]:
    made, spec = torch.Generator().manual_seed(seed), SPECS[kind]
    width = spec["head_dim"] * (2 if spec["overlap"] else 1)
    angle = torch.rand(num_positions, 32, generator=made) * 6.3
    return {
        "ape": torch.randn(spec["ratio"], width, generator=made),
        "norm_weight": torch.randn(spec["head_dim"], generator=made),
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], 1),
    }


def random_sequences(kind: str, lens: list[int], seed: int) -> list[Tensor]:
    """Sample kv_score for every token of every request."""
    made, spec = torch.Generator().manual_seed(seed), SPECS[kind]
    width = spec["head_dim"] * (2 if spec["overlap"] else 1)
    return [torch.randn(length, 2 * width, generator=made) * 2 for length in lens]


class Engine:
    """The states and the cache of one compressor, and steps that fill them."""

    def __init__(
        self,
        kind: str,
        weights: dict[str, Tensor],
        lens: list[int],
        *,
        layout: str = "plain",
        eps: float = 1e-6,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.spec, self.layout, self.eps, self.rng = SPECS[kind], layout, eps, Random(seed)
        self.device = device
        self.weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self.ratio, self.size = self.spec["ratio"], self.spec["state_block_size"]
        self.window = self.ratio * (2 if self.spec["overlap"] else 1)
        self.done = [0] * len(lens)
        self.states_layout = StateLayout(self.size, 2 * self.weights["ape"].shape[1])
        self.table = torch.randint(-1, 9, (len(lens), max(lens) // self.size + 2)).int()
        self.free: list[int] = []
        self.pages: dict[tuple[int, int], int] = {}
        self.states = torch.full(self.states_layout.shape(0), float("nan"), device=device)
        columns = max(lens) // self.ratio // self.spec["block_size"] + 1
        order = list(range(columns * len(lens)))
        self.rng.shuffle(order)
        self.cache_table = i32(order).reshape(len(lens), columns)
        self.cache = self.cache_layout.allocate(len(order), device)

    @property
    def cache_layout(self) -> Any:
        size = self.spec["block_size"]
        if self.layout == "plain":
            return PlainLayout(size, self.spec["head_dim"], torch.float32)
        return {"v4_fp8": MainLayout, "v4_indexer_fp8": IndexerLayout}[self.layout](size)

    def step(
        self,
        chunks: list[Tensor],
        *,
        padding: int = 0,
        save_first: bool = True,
        keep_all: bool = True,
        call: Any = None,
    ) -> None:
        """Run a step over a chunk of every request (it may be empty), then ``padding`` tokens.

        Without ``keep_all``, only states remain that a later step may need.
        """
        lens = [chunk.shape[0] for chunk in chunks]
        starts = i32([0, *torch.tensor(lens).cumsum(0).tolist()])
        seq_lens = i32([done + n if n else 0 for done, n in zip(self.done, lens, strict=True)])
        tokens = sum(lens) + padding
        mapped = ops.token_map(starts, seq_lens, num_tokens=tokens)
        self._allot(lens)
        pairs = zip(mapped.req_indices.tolist(), mapped.positions.tolist(), strict=True)
        slots = i64([self._state_slot(*pair, lens, keep_all) for pair in pairs]).reshape(tokens)
        absent = torch.where(mapped.positions < 0, -1, 0)
        tensors = (mapped.positions, mapped.req_indices, self.cache_table, absent)
        sizes = {"block_size": self.spec["block_size"], "compress_ratio": self.ratio}
        compressed = ops.compressed_slot_mapping(*tensors, **sizes)
        junk = torch.full((padding, chunks[0].shape[1]), float("nan"))
        self._run(torch.cat([*chunks, junk]), slots, compressed, mapped, save_first, call)
        self.done = [done + n for done, n in zip(self.done, lens, strict=True)]
        self._recycle()

    def _run(
        self,
        kv_score: Tensor,
        slots: Tensor,
        compressed: Tensor,
        mapped: Any,
        save_first: bool,
        call: Any,
    ) -> None:
        save, compress = call or (ops.save_compressor_states, ops.compress_and_insert)
        rest = (slots, self.table, mapped.positions, mapped.req_indices, compressed, kv_score)
        moved = [tensor.to(self.device) for tensor in rest]
        slots, table, positions, req_indices, compressed, kv_score = moved
        ape = self.weights["ape"]

        def save_states() -> None:
            sizes = {"compress_ratio": self.ratio, "block_size": self.size}
            save(kv_score, ape, self.states, slots, positions, **sizes)

        if save_first:
            save_states()
        compress(
            kv_score, ape, self.states, table, positions, req_indices,
            self.weights["norm_weight"], self.weights["cos_sin_cache"], self.cache, compressed,
            compress_ratio=self.ratio, overlap=self.spec["overlap"], eps=self.eps,
            state_block_size=self.size, block_size=self.spec["block_size"], layout=self.layout,
        )  # fmt: skip
        if not save_first:
            save_states()

    def _allot(self, lens: list[int]) -> None:
        """Allocate blocks for new positions, reused blocks first; other entries stay stale."""
        for request, count in enumerate(lens):
            blocks = range(self.done[request], self.done[request] + count)
            for block in sorted({position // self.size for position in blocks}):
                if (request, block) not in self.pages:
                    self.pages[request, block] = self._page()
                    self.table[request, block] = self.pages[request, block]

    def _page(self) -> int:
        if not self.free:
            count = self.states.shape[0]
            more = self.states.new_full(self.states_layout.shape(8), float("nan"))
            self.states = torch.cat([self.states, more])
            self.free = list(range(count, count + 8))
            self.rng.shuffle(self.free)
        return self.free.pop()

    def _state_slot(self, request: int, position: int, lens: list[int], keep_all: bool) -> int:
        if request < 0:
            return -1
        if not keep_all and position < self.done[request] + lens[request] - self.window:
            return -1
        return self.pages[request, position // self.size] * self.size + position % self.size

    def _recycle(self) -> None:
        """Free the blocks that no later window reads."""
        for request, block in [*self.pages]:
            if (block + 1) * self.size <= self.done[request] - self.window:
                self.free.append(self.pages.pop((request, block)))

    def rows(self, request: int) -> Tensor:
        """Return the finished rows of a plain cache, [rows, head_dim]."""
        count = self.done[request] // self.ratio
        row = torch.arange(count)
        page = self.cache_table[request].long()[row // self.spec["block_size"]]
        return self.cache.cpu()[page, row % self.spec["block_size"]]


def run_in_chunks(
    engine: Engine, sequences: list[Tensor], rng: Random, max_chunk: int, call: Any = None
) -> None:
    """Run all requests to their ends by random chunks, some of them empty."""
    while any(done < len(rows) for done, rows in zip(engine.done, sequences, strict=True)):
        chunks = []
        for done, rows in zip(engine.done, sequences, strict=True):
            chunks.append(rows[done : done + rng.choice((0, 1, 1, 2, rng.randint(1, max_chunk)))])
        padding = rng.choice((0, 0, 1, 5))
        order = {"save_first": rng.random() < 0.5, "keep_all": rng.random() < 0.5}
        engine.step(chunks, padding=padding, call=call, **order)


def together(step: Any = ops.save_and_compress) -> tuple[Any, Any]:
    """Return two calls that replace the two ops of a step in ``Engine.step``. The call that runs
    second calls ``step``, which does the work of the two ops."""
    kept: dict[str, Any] = {}

    def save(*tensors: Any, **settings: Any) -> None:
        kept["save"] = tensors[3]
        finish()

    def compress(*tensors: Any, **settings: Any) -> None:
        kept["compress"] = tensors, settings
        finish()

    def finish() -> None:
        if len(kept) == 2:
            tensors, settings = kept.pop("compress")
            step(*tensors[:4], kept.pop("save"), *tensors[4:], **settings)

    return save, compress
