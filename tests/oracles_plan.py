"""The plan of sparse MLA once more in plain Python integers: what the docstring says."""

from collections.abc import Sequence

TILE_KEYS, TILE_HEADS = 64, 64


def up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def programs_of(num_heads: int, num_programs: int) -> int:
    return max(1, num_programs // up(num_heads, TILE_HEADS))


def tiles_of(swa_lens: Sequence[int], extra_lens: Sequence[int] | None) -> list[int]:
    """Blocks of keys of every token: those of the window and those of the compressed rows."""
    sources = [swa_lens] if extra_lens is None else [swa_lens, extra_lens]
    return [sum(up(max(n, 0), TILE_KEYS) for n in token) for token in zip(*sources, strict=True)]


def piece_size(tiles: Sequence[int], programs: int) -> int:
    """33 sizes in steps of an eighth of the mean, the last of them the longest token; every round
    of programs takes as long as 4 blocks and a piece."""
    mean, longest = max(1, up(sum(tiles), programs)), max([1, *tiles])
    sizes = [min(mean + k * up(mean, 8), longest) for k in range(32)] + [longest]
    rounds = [up(sum(max(1, up(count, size)) for count in tiles), programs) for size in sizes]
    costs = [n * (4 + size) for n, size in zip(rounds, sizes, strict=True)]
    return sizes[costs.index(min(costs))]


def sparse_mla_plan(
    swa_lens: Sequence[int],
    extra_lens: Sequence[int] | None = None,
    *,
    num_heads: int,
    num_programs: int = 132,
) -> list[list[int]]:
    programs = programs_of(num_heads, num_programs)
    tiles = tiles_of(swa_lens, extra_lens)
    size, first, further, start = piece_size(tiles, programs), [], [], 0
    for token, count in enumerate(tiles):
        pieces = max(1, up(count, size))
        mine = [[token, piece, pieces, start] for piece in range(pieces)]
        first, further = [*first, mine[0]], [*further, *mine[1:]]
        start += pieces if pieces > 1 else 0
    return first + further + [[-1] * 4] * (programs - len(further))
