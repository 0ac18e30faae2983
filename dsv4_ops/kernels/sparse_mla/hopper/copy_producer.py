"""Queries and listed bf16 rows on their way to shared memory, by copies that no thread waits for.

An item is a token and a tile of its heads; ``lists`` are the entries of all tokens, their strides,
how many a token has, and of these how many count, with its stride and the tiles of a token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.triton_compat import async_load
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS
from dsv4_ops.kernels.sparse_mla.hopper.epilogue import ask_sinks
from dsv4_ops.kernels.sparse_mla.hopper.mma import HEADS, WIDTH
from dsv4_ops.kernels.sparse_mla.hopper.mma_paired import LEFT, RIGHT

_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Eight threads copy a line of a row, 16 bytes each."""

_ROW = gl.constexpr(gl.SliceLayout(1, _COPIED.value))

COPYING = gl.constexpr(128)
"""Threads that copy: each says of a half of a block that its copies have arrived."""


@gluon.jit
def list_length(lists, item):
    """How many leading entries of the list of an item's token count."""
    lens, len_stride, tiles = lists[3]
    length = gl.load(lens + (item // tiles).to(gl.int64) * len_stride)
    return gl.minimum(gl.maximum(length, 0), lists[2])


@gluon.jit
def pairs_of(length):
    """Pairs of blocks that so many entries are, at least one: partitions meet in them."""
    return gl.maximum((length + (2 * KEYS - 1)) // (2 * KEYS), 1)


@gluon.jit
def _find(lists, item, block):
    """Entries of a block in the list of the token."""
    indices, strides, width, lens = lists
    chosen = indices + (item // lens[2]).to(gl.int64) * strides[0]
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    return gl.load(chosen + column.to(gl.int64) * strides[1], mask=column < width, other=-1)


@gluon.jit
def _rows_of(rows, found, block, length):
    """Those of the entries that count and are rows; -1 for the others."""
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    return gl.where((column < length) & (found >= 0) & (found < rows[2]), found, -1)


@gluon.jit
def _copy(block: gl.constexpr, HALF: gl.constexpr, phase, row, rows, keys, full, used):
    first, stride, _num_rows = rows
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPIED))
    start = first + row.to(gl.int64) * stride
    mbarrier.wait(used[HALF][block], phase)
    async_load(keys[HALF].index(block), start[:, None] + dim[None, :], mask=(row >= 0)[:, None])
    async_copy.mbarrier_arrive(full[HALF][block], increment_count=False)
    mbarrier.arrive(full[HALF][block])


@gluon.jit
def copy_half_queries(q, item, turn, HALF: gl.constexpr, lists, shared, HAS_SINK: gl.constexpr):
    """A half of the rows of the heads that there are, and with the left one their sinks; the rows
    of others are zeros."""
    first, stride, head_stride, num_heads, attn_sink = q
    queries, asked = shared[0].index(0), shared[5][4]
    tiles = lists[3][2]
    token = (item // tiles).to(gl.int64)
    first_head = (item % tiles) * HEADS
    head = first_head + gl.arange(0, HEADS, _ROW)
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPIED))
    start = first + token * stride + head.to(gl.int64) * head_stride
    if HAS_SINK and HALF == LEFT:
        ask_sinks(shared[4][2].index(turn & 1), attn_sink, first_head, num_heads - first_head)
    async_load(
        queries.slice(HALF * WIDTH, WIDTH, dim=1),
        start[:, None] + dim[None, :],
        mask=(head < num_heads)[:, None],
    )
    async_copy.mbarrier_arrive(asked, increment_count=False)
    mbarrier.arrive(asked)


@gluon.jit
def _copy_queries(q, item, turn, lists, shared, HAS_SINK: gl.constexpr):
    mbarrier.wait(shared[5][5], (turn & 1) ^ 1)
    copy_half_queries(q, item, turn, LEFT, lists, shared, HAS_SINK)
    copy_half_queries(q, item, turn, RIGHT, lists, shared, HAS_SINK)


@gluon.jit
def copy_items(q, rows, lists, items, shared, HAS_SINK: gl.constexpr):
    """The partition that fills the buffers, for one item after the other: halves of blocks in the
    order in which they are used, and which rows exist; the others are zeros. The queries of an item
    come behind its first keys, which do not have to wait until those before are answered; those of
    the first item the other partitions ask for, which would wait for them anyway. What is asked of
    lists arrives while the copies before go on."""
    keys, existing, full, used = shared[1], shared[2], shared[5][0], shared[5][1]
    item = gl.program_id(0)
    turn = item * 0
    pair = item * 0
    next_even = _find(lists, item, 0)
    next_odd = _find(lists, item, 1)
    next_length = list_length(lists, item)
    while item < items:
        length = next_length
        after = item + gl.num_programs(0)
        there = gl.minimum(after, items - 1)
        after_even = _find(lists, there, 0)
        after_odd = _find(lists, there, 1)
        next_length = list_length(lists, there)
        first = pair
        end = first + pairs_of(length)
        while pair < end:
            phase = (pair & 1) ^ 1
            block = 2 * (pair - first)
            even = _rows_of(rows, next_even, block, length)
            odd = _rows_of(rows, next_odd, block + 1, length)
            next_even = _find(lists, item, block + 2)
            next_odd = _find(lists, item, block + 3)
            mbarrier.wait(used[LEFT][0], phase)
            existing.index(0).store(even)
            _copy(0, LEFT, phase, even, rows, keys, full, used)
            mbarrier.wait(used[RIGHT][1], phase)
            existing.index(1).store(odd)
            _copy(1, RIGHT, phase, odd, rows, keys, full, used)
            _copy(0, RIGHT, phase, even, rows, keys, full, used)
            if (block == 0) & (turn > 0):
                _copy_queries(q, item, turn, lists, shared, HAS_SINK)
            _copy(1, LEFT, phase, odd, rows, keys, full, used)
            pair += 1
        next_even = after_even
        next_odd = after_odd
        item = after
        turn += 1
