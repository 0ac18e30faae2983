"""In-kernel split-KV tile scheduler: each program derives its work tile from all lengths.

No schedule is launched, and a batch of contexts of different length takes as long as their sum.
Every warp computes the same, as it would wait longer for the others; they share the candidates for
the size of a split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.core import tiles

_SIZES, _STEPS = gl.constexpr(tiles.SPLIT_SIZES), gl.constexpr(tiles.SPLIT_STEPS)
_COMBINE, _EXTRA = gl.constexpr(tiles.COMBINE_TILES), gl.constexpr(tiles.EXTRA_SPLIT_TILES)
_START, _CLASSES = gl.constexpr(tiles.START_TILES), gl.constexpr(tiles.CLASSES)
_COLUMNS = gl.constexpr(tiles.COMBINE_COLUMNS)
_MOST_TILES = gl.constexpr(2**15)
"""Blocks of each list of a token that count: costs are then less than _NEVER, and splits by way of
float32 exact."""

_NEVER = gl.constexpr(2**24)


@gluon.jit
def _plus(left, right):
    return left + right


@gluon.jit
def _loaded(values, lane, num_tokens):
    first, step = values
    return gl.load(first + lane.to(gl.int64) * step, mask=lane < num_tokens, other=0)


@gluon.jit
def _tiles(found, width, TILE: gl.constexpr):
    counted = gl.minimum(gl.minimum(gl.maximum(found, 0), width), _MOST_TILES * TILE)
    return (counted + TILE - 1) // TILE


@gluon.jit
def _extra_splits(tiles, size):
    """Splits of ``size`` blocks or less, but for the first one."""
    return ((tiles.to(gl.float32) - 0.5) * (1.0 / size.to(gl.float32))).to(gl.int32)


@gluon.jit
def _size(index, mean, longest):
    """The candidates: from the mean to 12 times as much, four per power of two, and at last one
    that leaves all tokens whole."""
    size = ((mean * (_STEPS + index % _STEPS) << (index // _STEPS)) + _STEPS - 1) // _STEPS
    return gl.where(index == _SIZES - 1, longest, gl.minimum(size, longest))


@gluon.jit
def _best_size(tiles, total, longest, num_tokens, wave, programs, BOTH: gl.constexpr):
    """The cheapest size whose extra splits fit; the smallest of several such.

    A combine has a cost, and, beyond one wave, the start of each work tile. All programs wait for
    this: no more code than has to be."""
    index = gl.arange(0, _SIZES, gl.SliceLayout(1, BOTH))
    mean = gl.maximum((total + wave - 1) // wave, 1)
    sizes = _size(index, mean, longest)
    extra = gl.sum(_extra_splits(tiles[None, :], sizes[:, None]), 1)
    shared = total + _START * (num_tokens + extra - wave)
    cost = gl.maximum(sizes * wave, shared) + gl.where(extra > 0, _COMBINE, 0) * wave
    capacity = gl.maximum(programs - num_tokens, 0)
    cost = gl.where(extra <= capacity, cost + _EXTRA * extra, _NEVER)
    return _size(gl.min(cost * _SIZES + index, 0) % _SIZES, mean, longest)


@gluon.jit
def schedule_by_lengths(
    place, swa, extra, requests, widths, num_tokens, wave, combine_list,
    TOKENS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The work tile of this program: its token, or ``num_tokens`` for none, which split of how
    many, and the first partial result of the token. ``place``: its number, of how many programs,
    and whether it has the first tile of heads.

    ``combine_list`` is written: how many tokens have several splits, and of each the token, its
    splits and its first partial result. ``swa``, ``extra`` and ``requests`` are the lengths and
    the rows of tables of all tokens with their strides, ``widths`` the widths of the lists and the
    number of rows, ``wave`` the programs that run at once, TILE the keys of a block. What a program
    reads for itself later has arrived with them."""
    # sizes by tokens: a warp has a quarter of the sizes and all of up to TOKENS tokens
    BOTH: gl.constexpr = gl.BlockedLayout([_SIZES // 4, TOKENS // 32], [1, 32], [4, 1], [1, 0])
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, BOTH))
    request = _loaded(requests, lane, num_tokens)
    tiles = _tiles(_loaded(extra, lane, num_tokens), widths[1], TILE)
    tiles = gl.where((request >= 0) & (request < widths[2]), tiles, 0)
    tiles += _tiles(_loaded(swa, lane, num_tokens), widths[0], TILE)
    tiles = gl.minimum(tiles, _MOST_TILES)
    longest, total = gl.maximum(gl.max(tiles, 0), 1), gl.sum(tiles, 0)
    number, programs, leads = place
    several, token = number * 0, gl.minimum(number, num_tokens)
    split, count, first = several, several + 1, several
    # else splits and their combine cost no less than the longest token, and no order is better
    if (longest - _COMBINE - 1) * gl.maximum(wave, num_tokens) >= total:
        size = _best_size(tiles, total, longest, num_tokens, wave, programs, BOTH)
        several, row, token, split, count, first = _work_tile(
            tiles, size, number, programs, num_tokens, wave, TOKENS, BOTH
        )
        listed = leads & (token < num_tokens) & (split == 0) & (count > 1)
        _list_split_token(combine_list, row, token, count, first, listed)
    gl.store(combine_list, several, mask=leads & (number == 0))
    return token.to(gl.int64), split, count, first


