"""The caches on a GPU: FlashMLA's and vLLM's format, in-place writes in graphs and packages, caches
larger than 4 GiB. Run ``pytest -m gpu tests``; ANCHOR_DIR names the bundle of baselines."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops.attention.caches import KVCacheBuffers
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.testing.contract import checks
from tests.compile.test_compiled_cache import LAYOUT, SLOTS, garbage, insert, keys
from tests.support.attention_batches import no_host_sync
from tests.support.prefill_batches import GRAPHS

BASELINES = Path(os.environ.get("ANCHOR_DIR", Path(__file__).parents[2] / ".anchor"))
needs_baselines = pytest.mark.skipif(
    not (BASELINES / "bench" / "anchor_lib.py").is_file(),
    reason="needs the bundle of vLLM's and FlashMLA's kernels, which is not part of the repository",
)


def anchor_lib():
    os.environ["ANCHOR_DIR"] = str(BASELINES.resolve())
    sys.path.insert(0, str(BASELINES.resolve() / "bench"))
    return __import__("anchor_lib")


@needs_baselines
@pytest.mark.parametrize("block_size", [64, 256])
def test_bytes_are_those_of_vllm(block_size):
    """Four million values over 40 orders of magnitude; padding and other rows do not change."""
    vllm_insert = anchor_lib().load_vllm_triton().cache.quantize_and_insert_k_cache
    layout = MainLayout(block_size)
    generator = torch.Generator("cuda").manual_seed(0)
    scale = torch.exp2(torch.randint(-60, 60, (8192, 8, 1), generator=generator, device="cuda"))
    k = torch.randn(8192, 8, 64, generator=generator, device="cuda") * scale
    k = k.reshape(8192, 512).to(torch.bfloat16)
    k[0], k[1, 64:128], k[2, :64] = 0, -0.0, 2.0**-130
    powers = torch.arange(-20, 30, device="cuda")
    k[100:150, 0] = (448 * torch.exp2(powers)).to(torch.bfloat16)
    k[100:150, 1:64] = 0
    slots = torch.randperm(256 * 64, generator=generator, device="cuda")[:8192]
    slots[5] = -1
    blocks = 256 * 64 // block_size
    start = torch.randint(
        0, 256, layout.shape(blocks), generator=generator, dtype=torch.uint8, device="cuda"
    )
    ours, upstream = start.clone(), start.clone()
    ops.quantize_and_insert_k_cache(k, ours, slots, block_size=block_size)
    vllm_insert(k, upstream, slots, block_size=block_size)
    assert torch.equal(ours, upstream)


class Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.caches = KVCacheBuffers(LAYOUT, num_layers=2, num_blocks=5, device="cuda")

    def forward(self, k, slots, lens, table):
        insert(k, self.caches[1], slots)
        first = ops.gather_k_cache(self.caches[1], lens, None, table, block_size=64, num_rows=320)
        insert(k * 2, self.caches[1], slots)
        sizes = {"block_size": 64, "num_rows": 320}
        return first, ops.gather_k_cache(self.caches[1], lens, None, table, **sizes)


def test_captured_inserts_and_reads_keep_their_order():
    """A module with a KVCacheBuffers under CUDA graphs: each replay runs two inserts and two reads.
    Results equal the CPU's, addresses stay, and no host sync occurs."""
    torch._dynamo.reset()
    step = Step()
    before = [cache.data_ptr() for cache in step.caches]
    compiled = torch.compile(step, fullgraph=True, options=GRAPHS)
    inputs = (keys(0), SLOTS, torch.tensor([320]).int(), torch.arange(5).int()[None])
    static = tuple(tensor.cuda() for tensor in inputs)
    cpu = Step().cpu()
    for seed in range(8):
        static[0].copy_(keys(seed))
        with no_host_sync(seed > 3):
            actual = compiled(*static)
        expected = cpu(keys(seed), *inputs[1:])
        checks.assert_same("read", [tensor.cpu() for tensor in actual], expected)
        assert torch.equal(step.caches[1].cpu(), cpu.caches[1])
        assert not step.caches[0].any()
    assert before == [cache.data_ptr() for cache in step.caches]


