"""Sparse MLA decode in Gluon: producer, matrix products and epilogue in warp-specialised
partitions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4_ops.kernels.common.dependent_launch import wait_for_previous_kernel
from dsv4_ops.kernels.common.hopper.epilogue import (
    Output,
    Partial,
    Rotation,
    copy_sinks,
    finish_left,
    finish_partial_left,
    finish_partial_right,
    finish_right,
)
from dsv4_ops.kernels.common.hopper.mma import (
    HEADS,
    KEYS,
    WIDTH,
    HeadRows,
    allocate,
    attend_left,
    attend_right,
    load_half_queries,
)
from dsv4_ops.kernels.common.hopper.tile_scheduler import (
    Batch,
    Grid,
    PerToken,
    schedule_by_lengths,
    schedule_evenly,
)
from dsv4_ops.kernels.common.sizes import SIZES
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import (
    HALF,
    ROW_LAYOUT,
    LocatedRows,
    dequantise,
)


@aggregate
class SplitWork:
    """Key blocks of a split: ``first`` to ``stop``, counted through the window's list and then the
    extra list. The window's list has ``swa_tiles`` blocks, of which ``window_blocks`` are in the
    split."""

    first: Scalar
    stop: Scalar
    swa_tiles: Scalar
    window_blocks: Scalar


@aggregate
class Rows:
    """A token's list of rows in one cache: address, stride and number of the cache's pages, and
    rows per page; address, stride and length of the list."""

    cache: Scalar
    page_stride: Scalar
    blocks: Scalar
    block_size: gl.constexpr
    list_start: Scalar
    step: Scalar
    length: Scalar


@aggregate
class Sources:
    """Keys of a split, in rows of ``row_bytes``. With ``paged``, the extra list is a row of the
    block table."""

    split: SplitWork
    swa: Rows
    extra: Rows
    has_extra: gl.constexpr
    paged: gl.constexpr
    row_bytes: gl.constexpr


@gluon.jit
def count_blocks(first, stop, swa_tiles):
    """Return the number of blocks of a split, and how many of them lie in the window. No block
    crosses the window's end."""
    in_window = gl.maximum(gl.minimum(stop, swa_tiles) - first, 0)
    return in_window + gl.maximum(stop - gl.maximum(first, swa_tiles), 0), in_window


@gluon.jit
def _columns(split, block, FIRST: gl.constexpr):
    """Return the list columns of half a block of keys, whether their list is the window's list
    (else the extra list), and the column at which the split ends in that list."""
    first, stop, swa_tiles = split.first, split.stop, split.swa_tiles
    in_window = block < split.window_blocks
    extra_block = gl.maximum(first, swa_tiles) + (block - split.window_blocks)
    list_block = gl.where(in_window, first + block, extra_block)
    first_block = gl.where(in_window, 0, swa_tiles)
    end = gl.where(in_window, gl.minimum(stop, swa_tiles), stop)
    column = (list_block - first_block) * KEYS + FIRST + gl.arange(0, HALF, ROW_LAYOUT)
    return column, in_window, (end - first_block) * KEYS


