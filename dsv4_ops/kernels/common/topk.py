"""Map scores to sort keys (integers that have the order of the scores), and find the threshold of
the largest scores."""

import triton
import triton.language as tl

ABSENT_KEY = tl.constexpr(-(2**31))
"""Sort key of a row that does not exist: below the sort key of any score."""

_NAN_KEY = tl.constexpr(-(2**31) + 1)
_SIGN = tl.constexpr(-(2**31))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_OCTAVE = tl.constexpr(2**23)
_OCTAVES = tl.constexpr(2**25)


@triton.jit
def sortable(score):
    """Return int32 sort keys, whose order is that of the float32 scores: -0 equals 0, and NaN is
    below every number."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    key = tl.where(bits == _SIGN, 0, key)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _NAN_KEY, key)


@triton.jit
def find_threshold(key, low, count_low, topk, max_selected):
    """Return a threshold, and the number of sort keys above it.

    If possible, ``topk`` to ``max_selected`` sort keys are above the threshold. Otherwise fewer
    than ``topk`` are above the threshold, and sort keys equal to the threshold make up the rest.
    The caller passes a sort key ``low`` and the number ``count_low`` of sort keys that are at least
    ``low``; this number exceeds ``max_selected``. Each step has two candidates for a new bound. For
    each candidate, the step counts the sort keys that are at least as large, with one reduction for
    both candidates. If the range is wide, the first candidates are four octaves and one octave
    below the maximum. Most scores are there, so this takes fewer steps than bisecting all floats.
    """
    high = tl.max(key, axis=0) + 1
    count_high = 0
    length = _length(low, high)
    is_wide = length > _OCTAVES
    first = tl.where(is_wide, high - _OCTAVES, low + _fraction(length, 2))
    second = tl.where(is_wide, high - _OCTAVE, low + _fraction(length, 1))
    while (length > 1) & (count_low > max_selected):
        counts = (key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16)
        counts = tl.sum(counts, axis=0)
        count_first, count_second = counts & 0xFFFF, counts >> 16
        high = tl.where(count_second >= topk, high, tl.where(count_first >= topk, second, first))
        count_high = tl.where(
            count_second >= topk,
            count_high,
            tl.where(count_first >= topk, count_second, count_first),
        )
        low = tl.where(count_second >= topk, second, tl.where(count_first >= topk, first, low))
        count_low = tl.where(
            count_second >= topk,
            count_second,
            tl.where(count_first >= topk, count_first, count_low),
        )
        length = _length(low, high)
        first = low + _fraction(length, 2)
        second = low + _fraction(length, 1)
    below_low = count_low <= max_selected
    return tl.where(below_low, low - 1, low), tl.where(below_low, count_low, count_high)


@triton.jit
def _length(low, high):
    return high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)


@triton.jit
def _fraction(length, SHIFT: tl.constexpr):
    """Return the uint32 ``length`` divided by 2^SHIFT, but at least 1, as int32."""
    return tl.maximum(length >> SHIFT, 1).to(tl.int32, bitcast=True)
