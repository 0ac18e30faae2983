"""How programs of decode on Hopper find their piece of a batch by themselves: all lens are few
numbers, which each program reads, and from which it cuts the batch as all others do. No launch is
needed for a plan, and contexts of different length take as long as their sum.

Every warp does the same, as it would wait longer for the others; they share the sizes of pieces
that are looked at."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.core import tiles
from dsv4_ops.kernels.sparse_mla.hopper.dequant_producer import KEYS

_SIZES, _STEPS = gl.constexpr(tiles.CUT_SIZES), gl.constexpr(tiles.CUT_STEPS)
_JOIN, _FURTHER = gl.constexpr(tiles.JOIN_TILES), gl.constexpr(tiles.FURTHER_TILES)
_START, _CLASSES = gl.constexpr(tiles.START_TILES), gl.constexpr(tiles.CLASSES)
_COLUMNS = gl.constexpr(tiles.JOIN_COLUMNS)
_MOST_TILES = gl.constexpr(2**15)
"""Blocks of each list of a token that its cut goes by: times are less than _NEVER then, and pieces
by way of float32 are exact."""

_NEVER = gl.constexpr(2**24)


@gluon.jit
def _plus(left, right):
    return left + right


@gluon.jit
def _loaded(values, lane, num_tokens):
    first, step = values
    return gl.load(first + lane.to(gl.int64) * step, mask=lane < num_tokens, other=0)


@gluon.jit
def _tiles(found, width):
    counted = gl.minimum(gl.minimum(gl.maximum(found, 0), width), _MOST_TILES * KEYS)
    return (counted + KEYS - 1) // KEYS


@gluon.jit
def _pieces(tiles, size):
    """Pieces of ``size`` blocks or less, less the first one."""
    return ((tiles.to(gl.float32) - 0.5) * (1.0 / size.to(gl.float32))).to(gl.int32)


@gluon.jit
def _size(index, mean, longest):
    """The sizes that are looked at: the mean and up to 12 times as much, of each power of two four
    steps, and at last one that leaves all tokens whole."""
    size = ((mean * (_STEPS + index % _STEPS) << (index // _STEPS)) + _STEPS - 1) // _STEPS
    return gl.where(index == _SIZES - 1, longest, gl.minimum(size, longest))


@gluon.jit
def _size_of_pieces(tiles, total, longest, num_tokens, programs, BOTH: gl.constexpr):
    """Of the sizes that give no more further pieces than there is room for the one that takes the
    least time, with that of a join and, of more pieces than run at once, that of their starts; the
    smallest of several such. All programs wait for this: no more code than has to be."""
    index = gl.arange(0, _SIZES, gl.SliceLayout(1, BOTH))
    mean = gl.maximum((total + programs - 1) // programs, 1)
    sizes = _size(index, mean, longest)
    further = gl.sum(_pieces(tiles[None, :], sizes[:, None]), 1)
    shared = total + _START * (num_tokens + further - programs)
    time = gl.maximum(sizes * programs, shared) + gl.where(further > 0, _JOIN, 0) * programs
    room = gl.maximum(gl.num_programs(0) - num_tokens, 0)
    time = gl.where(further <= room, time + _FURTHER * further, _NEVER)
    return _size(gl.min(time * _SIZES + index, 0) % _SIZES, mean, longest)


@gluon.jit
def cut_batch(swa, extra, requests, widths, num_tokens, programs, joins, TOKENS: gl.constexpr):
    """The token of this program or ``num_tokens`` for none, which of its pieces it is, of how many,
    and the first partial result of the token. What is to be joined is listed in ``joins``: how many
    tokens, and of each the token, its pieces and its first partial result. ``swa``, ``extra`` and
    ``requests`` are the lens and the rows of tables of all tokens with their strides, ``widths``
    those of the lists and the number of rows, ``programs`` those that run at once. What a program
    reads for itself later has arrived with them."""
    # sizes by tokens: a warp has a quarter of the sizes and all of up to TOKENS tokens
    BOTH: gl.constexpr = gl.BlockedLayout([_SIZES // 4, TOKENS // 32], [1, 32], [4, 1], [1, 0])
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, BOTH))
    request = _loaded(requests, lane, num_tokens)
    tiles = _tiles(_loaded(extra, lane, num_tokens), widths[1])
    tiles = gl.where((request >= 0) & (request < widths[2]), tiles, 0)
    tiles = gl.minimum(tiles + _tiles(_loaded(swa, lane, num_tokens), widths[0]), _MOST_TILES)
    longest, total = gl.maximum(gl.max(tiles, 0), 1), gl.sum(tiles, 0)
    number = gl.program_id(0)
    joined, token = number * 0, gl.minimum(number, num_tokens)
    split, count, first = joined, joined + 1, joined
    # else pieces and their join take no less than the longest token, and no order is better
    if (longest - _JOIN - 1) * gl.maximum(programs, num_tokens) >= total:
        size = _size_of_pieces(tiles, total, longest, num_tokens, programs, BOTH)
        joined, place, token, split, count, first = _piece(
            tiles, size, number, num_tokens, programs, TOKENS, BOTH
        )
        listed = (gl.program_id(1) == 0) & (token < num_tokens) & (split == 0) & (count > 1)
        _list_join(joins, place, token, count, first, listed)
    gl.store(joins, joined, mask=(gl.program_id(1) == 0) & (number == 0))
    return token.to(gl.int64), split, count, first


@gluon.jit
def _class(tiles, size):
    """How short a token is: 0 if it has several pieces of that size."""
    shares = tiles * (_CLASSES - 2) // size
    return gl.where(tiles > size, 0, _CLASSES - 1 - gl.minimum(shares, _CLASSES - 2))


@gluon.jit
def _piece(tiles, size, number, num_tokens, programs, TOKENS: gl.constexpr, BOTH: gl.constexpr):
    """How many tokens are to be joined and how many of them are before the one of a program; then
    what ``cut_batch`` returns. Pieces of a token follow each other, tokens theirs; where not all
    run at once the longer tokens come first, by classes."""
    LINE: gl.constexpr = gl.BlockedLayout([TOKENS // 32], [32], [4], [0])  # as scans want it
    lane = gl.arange(0, TOKENS, LINE)
    of_token = gl.convert_layout(tiles, LINE)
    more = _pieces(of_token, size)
    here, local = gl.where(lane < num_tokens, more + 1, 0), number
    if gl.num_programs(0) > programs:
        chosen, before = _class_of(tiles, size, number, num_tokens, TOKENS, BOTH)
        here = gl.where(_class(of_token, size) == chosen, here, 0)
        local = number - before
    past = gl.where((lane < num_tokens) & (gl.associative_scan(here, 0, _plus) <= local), 1, 0)
    several = gl.where(more > 0, 2**20, 0)
    packed = gl.sum(several + past, 0)
    joined, token = packed >> 20, packed % 1024
    count = gl.sum(gl.where(lane == token, more, 0), 0) + 1
    packed = gl.sum(gl.where(lane < token, several + more * 1024 + here, 0), 0)
    place, skipped, split = packed >> 20, (packed >> 10) % 1024, local - packed % 1024
    return joined, place, token, split, count, place + skipped


@gluon.jit
def _class_of(tiles, size, number, num_tokens, TOKENS: gl.constexpr, BOTH: gl.constexpr):
    """The class of a program's token, _CLASSES for none, and the pieces of those before it."""
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, BOTH))
    index = gl.arange(0, _CLASSES, gl.SliceLayout(1, BOTH))
    pieces = gl.where(lane < num_tokens, _pieces(tiles, size) + 1, 0)
    as_long = _class(tiles, size)[None, :] <= index[:, None]
    through = gl.sum(gl.where(as_long, pieces[None, :], 0), 1)
    last = gl.max(gl.where(through <= number, through * (2 * _CLASSES) + index + 1, 0), 0)
    return last % (2 * _CLASSES), last // (2 * _CLASSES)


@gluon.jit
def _list_join(joins, place, token, count, first, wanted):
    """The row of a token in the list of joins."""
    row = joins + (place + 1) * _COLUMNS
    gl.store(row, token, mask=wanted)
    gl.store(row + 1, count, mask=wanted)
    gl.store(row + 2, first, mask=wanted)


@gluon.jit
def cut_tokens(splits, joins):
    """The same where every token has as many splits, which are to be joined if there are
    several."""
    number = gl.program_id(0)
    token, split = number // splits, number % splits
    lists = (gl.program_id(1) == 0) & (split == 0)
    tokens = gl.where(splits > 1, gl.num_programs(0) // splits, 0)
    gl.store(joins, tokens, mask=lists & (number == 0))
    first = token * splits
    _list_join(joins, token, token, splits, first, lists & (splits > 1))
    return token.to(gl.int64), split, splits, first