@pytest.mark.parametrize("where", ["graph", "buffer", "argument"])
def test_a_layer_of_a_stacked_cache_is_the_one_that_is_written(where):
    """The layer is selected in a graph of fixed sizes, from a buffer, or before the call."""
    torch._dynamo.reset()
    stacked = torch.stack([garbage() + layer for layer in range(3)]).cuda()
    expected = stacked.cpu()
    insert(keys(4), expected[1], SLOTS)
    k, slots = keys(4).cuda(), SLOTS.cuda()
    if where == "graph":
        call = torch.compile(lambda k, caches, slots: insert(k, caches[1], slots), dynamic=False)
        call(k, stacked, slots)
    elif where == "argument":
        torch.compile(insert, fullgraph=True, dynamic=True)(k, stacked[1], slots)
    else:
        holder = torch.nn.Module()
        holder.register_buffer("caches", stacked)
        call = torch.compile(
            lambda k, slots: insert(k, holder.caches[1], slots), fullgraph=True, dynamic=True
        )
        call(k, slots)
    assert torch.equal(stacked.cpu(), expected)


def test_a_layer_at_a_symbolic_offset_is_refused():
    """torch would write to another layer (tests/compile/test_upstream.py)."""
    torch._dynamo.reset()
    stacked = torch.stack([garbage() + layer for layer in range(3)]).cuda()
    before = stacked.clone()
    compiled = torch.compile(
        lambda k, caches, slots: insert(k, caches[1], slots), fullgraph=True, dynamic=True
    )
    message = (
        "quantize_and_insert_k_cache: k_cache must be at a constant offset of its storage when "
        "compiled, got offset"
    )
    with pytest.raises(Exception, match=message):
        compiled(keys(4).cuda(), stacked, SLOTS.cuda())
    assert torch.equal(stacked, before)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_caches_beyond_4_gib(gpu_memory_alone, compile_it):
    """Slots whose bytes are beyond 2^31 and 2^32, and row offsets beyond 2^31 elements."""
    layout, plain_layout = MainLayout(64), PlainLayout(64)
    blocks = math.ceil(5 * 2**30 / layout.page_bytes)
    cache, plain = layout.allocate(blocks, "cuda"), plain_layout.allocate(2**17, "cuda")
    assert cache.nbytes > 2**32
    assert plain.numel() > 2**32 - 1
    borders = [2**31, 2**32, cache.numel()]
    pages = [border // layout.page_bytes - back for border in borders for back in (1, 2, 3)]
    slots = torch.tensor([page * 64 + row for page in pages for row in (0, 63)])
    plain_slots = slots % (2**17 * 64) // 1
    plain_slots[-1] = 2**17 * 64 - 1
    k = keys(5, len(slots))
    table = torch.tensor(pages, dtype=torch.int32)[:, None].cuda()
    lens = torch.full((len(pages),), 64, dtype=torch.int32, device="cuda")
    last = torch.tensor([[2**17 - 1]], dtype=torch.int32, device="cuda")

    def run(k, cache, plain, slots, plain_slots, lens, table, last):
        insert(k, cache, slots)
        ops.insert_k_cache(k, plain, plain_slots)
        out = torch.zeros(lens.shape[0], 64, 512, dtype=torch.bfloat16, device=k.device)
        ops.dequantize_and_gather_k_cache(out, cache, lens, None, table, block_size=64)
        dense = ops.gather_k_cache(cache, lens, None, table, block_size=64, num_rows=64)
        sizes = {"block_size": 64, "num_rows": 64, "layout": "plain"}
        rows = ops.gather_k_cache(plain, lens[:1], None, last, **sizes)
        return out, dense, rows

    torch._dynamo.reset()
    call = torch.compile(run, fullgraph=True) if compile_it else run
    moved = (k.cuda(), cache, plain, slots.cuda(), plain_slots.cuda(), lens, table, last)
    out, dense, rows = call(*moved)
    small = layout.allocate(1)
    ops.quantize_and_insert_k_cache(k[:2], small, torch.tensor([0, 63]), block_size=64)
    assert torch.equal(out, dense)
    ones = torch.tensor([64], dtype=torch.int32)
    for index in range(len(pages)):
        small = layout.allocate(1)
        pair = k[2 * index : 2 * index + 2]
        ops.quantize_and_insert_k_cache(pair, small, torch.tensor([0, 63]), block_size=64)
        assert torch.equal(cache[pages[index]].cpu(), small[0]), pages[index]
        table_of_one = torch.zeros(1, 1, dtype=torch.int32)
        expected = ops.gather_k_cache(small, ones, None, table_of_one, block_size=64, num_rows=64)
        assert torch.equal(out[index].cpu(), expected[0]), pages[index]
    assert int(cache.amax(1).count_nonzero()) == len(pages), "no other page was written"
    assert torch.equal(rows[0, -1].cpu(), k[-1])
    del cache, plain, moved, out, dense, rows
    torch.cuda.empty_cache()