@gluon.jit
def _class(tiles, size):
    """How short a token is: 0 if it has several splits of that size."""
    shares = tiles * (_CLASSES - 2) // size
    return gl.where(tiles > size, 0, _CLASSES - 1 - gl.minimum(shares, _CLASSES - 2))


@gluon.jit
def _work_tile(
    tiles, size, number, programs, num_tokens, wave,
    TOKENS: gl.constexpr, BOTH: gl.constexpr,
):  # fmt: skip
    """How many tokens have several splits, and how many of them are before the one of a program;
    then what ``schedule_by_lengths`` returns. Splits are in the order of tokens;
    beyond one wave the longer tokens come first, by classes."""
    LINE: gl.constexpr = gl.BlockedLayout([TOKENS // 32], [32], [4], [0])  # as scans want it
    lane = gl.arange(0, TOKENS, LINE)
    of_token = gl.convert_layout(tiles, LINE)
    more = _extra_splits(of_token, size)
    here, local = gl.where(lane < num_tokens, more + 1, 0), number
    if programs > wave:
        chosen, before = _class_of(tiles, size, number, num_tokens, TOKENS, BOTH)
        here = gl.where(_class(of_token, size) == chosen, here, 0)
        local = number - before
    past = gl.where((lane < num_tokens) & (gl.associative_scan(here, 0, _plus) <= local), 1, 0)
    several = gl.where(more > 0, 2**20, 0)
    packed = gl.sum(several + past, 0)
    with_several, token = packed >> 20, packed % 1024
    count = gl.sum(gl.where(lane == token, more, 0), 0) + 1
    packed = gl.sum(gl.where(lane < token, several + more * 1024 + here, 0), 0)
    row, skipped, split = packed >> 20, (packed >> 10) % 1024, local - packed % 1024
    return with_several, row, token, split, count, row + skipped


@gluon.jit
def _class_of(tiles, size, number, num_tokens, TOKENS: gl.constexpr, BOTH: gl.constexpr):
    """The class of a program's token, _CLASSES for none, and the splits of those before it."""
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, BOTH))
    index = gl.arange(0, _CLASSES, gl.SliceLayout(1, BOTH))
    splits = gl.where(lane < num_tokens, _extra_splits(tiles, size) + 1, 0)
    as_long = _class(tiles, size)[None, :] <= index[:, None]
    through = gl.sum(gl.where(as_long, splits[None, :], 0), 1)
    last = gl.max(gl.where(through <= number, through * (2 * _CLASSES) + index + 1, 0), 0)
    return last % (2 * _CLASSES), last // (2 * _CLASSES)


@gluon.jit
def _list_split_token(combine_list, row, token, count, first, wanted):
    """A token of several splits, to the list of those that are combined."""
    entry = combine_list + (row + 1) * _COLUMNS
    gl.store(entry, token, mask=wanted)
    gl.store(entry + 1, count, mask=wanted)
    gl.store(entry + 2, first, mask=wanted)


@gluon.jit
def schedule_evenly(place, splits, combine_list):
    """The same where every token has as many splits, to be combined if there are several."""
    number, programs, leads = place
    token, split = number // splits, number % splits
    lists = leads & (split == 0)
    tokens = gl.where(splits > 1, programs // splits, 0)
    gl.store(combine_list, tokens, mask=lists & (number == 0))
    first = token * splits
    _list_split_token(combine_list, token, token, splits, first, lists & (splits > 1))
    return token.to(gl.int64), split, splits, first
