"""vLLM 0.22.1's metadata builders on our batches: the work of a server before every decode step.

The kernels are third-party files, which are loaded from a bundle at run time. This file calls the
kernels in the order of vLLM's builders, with the same host work between the calls. The times are a
lower bound of vLLM's: this file copies the token-to-request map once (in vLLM, three builders copy
it), computes the C4 slots once (in vLLM, two builders do), and leaves out the clamped copies of the
block tables, the DeepGEMM and FlashMLA plans, and the Python around the calls. vLLM's builders
differ from ours in two points: they do not compute ``positions``, and for next_n = 4 they copy a
row of the block table per token for the indexer.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.batches import Batch, captured_calls
from benchmarks.harness.timing import Activity, Capture, Timing, device_activities, host_us
from dsv4_ops.attention.metadata import AttentionSpec, DecodeMetadata

_MAX_BATCHED_TOKENS = 8192  # vLLM's default on an H200; vLLM refills whole buffers
_NATIVE_NEXT_N = (1, 2)  # DeepGEMM's paged kernel accepts these on Hopper; vLLM flattens others
_NEEDED = ("comp", "swa", "idx", "fms")
_POISON = -7


class BaselineMismatch(RuntimeError):
    """The baseline's result differs from ours."""


class BaselineResult(NamedTuple):
    """Times of the builders in one step."""

    device_us: Timing
    host_us: Timing
    activities: Sequence[Activity]


def library(folder: Path) -> Any:
    """Load ``anchor_lib``, the bundle's loader."""
    scripts = (folder / "bench").resolve()
    if not (scripts / "anchor_lib.py").is_file():
        raise FileNotFoundError(
            f"no anchor_lib.py in {folder.name}/bench: make it with make_bundle.sh"
        )
    os.environ["ANCHOR_DIR"] = str(scripts.parent)
    if str(scripts) not in sys.path:
        sys.path.insert(0, str(scripts))
    return importlib.import_module("anchor_lib")


def load(folder: Path, needed: Sequence[str] = _NEEDED) -> Any:
    """Load the bundle's vLLM modules; raise if a ``needed`` module fails to load."""
    modules = library(folder).load_vllm_triton()
    failed = {name: text for name, text in modules.errors.items() if name in needed}
    if failed:
        raise ImportError(f"baseline modules failed to load: {failed}")
    return modules


