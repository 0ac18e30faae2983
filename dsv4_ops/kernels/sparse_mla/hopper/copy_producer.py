"""Producer that copies queries and listed bf16 rows to shared memory, asynchronously.

An item is a token and a tile of its heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.hopper.epilogue import copy_sinks
from dsv4_ops.kernels.common.hopper.mma import HEADS, KEYS, WIDTH
from dsv4_ops.kernels.common.hopper.mma_paired import EVEN, LEFT, ODD, RIGHT
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate, async_load

_COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Eight threads copy one line of a row, 16 bytes each."""

_ROW = gl.constexpr(gl.SliceLayout(1, _COPY_LAYOUT.value))


@aggregate
class Queries:
    """Queries of all tokens, their strides, the number of heads, and the sinks."""

    start: Scalar
    stride: Scalar
    head_stride: Scalar
    num_heads: Scalar
    attn_sink: Scalar


@aggregate
class Rows:
    """Rows of bf16 values: their address, their stride and their number."""

    start: Scalar
    stride: Scalar
    num_rows: Scalar


@aggregate
class Lists:
    """Lists of all tokens: the entries with their strides, the width of a list, the lengths with
    their stride, and the tiles of heads per token."""

    indices: Scalar
    stride: Scalar
    column_stride: Scalar
    width: Scalar
    lens: Scalar
    len_stride: Scalar
    head_tiles: Scalar


@gluon.jit
def list_length(lists, item):
    """Return the length of a list for the token of ``item``."""
    token = (item // lists.head_tiles).to(gl.int64)
    length = gl.load(lists.lens + token * lists.len_stride)
    return gl.minimum(gl.maximum(length, 0), lists.width)


@gluon.jit
def pairs_of(length):
    """Return the number of pairs of blocks of a list: at least one, because the partitions
    synchronise within a pair."""
    return gl.maximum((length + (2 * KEYS - 1)) // (2 * KEYS), 1)


@gluon.jit
def _load_entries(lists, item, block):
    """Load the entries of a block of the token's list."""
    list_start = lists.indices + (item // lists.head_tiles).to(gl.int64) * lists.stride
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    mask = column < lists.width
    return gl.load(list_start + column.to(gl.int64) * lists.column_stride, mask=mask, other=-1)


@gluon.jit
def _valid_rows(rows, entries, block, length):
    """Return the entries that are valid row numbers; -1 for other entries and for entries past the
    list's length."""
    column = block * KEYS + gl.arange(0, KEYS, _ROW)
    return gl.where((column < length) & (entries >= 0) & (entries < rows.num_rows), entries, -1)


@gluon.jit
def _copy(
    BLOCK: gl.constexpr, HALF: gl.constexpr, phase, kv_valid, rows, kv_smem, kv_ready, kv_free
):
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPY_LAYOUT))
    start = rows.start + kv_valid.to(gl.int64) * rows.stride
    mbarrier.wait(kv_free[HALF][BLOCK], phase)
    mask = (kv_valid >= 0)[:, None]
    async_load(kv_smem[HALF].index(BLOCK), start[:, None] + dim[None, :], mask=mask)
    async_copy.mbarrier_arrive(kv_ready[HALF][BLOCK], increment_count=False)
    mbarrier.arrive(kv_ready[HALF][BLOCK])


@gluon.jit
def copy_half_queries(q, item, iteration, HALF: gl.constexpr, lists, smem, HAS_SINK: gl.constexpr):
    """Copy half of the columns of an item's queries; with the left half, also copy the sinks.
    Absent heads become zeros."""
    q_smem, q_ready = smem.q.index(0), smem.barriers.q_ready
    token = (item // lists.head_tiles).to(gl.int64)
    first_head = (item % lists.head_tiles) * HEADS
    head = first_head + gl.arange(0, HEADS, _ROW)
    dim = HALF * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, _COPY_LAYOUT))
    start = q.start + token * q.stride + head.to(gl.int64) * q.head_stride
    if HAS_SINK and HALF == LEFT:
        sink_smem = smem.sink.index(iteration & 1)
        copy_sinks(sink_smem, q.attn_sink, first_head, q.num_heads - first_head)
    async_load(
        q_smem.slice(HALF * WIDTH, WIDTH, dim=1),
        start[:, None] + dim[None, :],
        mask=(head < q.num_heads)[:, None],
    )
    async_copy.mbarrier_arrive(q_ready, increment_count=False)
    mbarrier.arrive(q_ready)


@gluon.jit
def _copy_queries(q, item, iteration, lists, smem, HAS_SINK: gl.constexpr):
    mbarrier.wait(smem.barriers.q_free, (iteration & 1) ^ 1)
    copy_half_queries(q, item, iteration, LEFT, lists, smem, HAS_SINK)
    copy_half_queries(q, item, iteration, RIGHT, lists, smem, HAS_SINK)


@gluon.jit
def copy_items(q, rows, lists, items, smem, HAS_SINK: gl.constexpr):
    """Run as one partition: fill the buffers for one item after the other.

    Halves of blocks are copied in the order of their use; rows that do not exist become zeros. The
    queries of an item are copied after the item's first keys, so that these keys need not wait for
    the end of the previous item. The MMA partitions copy the queries of the first item, because
    they would wait anyway. List entries are loaded while earlier copies run.
    """
    kv_smem, kv_valid_smem = smem.kv, smem.kv_valid
    kv_ready, kv_free = smem.barriers.kv_ready, smem.barriers.kv_free
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
            mbarrier.wait(kv_free[LEFT][EVEN], phase)
            kv_valid_smem.index(EVEN).store(even)
            _copy(EVEN, LEFT, phase, even, rows, kv_smem, kv_ready, kv_free)
            mbarrier.wait(kv_free[RIGHT][ODD], phase)
            kv_valid_smem.index(ODD).store(odd)
            _copy(ODD, RIGHT, phase, odd, rows, kv_smem, kv_ready, kv_free)
            _copy(EVEN, RIGHT, phase, even, rows, kv_smem, kv_ready, kv_free)
            if (block == 0) & (iteration > 0):
                _copy_queries(q, item, iteration, lists, smem, HAS_SINK)
            _copy(ODD, LEFT, phase, odd, rows, kv_smem, kv_ready, kv_free)
            pair += 1
        next_even = next_item_even
        next_odd = next_item_odd
        item = next_item
        iteration += 1
