"""How programs of decode on Hopper find their piece of a batch by themselves: all lens are few
numbers, which each program reads, and from which it cuts the batch as all others do. No launch is
needed for a plan, and contexts of different length take as long as their sum.

Every warp does the same, as it would wait longer for the others; they share the sizes of pieces
that are looked at."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.core import tiles
from dsv4_ops.kernels.hopper_rows import KEYS

_MOST = triton.next_power_of_2(tiles.MOST_CUT)
TOKENS = gl.constexpr(_MOST)
_SIZES, _STEPS = gl.constexpr(tiles.CUT_SIZES), gl.constexpr(tiles.CUT_STEPS)
_JOIN = gl.constexpr(tiles.JOIN_TILES)
_COLUMNS = gl.constexpr(tiles.JOIN_COLUMNS)
_MOST_TILES = gl.constexpr(2**15)
"""Blocks of each list of a token that its cut goes by: times are less than _NEVER then, and pieces
by way of float32 are exact."""

_NEVER = gl.constexpr(2**24)
_BOTH = gl.constexpr(gl.BlockedLayout([tiles.CUT_SIZES // 4, _MOST // 32], [1, 32], [4, 1], [1, 0]))
"""Sizes by tokens: a warp has a quarter of the sizes and all tokens."""

_OF_TOKENS, _OF_SIZES = (
    gl.constexpr(gl.SliceLayout(0, _BOTH.value)),
    gl.constexpr(gl.SliceLayout(1, _BOTH.value)),
)
_LINE = gl.constexpr(gl.BlockedLayout([_MOST // 32], [32], [4], [0]))
"""The same of tokens alone, as scans want it."""


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
def _size_of_pieces(tiles, mean, longest, room, programs):
    """Of the sizes that give no more than ``room`` further pieces the one that takes the least
    time, with that of a join; the smallest of several such. All programs wait for this: no more
    code than has to be."""
    index = gl.arange(0, _SIZES, _OF_SIZES)
    sizes = _size(index, mean, longest)
    further = gl.sum(_pieces(tiles[None, :], sizes[:, None]), 1)
    time = (sizes + gl.where(further > 0, _JOIN, 0)) * programs + 3 * further
    time = gl.where(further <= room, time, _NEVER)
    return _size(gl.min(time * _SIZES + index, 0) % _SIZES, mean, longest)


@gluon.jit
def cut_batch(swa, extra, requests, widths, num_tokens, programs, joins):
    """The token of this program or ``num_tokens`` for none, which of its pieces it is, of how many,
    and the first partial result of the token: first pieces of all tokens, then the further ones.
    What is to be joined is listed in ``joins``: how many tokens, and of each the token, its pieces
    and its first partial result. ``swa``, ``extra`` and ``requests`` are the lens and the rows of
    tables of all tokens with their strides, ``widths`` those of the lists and the number of rows.
    What a program reads for itself later has arrived with them."""
    lane = gl.arange(0, TOKENS, _OF_TOKENS)
    request = _loaded(requests, lane, num_tokens)
    tiles = _tiles(_loaded(extra, lane, num_tokens), widths[1])
    tiles = gl.where((request >= 0) & (request < widths[2]), tiles, 0)
    tiles = gl.minimum(tiles + _tiles(_loaded(swa, lane, num_tokens), widths[0]), _MOST_TILES)
    longest = gl.maximum(gl.max(tiles, 0), 1)
    mean = _pieces(gl.sum(tiles, 0), gl.to_tensor(programs)) + 1
    number = gl.program_id(0)
    joined, token = number * 0, gl.minimum(number, num_tokens)
    split, count, first = joined, joined + 1, joined
    if longest > mean + _JOIN:  # else no pieces and their join take less than the longest token
        size = _size_of_pieces(tiles, mean, longest, gl.maximum(programs - num_tokens, 0), programs)
        joined, place, token, split, count, first = _piece(tiles, size, number, num_tokens)
        listed = (gl.program_id(1) == 0) & (number < num_tokens) & (count > 1)
        _list_join(joins, place, token, count, first, listed)
    gl.store(joins, joined, mask=(gl.program_id(1) == 0) & (number == 0))
    return token.to(gl.int64), split, count, first


@gluon.jit
def _piece(tiles, size, number, num_tokens):
    """How many tokens are to be joined and how many of them are before the one of a program; then
    what ``cut_batch`` returns."""
    lane = gl.arange(0, TOKENS, _LINE)
    more = _pieces(gl.convert_layout(tiles, _LINE), size)
    several = gl.where(more > 0, 65536, 0)
    further = number - num_tokens
    past = gl.where((lane < num_tokens) & (gl.associative_scan(more, 0, _plus) <= further), 1, 0)
    packed = gl.sum(several + past, 0)
    joined = packed >> 16
    token = gl.where(further < 0, number, packed & 65535)
    packed = gl.sum(gl.where(lane < token, several + more, 0), 0)
    place, skipped = packed >> 16, packed & 65535
    count = gl.sum(gl.where(lane == token, more, 0), 0) + 1
    split = gl.where(further < 0, 0, further - skipped + 1)
    return joined, place, token, split, count, place + skipped


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