class BuilderSequence:
    """The builders' persistent buffers for one batch, and a step that fills them."""

    def __init__(self, modules: Any, spec: AttentionSpec, batch: Batch) -> None:
        self.modules, self.spec, self.batch = modules, spec, batch
        device, tokens = batch.seq_lens.device, batch.tokens
        cuda = device.type == "cuda"
        capacity = max(tokens, _MAX_BATCHED_TOKENS if cuda else 2 * tokens)
        columns = batch.block_tables.c4.shape[1]

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, _POISON, dtype=dtype, device=device)

        self.query_start_loc_cpu = batch.query_start_loc.cpu()
        self.token_to_req = buffer(capacity)
        self.is_valid = buffer(capacity, dtype=torch.bool)
        self.swa_indices = buffer(capacity, 1, spec.window_size)
        self.swa_lens = buffer(capacity)
        self.c4_lens = buffer(capacity)
        self.c4_slots = buffer(capacity, dtype=torch.int64)
        self.c128_slots = buffer(capacity, dtype=torch.int64)
        self.c128_indices = buffer(tokens, spec.max_c128_rows)
        self.c128_lens = buffer(capacity)
        self.c128_prefill = buffer(1, spec.max_c128_rows)
        self.indexer = SimpleNamespace(
            decode_seq_lens_buffer=buffer(capacity),
            decode_lens_buffer=buffer(capacity),
            expanded_block_table_buffer=buffer(tokens, columns),
            offsets_buffer=torch.arange(batch.next_n, dtype=torch.int32, device=device),
            arange_buffer=torch.arange(capacity, dtype=torch.int32, device=device),
        )
        self.indexer_lens = self.c4_lens

    def step(self) -> None:
        """Run all builders, as a server does."""
        self.map_tokens()
        self.device_step()

    def map_tokens(self) -> None:
        """Compute every token's request on the host, and copy the requests from pinned memory."""
        lengths = torch.diff(self.query_start_loc_cpu)
        requests = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
        if self.token_to_req.is_cuda:
            requests = requests.pin_memory()
        self.token_to_req[: requests.shape[0]].copy_(requests, non_blocking=True)

    def device_step(self) -> None:
        """Run the part of the step that a CUDA graph can capture."""
        self._window()
        self._indexer()
        tables = self.batch.block_tables
        self._slots(tables.c4, self.spec.c4_block_size, self.spec.c4_ratio, self.c4_slots)
        self._slots(tables.c128, self.spec.c128_block_size, self.spec.c128_ratio, self.c128_slots)
        self._dense()

    def _window(self) -> None:
        batch, tokens = self.batch, self.batch.tokens
        table = batch.block_tables.swa
        self.is_valid[:tokens].copy_(batch.slot_mapping >= 0)
        self.swa_lens[tokens:] = 0
        self.modules.swa._compute_swa_indices_and_lens_kernel[(tokens,)](
            self.swa_indices, self.swa_indices.stride(0), self.swa_lens, self.spec.window_size,
            batch.query_start_loc, batch.seq_lens, self.token_to_req, self.is_valid,
            table, table.stride(0), self.spec.swa_block_size, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip

    def _indexer(self) -> None:
        """Compute the indexer's lengths: [num_reqs, next_n] if DeepGEMM takes that shape."""
        batch, requests = self.batch, self.batch.requests
        decode_lens = self.indexer.decode_lens_buffer[:requests]
        torch.diff(batch.query_start_loc, out=decode_lens)
        decode_lens_cpu = torch.diff(self.query_start_loc_cpu)
        longest = int(decode_lens_cpu.max().item())
        lens = self.modules.idx.DeepseekV32IndexerMetadataBuilder._prepare_decode_tensors(
            self.indexer, seq_lens=batch.seq_lens, block_table=batch.block_tables.c4,
            decode_lens=decode_lens, decode_lens_cpu=decode_lens_cpu,
            query_start_loc=batch.query_start_loc[:-1], num_decodes=requests,
            num_decode_tokens=batch.tokens, use_native=batch.next_n in _NATIVE_NEXT_N,
            next_n=batch.next_n, max_decode_len=longest,
        )[0]  # fmt: skip
        if batch.next_n > 1:  # the lengths are in a buffer of the builder
            lens //= self.spec.c4_ratio
        else:  # the lengths are the runner's tensor, which must not change
            self.c4_lens[:requests] = lens // self.spec.c4_ratio
            self.c4_lens[requests : batch.tokens] = 0
            lens = self.c4_lens[: batch.tokens]
        self.indexer_lens = lens

    def _slots(self, table: Tensor, block_size: int, ratio: int, out: Tensor) -> None:
        batch = self.batch
        self.modules.comp.get_compressed_slot_mapping(
            batch.tokens, batch.query_start_loc, batch.seq_lens, table, block_size, ratio, out=out
        )

    def _dense(self) -> None:
        batch, spec = self.batch, self.spec
        self.modules.fms.build_c128a_topk_metadata(
            batch.positions, spec.c128_ratio, batch.tokens, self.token_to_req,
            batch.block_tables.c128, spec.c128_block_size, batch.slot_mapping, self.c128_indices,
            self.c128_lens, self.c128_prefill, max_compressed_tokens=spec.max_c128_rows,
        )  # fmt: skip

    def check(self, expected: DecodeMetadata) -> None:
        """Compare the buffers after a step with our metadata, exactly."""
        tokens = self.batch.tokens
        pairs = {
            "req_indices": self.token_to_req[:tokens],
            "swa_indices": self.swa_indices[:tokens, 0],
            "swa_lens": self.swa_lens[:tokens],
            "c4_lens": self.indexer_lens.reshape(-1),
            "c4_slot_mapping": self.c4_slots[:tokens],
            "c128_slot_mapping": self.c128_slots[:tokens],
            "c128_indices": self.c128_indices,
            "c128_lens": self.c128_lens[:tokens],
        }
        for name, baseline in pairs.items():
            ours = getattr(expected, name)
            if not torch.equal(baseline.cpu(), ours.cpu()):
                raise BaselineMismatch(f"vLLM's {name} differs from ours")


def measure(
    modules: Any, spec: AttentionSpec, batches: Sequence[Batch], expected: DecodeMetadata
) -> BaselineResult | None:
    """Check a step over the first batch against ``expected``; on a GPU, time steps over all
    batches.

    The device time is the time of a CUDA graph of the device steps plus the profiled copies' time.
    """
    sequences = [BuilderSequence(modules, spec, batch) for batch in batches]
    first = sequences[0]
    first.step()
    first.check(expected)
    if not first.token_to_req.is_cuda:
        return None
    for sequence in sequences[1:]:
        sequence.map_tokens()
    host = host_us(first.step)
    activities = device_activities(first.step)
    copies = sum(activity.us for activity in activities if "HtoD" in activity.name)
    steps = captured_calls([each.device_step for each in sequences])
    device = Timing(*(us + copies for us in Capture(steps).device_us()))
    first.check(expected)
    return BaselineResult(device, host, activities)