@gluon.jit
def load_entries(sources, block, FIRST: gl.constexpr):
    """Load the list entries of half a block, from its key FIRST on."""
    swa, extra = sources.swa, sources.extra
    column, in_window, end = _columns(sources.split, block, FIRST)
    list_start, step, length = swa.list_start, swa.step, swa.length
    offset = column
    if sources.has_extra:
        list_start = gl.where(in_window, list_start, extra.list_start)
        step = gl.where(in_window, step, extra.step)
        length = gl.where(in_window, length, extra.length)
        if sources.paged:
            offset = gl.where(in_window, column, column // extra.block_size)
    mask = column < gl.minimum(length, end)
    return gl.load(list_start + offset.to(gl.int64) * step, mask=mask, other=-1)


@gluon.jit
def locate_rows(sources, block, FIRST: gl.constexpr, entries):
    """Return the ``LocatedRows`` of list entries. Entries are unsigned here, so that negative slots
    lie past every block, and divisions are shifts."""
    swa, extra = sources.swa, sources.extra
    entries = entries.to(gl.uint32)
    cache, page_stride, blocks = swa.cache, swa.page_stride, swa.blocks
    page, row = entries // swa.block_size, entries % swa.block_size
    block_size = gl.to_tensor(swa.block_size)
    if sources.has_extra:
        column, in_window, _ = _columns(sources.split, block, FIRST)
        if sources.paged:
            page = gl.where(in_window, page, entries)
            row = gl.where(in_window, row, (column % extra.block_size).to(gl.uint32))
        else:
            page = gl.where(in_window, page, entries // extra.block_size)
            row = gl.where(in_window, row, entries % extra.block_size)
        cache = gl.where(in_window, cache, extra.cache)
        page_stride = gl.where(in_window, page_stride, extra.page_stride)
        blocks = gl.where(in_window, blocks, extra.blocks)
        block_size = gl.where(in_window, swa.block_size, extra.block_size)
    valid = page < blocks
    page = gl.where(valid, page, 0).to(gl.int64)
    row = gl.where(valid, row.to(gl.int32), -1)
    return LocatedRows(cache + page * page_stride, row, block_size * sources.row_bytes)


_LOG2_E = gl.constexpr(1.4426950408889634)

MMA_REGISTERS, DEQUANT_REGISTERS = gl.constexpr(160), gl.constexpr(152)
"""Registers per thread of the right MMA partition and of the dequantising partition. The left MMA
partition, which has the logits, gets the rest."""


@gluon.jit
def attend_and_finish_left(
    q, smem, blocks, attn_sink, output, partial, splits, heads,
    SCALE: gl.constexpr, HAS_SINK: gl.constexpr,
):  # fmt: skip
    """Attend, and write the left half of the result or, with several splits, of a partial
    result."""
    if HAS_SINK:
        if splits == 1:
            copy_sinks(smem.per_head.index(0), attn_sink, output.first_head, heads)
            async_copy.commit_group()
    load_half_queries(smem, q, heads, 0)
    mbarrier.wait(smem.barriers.q_ready, 0)
    acc, row_max, row_sum = attend_left(blocks, SCALE, smem)
    if splits == 1:
        finish_left(acc, row_max, row_sum, blocks, output, heads, smem, HAS_SINK)
    else:
        finish_partial_left(acc, row_max, row_sum, blocks, partial, heads, smem)


@gluon.jit
def attend_and_finish_right(
    q, smem, blocks, output, partial, rotation, splits, heads, INVERSE_ROPE: gl.constexpr
):
    """Attend, and write the right half."""
    load_half_queries(smem, q, heads, WIDTH)
    position = gl.to_tensor(0).to(gl.int64)
    if INVERSE_ROPE:
        position = gl.load(rotation.position)  # a load at the end would delay the results
    acc = attend_right(blocks, smem)
    if splits == 1:
        finish_right(acc, blocks, output, rotation, position, heads, smem, INVERSE_ROPE)
    else:
        finish_partial_right(acc, blocks, partial, heads, smem)


@gluon.jit
def _dequantise_rows(sources, blocks, smem, SCALE_BYTES: gl.constexpr):
    dequantise(load_entries, locate_rows, SCALE_BYTES, sources, blocks, smem)


@gluon.jit
def _tiles(length):
    """Return the number of key blocks of a list, without an overflow for any int32 length."""
    return length // KEYS + gl.where(length % KEYS > 0, 1, 0)


@gluon.jit(do_not_specialize=SIZES)
def hopper_split_keys_kernel(
    q, q_stride, q_head_stride, q_dim_stride,
    out, lse, partial, partial_lse, partial_scale, attn_sink,
    swa_cache, swa_page_stride, swa_blocks,
    swa_indices, swa_stride, swa_column_stride,
    swa_lens, swa_len_stride, swa_width,
    extra_cache, extra_page_stride, extra_blocks,
    extra_indices, extra_stride, extra_column_stride,
    extra_lens, extra_len_stride, extra_width,
    req_indices, req_stride, num_reqs,
    plan, plan_stride, plan_column_stride,
    positions, positions_stride,
    cos_sin_cache, num_positions,
    capacity, num_tokens, num_heads, splits,
    combine_list, by_lengths, wave,
    SOFTMAX_SCALE: gl.constexpr, SWA_BLOCK_SIZE: gl.constexpr, EXTRA_BLOCK_SIZE: gl.constexpr,
    HAS_EXTRA: gl.constexpr, PAGED: gl.constexpr, HAS_SINK: gl.constexpr, HAS_PLAN: gl.constexpr,
    SCHEDULED: gl.constexpr, LANES: gl.constexpr, INVERSE_ROPE: gl.constexpr, ROW: gl.constexpr,
    SCALE_BYTES: gl.constexpr,
):  # fmt: skip
    """Compute the attention of one token over one split of its keys. The arguments are as in
    ``split_keys_kernel``; ``q_dim_stride`` is 1, and a split is a whole number of blocks. If the
    kernel schedules tokens by their lengths, LANES is at least the number of tokens. A program
    returns early if its row of the plan holds no split."""
    wait_for_previous_kernel()
    if HAS_PLAN:
        tile = plan + gl.program_id(0).to(gl.int64) * plan_stride
        token = gl.load(tile).to(gl.int64)
        split = gl.load(tile + plan_column_stride)
        splits = gl.load(tile + 2 * plan_column_stride)
        first = gl.load(tile + 3 * plan_column_stride)
        partials_fit = (splits == 1) | ((first >= 0) & (first <= capacity - splits))
        valid = (token >= 0) & (token < num_tokens) & (split >= 0) & (split < splits) & partials_fit
        if not valid:
            return
        partial_index = first + split
    elif SCHEDULED:
        splits = gl.to_tensor(splits)  # ``splits`` may be a constant
        grid = Grid(gl.program_id(0), gl.num_programs(0), gl.program_id(1) == 0)
        if by_lengths > 0:
            batch = Batch(
                PerToken(swa_lens, swa_len_stride), PerToken(extra_lens, extra_len_stride),
                PerToken(req_indices, req_stride), swa_width, extra_width, num_reqs, num_tokens,
            )  # fmt: skip
            token, split, splits, first = schedule_by_lengths(
                grid, batch, wave, combine_list, LANES, KEYS
            )
        else:
            token, split, splits, first = schedule_evenly(grid, splits, combine_list)
        if token >= num_tokens:
            return
        partial_index = gl.where(splits > 1, first + split, 0)
    else:
        token = (gl.program_id(0) // splits).to(gl.int64)
        split = gl.program_id(0) % splits
        partial_index = gl.program_id(0)
    swa_len = gl.load(swa_lens + token * swa_len_stride)
    swa_len = gl.minimum(gl.maximum(swa_len, 0), swa_width)
    extra_len = swa_len * 0
    request = token
    if HAS_EXTRA:
        extra_len = gl.load(extra_lens + token * extra_len_stride)
        extra_len = gl.minimum(gl.maximum(extra_len, 0), extra_width)
        if PAGED:
            request = gl.load(req_indices + token * req_stride).to(gl.int64)
            extra_len = gl.where((request >= 0) & (request < num_reqs), extra_len, 0)
            request = gl.where(extra_len > 0, request, 0)
    swa_tiles = _tiles(swa_len)
    tiles = (swa_tiles + _tiles(extra_len)).to(gl.int64)
    first_tile = (tiles * split // splits).to(gl.int32)
    stop = (tiles * (split + 1) // splits).to(gl.int32)
    blocks, window_blocks = count_blocks(first_tile, stop, swa_tiles)

    smem = allocate()
    swa_list = swa_indices + token * swa_stride
    swa = Rows(
        swa_cache, swa_page_stride, swa_blocks, SWA_BLOCK_SIZE,
        swa_list, swa_column_stride, swa_len,
    )  # fmt: skip
    extra_list = extra_indices + (request if PAGED else token) * extra_stride
    extra = Rows(
        extra_cache, extra_page_stride, extra_blocks, EXTRA_BLOCK_SIZE,
        extra_list, extra_column_stride, extra_len,
    )  # fmt: skip
    work = SplitWork(first_tile, stop, swa_tiles, window_blocks)
    sources = Sources(work, swa, extra, HAS_EXTRA, PAGED, ROW)
    first_head = gl.program_id(1) * HEADS
    row = token * num_heads
    partial_row = partial_index.to(gl.int64) * num_heads
    heads = num_heads - first_head  # only this many heads are read and written
    queries = HeadRows(
        q + token * q_stride + first_head.to(gl.int64) * q_head_stride, q_head_stride
    )
    output = Output(out, lse, row, first_head)
    partial_output = Partial(partial, partial_lse, partial_scale, partial_row, first_head)
    rotation = Rotation(cos_sin_cache, positions + token * positions_stride, num_positions)
    SCALE: gl.constexpr = SOFTMAX_SCALE * _LOG2_E
    gl.warp_specialize(
        [
            (
                attend_and_finish_left,
                (
                    queries, smem, blocks, attn_sink, output, partial_output, splits, heads,
                    SCALE, HAS_SINK,
                ),
            ),
            (
                attend_and_finish_right,
                (
                    queries, smem, blocks, output, partial_output, rotation, splits, heads,
                    INVERSE_ROPE,
                ),
            ),
            (_dequantise_rows, (sources, blocks, smem, SCALE_BYTES)),
        ],
        [4, 4],
        [MMA_REGISTERS, DEQUANT_REGISTERS],
    )  # fmt: skip
