"""How a batch is split by its lengths: an oracle in plain Python, and a kernel that stores what
each program computes."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4_ops.kernels.common.hopper.mma import KEYS
from dsv4_ops.kernels.common.hopper.tile_scheduler import Batch, Grid, PerToken, schedule_by_lengths
from tests.helpers import INT32_MAX, INT32_MIN, i32
from tests.oracles.plan import split_size, up

BLOCK, MOST_BLOCKS = 64, 2**15
WIDTHS = (128, 4096)
ADVERSARIAL = [0, 1, 63, 64, 65, 128, 129, 4095, 4096, 4097, -1, INT32_MIN, INT32_MAX]


@gluon.jit
def written_schedule_kernel(
    found, combines, swa, extra, requests, swa_width, extra_width, num_reqs, num_tokens, at_once,
    TOKENS: gl.constexpr,
):  # fmt: skip
    grid = Grid(gl.program_id(0), gl.num_programs(0), gl.program_id(1) == 0)
    batch = Batch(
        PerToken(swa, 1), PerToken(extra, 1), PerToken(requests, 1), swa_width, extra_width,
        num_reqs, num_tokens,
    )  # fmt: skip
    token, split, count, first = schedule_by_lengths(grid, batch, at_once, combines, TOKENS, KEYS)
    row = found + gl.program_id(0) * 4
    gl.store(row, token.to(gl.int32))
    gl.store(row + 1, split)
    gl.store(row + 2, count)
    gl.store(row + 3, first)


def scheduled(kernel, given, programs, device="cpu", widths=WIDTHS, at_once=None):
    """Return (token, split, splits, first partial result) of each program, or None, and the tokens
    to combine as (token, splits, first partial result). ``given`` has the lengths of both lists,
    the requests, and their number."""
    tokens = len(given[0])
    found = torch.full((programs, 4), -7, dtype=torch.int32, device=device)
    combines = torch.full((tokens + 1, 4), -7, dtype=torch.int32, device=device)
    tensors = [i32(values).to(device) for values in given[:3]]
    sizes = (*widths, given[3], tokens, programs if at_once is None else at_once)
    lanes = next(each for each in (32, 64, 128, 256) if each >= tokens)
    kernel[(programs, 1)](found, combines, *tensors, *sizes, TOKENS=lanes, num_warps=4)
    rows = [tuple(row) if row[0] < tokens else None for row in found.tolist()]
    count = int(combines[0, 0])
    listed = [tuple(row) for row in combines[1 : count + 1, :3].tolist()]
    assert (combines[count + 1 :] == -7).all()
    return [row if row is None or row[2] > 1 else row[:3] for row in rows], listed


def blocks(swa, extra, requests, num_reqs, widths):
    def clipped(value, width):
        return min(-(-min(max(value, 0), width) // BLOCK), MOST_BLOCKS)

    return [
        min(
            clipped(window, widths[0])
            + (clipped(more, widths[1]) if 0 <= request < num_reqs else 0),
            MOST_BLOCKS,
        )
        for window, more, request in zip(swa, extra, requests, strict=True)
    ]  # fmt: skip


def order(counts, size, programs, at_once):
    """Order tokens as they are or, if not all programs run at once, tokens of several splits first,
    then by fourteenths of a split."""
    if programs <= at_once:
        return list(range(len(counts)))
    classes = [0 if count > size else 15 - count * 14 // size for count in counts]
    return sorted(range(len(counts)), key=classes.__getitem__)  # equal tokens keep their order


def expected(swa, extra, requests, num_reqs, programs, widths=WIDTHS, at_once=None):
    at_once = programs if at_once is None else at_once
    counts = blocks(swa, extra, requests, num_reqs, widths)
    tokens, longest = len(counts), max(*counts, 1)
    size = split_size(counts, at_once, max(programs - tokens, 0))
    splits = [max(up(count, size), 1) for count in counts]
    if size == longest and longest <= up(sum(counts), max(at_once, tokens)) + 2:
        return [(token, 0, 1) for token in range(tokens)] + [None] * (programs - tokens), []
    combines, places = [], []
    place = 0
    for token, count in enumerate(splits):
        places.append(place)
        if count > 1:
            combines.append((token, count, place))
            place += count

    def row(token, split):
        whole = (token, split, splits[token])
        return whole if splits[token] == 1 else (*whole, places[token])

    tokens = order(counts, size, programs, at_once)
    rows = [row(token, each) for token in tokens for each in range(splits[token])]
    return rows + [None] * (programs - len(rows)), combines


def sampled(seed, tokens):
    """Sample lengths at the edges of blocks, adversarial lengths, and valid and absent requests."""
    generator = torch.Generator().manual_seed(seed)

    def among(values, count):
        places = torch.randint(len(values), (count,), generator=generator)
        return [values[place] for place in places]

    longest = among([64, 300, 4096], 1)[0]
    lens = torch.randint(0, longest + 1, (tokens,), generator=generator).tolist()
    wild = among([False, False, False, True], tokens)
    extra = [
        adversarial if is_wild else length
        for adversarial, is_wild, length in zip(among(ADVERSARIAL, tokens), wild, lens, strict=True)
    ]
    requests = among([0, 1, tokens - 1, tokens, -1, INT32_MIN, INT32_MAX, 0, 0, 0, 0], tokens)
    return among(ADVERSARIAL, tokens), extra, requests, tokens
