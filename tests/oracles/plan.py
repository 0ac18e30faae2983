"""Oracles of sparse MLA's plan, of DeepGEMM's and FlashMLA's schedules, and of lengths on ranks, in
Python ints, written from the docstrings."""

from collections.abc import Sequence

TILE_KEYS, TILE_HEADS = 64, 64


def up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def programs_of(num_heads: int, num_programs: int) -> int:
    return max(1, num_programs // up(num_heads, TILE_HEADS))


def tiles_of(swa_lens: Sequence[int], extra_lens: Sequence[int] | None) -> list[int]:
    """Return the number of key blocks of every token: of its window and compressed rows."""
    sources = [swa_lens] if extra_lens is None else [swa_lens, extra_lens]
    return [sum(up(max(n, 0), TILE_KEYS) for n in token) for token in zip(*sources, strict=True)]


def split_size(tiles: Sequence[int], programs: int, most_extra: int) -> int:
    """Return the cheapest split size. Sizes go from the mean to 12 times the mean, with four sizes
    per power of two, and include the longest token. The cost is programs x size, or all blocks plus
    4 for each split beyond one per program, whichever is larger. Each extra split adds 1, and the
    combine adds 2 per program. Tokens of about the same length are not split."""
    total, longest = sum(tiles), max([1, *tiles])
    if longest <= up(total, max(programs, len(tiles))) + 2:
        return longest
    mean = max(1, up(total, programs))
    sizes = [min(up(mean * (4 + k % 4) * 2 ** (k // 4), 4), longest) for k in range(15)]
    costs: list[float] = []
    for size in [*sizes, longest]:
        count = sum(max(1, up(each, size)) for each in tiles)
        shared = total + 4 * (count - programs)
        extra = count - len(tiles)
        combines = 2 * programs * (extra > 0) + extra
        fits = extra <= most_extra
        costs.append(max(size * programs, shared) + combines if fits else float("inf"))
    return [*sizes, longest][costs.index(min(costs))]


def order_of(tiles: Sequence[int], size: int) -> list[int]:
    """Sort tokens: several splits first, then by fourteenths of a split; equals stay in order."""
    shares = [15 if count > size else count * 14 // size for count in tiles]
    return sorted(range(len(tiles)), key=lambda token: -shares[token])


def sparse_mla_plan(
    swa_lens: Sequence[int],
    extra_lens: Sequence[int] | None = None,
    *,
    num_heads: int,
    num_programs: int = 132,
) -> list[list[int]]:
    programs = programs_of(num_heads, num_programs)
    tiles = tiles_of(swa_lens, extra_lens)
    # extra splits: programs without a first split, or a quarter of all programs
    size, start = split_size(tiles, programs, max(programs - len(tiles), programs // 4)), 0
    first: list[list[int]] = []
    extra: list[list[int]] = []
    whole: list[list[int]] = []
    for token in order_of(tiles, size):
        splits = max(1, up(tiles[token], size))
        if splits == 1:
            whole.append([token, 0, 1, 0])
            continue
        mine = [[token, split, splits, start] for split in range(splits)]
        first, extra = [*first, mine[0]], [*extra, *mine[1:]]
        start += splits
    return first + extra + whole + [[-1] * 4] * (programs - len(extra))


def paged_mqa_logits_metadata(
    seq_lens: Sequence[int], *, block_size: int, num_sms: int
) -> list[list[int]]:
    """Assign runs of splits to the SMs in order, row after row."""
    left = [up(max(length, 0), 256) for length in seq_lens]
    share, longer = divmod(sum(left), num_sms)
    schedule, row, split = [], 0, 0
    for sm in range(num_sms + 1):
        while row < len(left) and split == left[row]:
            row, split = row + 1, 0
        schedule.append([row, split])
        run = share + (sm < longer) if sm < num_sms else 0
        while run > 0:
            taken = min(run, left[row] - split)
            run, split = run - taken, split + taken
            if split == left[row]:
                row, split = row + 1, 0
    return schedule


def cp_seq_lens(
    seq_lens: Sequence[int],
    cp_rank: Sequence[int] | None,
    *,
    cp_world_size: int,
    cp_interleave: int,
) -> list[int] | list[list[int]]:
    """Return each rank's rows: its complete turns, and the rows of its last turn."""

    def owned(length: int, rank: int) -> int:
        if not 0 <= rank < cp_world_size:
            return 0
        round_, first = cp_interleave * cp_world_size, rank * cp_interleave
        begun = up(max(length - first, 0), round_)
        missing = first + (begun - 1) * round_ + cp_interleave - length if begun else 0
        return begun * cp_interleave - max(missing, 0)

    if cp_rank is not None:
        return [owned(length, cp_rank[0]) for length in seq_lens]
    return [[owned(length, rank) for rank in range(cp_world_size)] for length in seq_lens]


def flash_mla_metadata(
    swa_lens: Sequence[int],
    extra_lens: Sequence[int] | None = None,
    *,
    swa_width: int,
    extra_width: int = 0,
    num_sm_parts: int,
) -> list[list[int]]:
    """Give blocks to parts in order, until a part's time is used up. Behind the
    parts, rows of 8 have the number of splits before each token, and the total."""

    def blocks(length: int, width: int) -> int:
        return up(min(max(length, 0), width), 64)

    counts = [max(blocks(length, swa_width), 1) for length in swa_lens]
    for token, length in enumerate(extra_lens or ()):
        counts[token] += blocks(length, extra_width)
    time = up(sum(count + 5 for count in counts), num_sm_parts) + 5
    parts, splits = [], [0]
    token = block = shared = 0
    for _ in range(num_sm_parts):
        first, begin, before, left = token, block, shared, time
        while token < len(counts) and left >= counts[token] - block + 5:
            left -= counts[token] - block + 5
            splits.append(splits[-1] + shared + 1)
            token, block, shared = token + 1, 0, 0
        if token < len(counts) and left > 5:
            block, shared = block + left - 5, shared + 1
        last, end = (token, block) if block else (token - 1, ([0, *counts])[token])
        cut = [begin > 0, bool(block)]
        if first == last:
            cut = [any(cut)] * 2
        parts.append([first, last, begin, end, before, *map(int, cut), 0])
    splits += [0] * (7 * len(splits))
    return parts + [splits[first : first + 8] for first in range(0, len(splits), 8)]
