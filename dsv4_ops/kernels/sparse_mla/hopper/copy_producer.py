"""Producer of queries and listed bf16 rows: asynchronous copies to shared memory.

An item is a token and a tile of its heads. ``lists`` groups the entries of all tokens, their
strides, the width of a list, and then the lengths, their stride and the tiles per token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import copy_sinks
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import LEFT, RIGHT

_COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Eight threads copy one line of a row, 16 bytes each."""

_ROW = gl.constexpr(gl.SliceLayout(1, _COPY_LAYOUT.value))

COPY_THREADS = gl.constexpr(128)
"""Threads that copy: each arrives at the barrier of half a block when its copies are done."""


@gluon.jit
def list_length(lists, item):
    """Return the length of the list of an item's token."""
    lens, len_stride, head_tiles = lists[3]
    length = gl.load(lens + (item // head_tiles).to(gl.int64) * len_stride)
    return gl.minimum(gl.maximum(length, 0), lists[2])


@gluon.jit
def pairs_of(length):
    """Return the pairs of blocks of a list; at least one, in which the partitions meet."""
    return gl.maximum((length + (2 * KEYS - 1)) // (2 * KEYS), 1)


@gluon.jit
def _load_entries(lists, item, block):
    """Load the entries of a block of the token's list."""
    indices, strides, width, lens = lists
    list_start = indices + (item // lens[2]).to(gl.int64) * strides[0]
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    return gl.load(list_start + column.to(gl.int64) * strides[1], mask=column < width, other=-1)


@gluon.jit
def _valid_rows(rows, entries, block, length):
    """Return the entries that lie in the list and are rows; -1 for the others."""
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    return gl.where((column < length) & (entries >= 0) & (entries < rows[2]), entries, -1)


@gluon.jit
def _copy(
    block: gl.constexpr, HALF: gl.constexpr, phase, kv_valid, rows, kv_smem, kv_ready, kv_free
):
    first, stride, _num_rows = rows
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPY_LAYOUT))
    start = first + kv_valid.to(gl.int64) * stride
    mbarrier.wait(kv_free[HALF][block], phase)
    mask = (kv_valid >= 0)[:, None]
    async_load(kv_smem[HALF].index(block), start[:, None] + dim[None, :], mask=mask)
    async_copy.mbarrier_arrive(kv_ready[HALF][block], increment_count=False)
    mbarrier.arrive(kv_ready[HALF][block])


@gluon.jit
def copy_half_queries(q, item, iteration, HALF: gl.constexpr, lists, smem, HAS_SINK: gl.constexpr):
    """Copy half of the queries of an item, and the sinks with the left half; absent heads become
    zeros."""
    first, stride, head_stride, num_heads, attn_sink = q
    q_smem, q_ready = smem[0].index(0), smem[5][4]
    head_tiles = lists[3][2]
    token = (item // head_tiles).to(gl.int64)
    first_head = (item % head_tiles) * HEADS
    head = first_head + gl.arange(0, HEADS, _ROW)
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPY_LAYOUT))
    start = first + token * stride + head.to(gl.int64) * head_stride
    if HAS_SINK and HALF == LEFT:
        copy_sinks(smem[4][2].index(iteration & 1), attn_sink, first_head, num_heads - first_head)
    async_load(
        q_smem.slice(HALF * WIDTH, WIDTH, dim=1),
        start[:, None] + dim[None, :],
        mask=(head < num_heads)[:, None],
    )
    async_copy.mbarrier_arrive(q_ready, increment_count=False)
    mbarrier.arrive(q_ready)


@gluon.jit
def _copy_queries(q, item, iteration, lists, smem, HAS_SINK: gl.constexpr):
    mbarrier.wait(smem[5][5], (iteration & 1) ^ 1)
    copy_half_queries(q, item, iteration, LEFT, lists, smem, HAS_SINK)
    copy_half_queries(q, item, iteration, RIGHT, lists, smem, HAS_SINK)


@gluon.jit
def copy_items(q, rows, lists, items, smem, HAS_SINK: gl.constexpr):
    """Fill the buffers for one item after the other, as one partition.

    Halves of blocks are copied in the order of their use; rows that do not exist become zeros. The
    queries of an item follow its first keys, which thus need not wait for the previous item. The
    other partitions copy the queries of the first item: they would wait for them anyway. List
    entries are loaded while earlier copies run.
    """
    kv_smem, kv_valid_smem, kv_ready, kv_free = smem[1], smem[2], smem[5][0], smem[5][1]
    item = gl.program_id(0)
    iteration = item * 0
    pair = item * 0
    next_even = _load_entries(lists, item, 0)
    next_odd = _load_entries(lists, item, 1)
    next_length = list_length(lists, item)
    while item < items:
        length = next_length
        next_item = item + gl.num_programs(0)
        clamped_item = gl.minimum(next_item, items - 1)
        next_item_even = _load_entries(lists, clamped_item, 0)
        next_item_odd = _load_entries(lists, clamped_item, 1)
        next_length = list_length(lists, clamped_item)
        first = pair
        end = first + pairs_of(length)
        while pair < end:
            phase = (pair & 1) ^ 1
            block = 2 * (pair - first)
            even = _valid_rows(rows, next_even, block, length)
            odd = _valid_rows(rows, next_odd, block + 1, length)
            next_even = _load_entries(lists, item, block + 2)
            next_odd = _load_entries(lists, item, block + 3)
            mbarrier.wait(kv_free[LEFT][0], phase)
            kv_valid_smem.index(0).store(even)
            _copy(0, LEFT, phase, even, rows, kv_smem, kv_ready, kv_free)
            mbarrier.wait(kv_free[RIGHT][1], phase)
            kv_valid_smem.index(1).store(odd)
            _copy(1, RIGHT, phase, odd, rows, kv_smem, kv_ready, kv_free)
            _copy(0, RIGHT, phase, even, rows, kv_smem, kv_ready, kv_free)
            if (block == 0) & (iteration > 0):
                _copy_queries(q, item, iteration, lists, smem, HAS_SINK)
            _copy(1, LEFT, phase, odd, rows, kv_smem, kv_ready, kv_free)
            pair += 1
        next_even = next_item_even
        next_odd = next_item_odd
        item = next_item
        iteration += 1
