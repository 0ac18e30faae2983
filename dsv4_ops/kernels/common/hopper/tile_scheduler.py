"""In-kernel split-KV tile scheduler. Each program derives its work tile from the lengths of all
tokens; a work tile is one split of one token.

The scheduler needs no launch of its own. With the scheduler, the time of a ragged batch depends on
the sum of the contexts, not on the longest context. Every warp computes the whole schedule, which
is faster than waiting for another warp. Only the candidate sizes of a split are divided among the
warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.core import tiles
from dsv4_ops.kernels.common.triton_compat import Scalar, aggregate

_SIZES, _STEPS = gl.constexpr(tiles.SPLIT_SIZES), gl.constexpr(tiles.SPLIT_STEPS)
_COMBINE, _EXTRA = gl.constexpr(tiles.COMBINE_TILES), gl.constexpr(tiles.EXTRA_SPLIT_TILES)
_START, _CLASSES = gl.constexpr(tiles.START_TILES), gl.constexpr(tiles.CLASSES)
_LIST_COLUMNS = gl.constexpr(tiles.COMBINE_COLUMNS)
_MOST_TILES = gl.constexpr(2**15)
"""Maximum number of key blocks that are counted for a token. With this limit, costs stay below
_NEVER, and numbers of splits are exact in float32."""

_NEVER = gl.constexpr(2**24)


@aggregate
class Grid:
    """Index of this program, number of programs, and whether this program has the first tile of
    heads. Programs with the first tile write the combine list."""

    program: Scalar
    programs: Scalar
    is_writer: Scalar


@aggregate
class PerToken:
    """One value per token: the address of the first value, and the stride."""

    start: Scalar
    stride: Scalar


@aggregate
class Batch:
    """For each token, the lengths of its two lists (window rows and extra rows) and its request
    index; for all tokens, the widths of the two lists, the number of requests and the number of
    tokens."""

    swa_lens: PerToken
    extra_lens: PerToken
    requests: PerToken
    swa_width: Scalar
    extra_width: Scalar
    num_reqs: Scalar
    num_tokens: Scalar


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _load_per_token(values, lane, num_tokens):
    return gl.load(
        values.start + lane.to(gl.int64) * values.stride, mask=lane < num_tokens, other=0
    )


@gluon.jit
def _tiles(length, width, TILE: gl.constexpr):
    keys = gl.minimum(gl.minimum(gl.maximum(length, 0), width), _MOST_TILES * TILE)
    return (keys + TILE - 1) // TILE


@gluon.jit
def _extra_splits(tiles, size):
    """Return the number of splits beyond the first, if a split has up to ``size`` blocks."""
    return ((tiles.to(gl.float32) - 0.5) * (1.0 / size.to(gl.float32))).to(gl.int32)


@gluon.jit
def _candidate_size(index, mean, longest):
    """Return a candidate size of a split. There are four candidates per power of two, from
    ``mean``, the mean number of blocks per program, to 12 times ``mean``. The last candidate splits
    no token."""
    size = ((mean * (_STEPS + index % _STEPS) << (index // _STEPS)) + _STEPS - 1) // _STEPS
    return gl.where(index == _SIZES - 1, longest, gl.minimum(size, longest))


@gluon.jit
def _best_size(tiles, total, longest, num_tokens, wave, programs, LAYOUT: gl.constexpr):
    """Return the cheapest size of a split for which there are enough free programs; on a tie, the
    smallest such size.

    An extra split and a combine cost time. Beyond one wave, the start of a work tile costs time
    too. All programs wait for this function, so it is short.
    """
    index = gl.arange(0, _SIZES, gl.SliceLayout(1, LAYOUT))
    mean = gl.maximum((total + wave - 1) // wave, 1)
    sizes = _candidate_size(index, mean, longest)
    extra = gl.sum(_extra_splits(tiles[None, :], sizes[:, None]), 1)
    shared = total + _START * (num_tokens + extra - wave)
    cost = gl.maximum(sizes * wave, shared) + gl.where(extra > 0, _COMBINE, 0) * wave
    capacity = gl.maximum(programs - num_tokens, 0)
    cost = gl.where(extra <= capacity, cost + _EXTRA * extra, _NEVER)
    return _candidate_size(gl.min(cost * _SIZES + index, 0) % _SIZES, mean, longest)


@gluon.jit
def schedule_by_lengths(
    grid, batch, wave, combine_list, TOKENS: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """Return this program's work tile: token (``num_tokens`` if none), split, number of splits, and
    the token's first partial result. The programs with the first tile of heads write
    ``combine_list``: the number of tokens with several splits; then, for each such token, the
    token, the number of splits and the first partial result. The loads of all lengths also bring
    the lengths of this program's token into the cache.

    Args:
        grid: A ``Grid``.
        batch: A ``Batch``.
        wave: Programs per tile of heads that run at once.
        combine_list: int32 [1 + tokens, COMBINE_COLUMNS].
        TOKENS: A power of two, at least the number of tokens.
        TILE: Keys per block.
    """
    # [sizes, tokens]: a warp holds a quarter of the sizes and all tokens
    LAYOUT: gl.constexpr = gl.BlockedLayout([_SIZES // 4, TOKENS // 32], [1, 32], [4, 1], [1, 0])
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    num_tokens = batch.num_tokens
    request = _load_per_token(batch.requests, lane, num_tokens)
    extra_lens = _load_per_token(batch.extra_lens, lane, num_tokens)
    tiles = _tiles(extra_lens, batch.extra_width, TILE)
    tiles = gl.where((request >= 0) & (request < batch.num_reqs), tiles, 0)
    tiles += _tiles(_load_per_token(batch.swa_lens, lane, num_tokens), batch.swa_width, TILE)
    tiles = gl.minimum(tiles, _MOST_TILES)
    longest, total = gl.maximum(gl.max(tiles, 0), 1), gl.sum(tiles, 0)
    program, programs, is_writer = grid.program, grid.programs, grid.is_writer
    num_split_tokens, token = program * 0, gl.minimum(program, num_tokens)
    split, splits, first_partial = num_split_tokens, num_split_tokens + 1, num_split_tokens
    # split tokens only if splits and a combine take less time than the longest token
    if (longest - _COMBINE - 1) * gl.maximum(wave, num_tokens) >= total:
        size = _best_size(tiles, total, longest, num_tokens, wave, programs, LAYOUT)
        num_split_tokens, list_row, token, split, splits, first_partial = _work_tile(
            tiles, size, program, programs, num_tokens, wave, TOKENS, LAYOUT
        )
        is_listed = is_writer & (token < num_tokens) & (split == 0) & (splits > 1)
        _list_split_token(combine_list, list_row, token, splits, first_partial, is_listed)
    gl.store(combine_list, num_split_tokens, mask=is_writer & (program == 0))
    return token.to(gl.int64), split, splits, first_partial


@gluon.jit
def _class(tiles, size):
    """Return the class of each token: 0 for tokens with several splits. The other classes ascend
    from long to short tokens."""
    shares = tiles * (_CLASSES - 2) // size
    return gl.where(tiles > size, 0, _CLASSES - 1 - gl.minimum(shares, _CLASSES - 2))


@gluon.jit
def _work_tile(
    tiles, size, program, programs, num_tokens, wave,
    TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the number of tokens with several splits, how many of them come before this program's
    token, and the work tile. Programs take splits in the order of tokens; beyond one wave, in the
    order of classes, and within a class in the order of tokens."""
    SCAN_LAYOUT: gl.constexpr = gl.BlockedLayout([TOKENS // 32], [32], [4], [0])
    lane = gl.arange(0, TOKENS, SCAN_LAYOUT)
    token_tiles = gl.convert_layout(tiles, SCAN_LAYOUT)
    extra = _extra_splits(token_tiles, size)
    splits, index = gl.where(lane < num_tokens, extra + 1, 0), program
    if programs > wave:
        program_class, first_program = _class_of(tiles, size, program, num_tokens, TOKENS, LAYOUT)
        splits = gl.where(_class(token_tiles, size) == program_class, splits, 0)
        index = program - first_program
    precedes = gl.where((lane < num_tokens) & (gl.associative_scan(splits, 0, _add) <= index), 1, 0)
    split_token = gl.where(extra > 0, 2**20, 0)
    packed = gl.sum(split_token + precedes, 0)
    num_split_tokens, token = packed >> 20, packed % 1024
    token_splits = gl.sum(gl.where(lane == token, extra, 0), 0) + 1
    packed = gl.sum(gl.where(lane < token, split_token + extra * 1024 + splits, 0), 0)
    list_row, skipped, split = packed >> 20, (packed >> 10) % 1024, index - packed % 1024
    return num_split_tokens, list_row, token, split, token_splits, list_row + skipped


@gluon.jit
def _class_of(tiles, size, program, num_tokens, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the class of a program's token (_CLASSES if none), and the number of splits in earlier
    classes."""
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    index = gl.arange(0, _CLASSES, gl.SliceLayout(1, LAYOUT))
    splits = gl.where(lane < num_tokens, _extra_splits(tiles, size) + 1, 0)
    no_later = _class(tiles, size)[None, :] <= index[:, None]
    stop = gl.sum(gl.where(no_later, splits[None, :], 0), 1)
    packed = gl.max(gl.where(stop <= program, stop * (2 * _CLASSES) + index + 1, 0), 0)
    return packed % (2 * _CLASSES), packed // (2 * _CLASSES)


@gluon.jit
def _list_split_token(combine_list, list_row, token, splits, first_partial, mask):
    """Add a token with several splits to ``combine_list``."""
    entry = combine_list + (list_row + 1) * _LIST_COLUMNS
    gl.store(entry, token, mask=mask)
    gl.store(entry + 1, splits, mask=mask)
    gl.store(entry + 2, first_partial, mask=mask)


@gluon.jit
def schedule_evenly(grid, splits, combine_list):
    """Return what ``schedule_by_lengths`` returns, but with ``splits`` splits for each token."""
    program, programs, is_writer = grid.program, grid.programs, grid.is_writer
    token, split = program // splits, program % splits
    is_first_split = is_writer & (split == 0)
    num_split_tokens = gl.where(splits > 1, programs // splits, 0)
    gl.store(combine_list, num_split_tokens, mask=is_first_split & (program == 0))
    first_partial = token * splits
    is_listed = is_first_split & (splits > 1)
    _list_split_token(combine_list, token, token, splits, first_partial, is_listed)
    return token.to(gl.int64), split, splits, first_partial
