"""Cases and strategies of sparse MLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.reference import sparse_mla as reference
from dsv4_ops.reference.kv_cache import quantize_and_insert_k_cache
from dsv4_ops.testing.case import Case, OpTesting, i32, i64
from dsv4_ops.testing.float64.rope import positions, tables, worked_table
from dsv4_ops.testing.float64.sparse_mla import exact_attention, exact_inverse_rope, exact_over_both
from dsv4_ops.testing.strategies.batches import ADVERSARIAL_BLOCKS, ADVERSARIAL_POSITIONS
from dsv4_ops.testing.strategies.caches import random_bytes
from dsv4_ops.testing.strategies.draw import Draw

_LENS = (0, 1, 63, 64, 65, 128, 640, 8192, 2**31 - 1, -1, -(2**31))


_ABSENT = [-1] * 4


def _splits(token: int, count: int, first: int = 0) -> list[list[int]]:
    return [[token, split, count, first] for split in range(count)]


def _whole(*tokens: int) -> list[list[int]]:
    return [[token, 0, 1, 0] for token in tokens]


def _case(
    name: str,
    swa: list[int],
    extra: list[int] | None,
    heads: int,
    programs: int,
    *rows: list[int],
    absent: int = 0,
) -> Case:
    """Make a call for tokens with these numbers of keys. The plan ends with ``absent`` unused work
    tiles."""
    lens = (i32(swa), None if extra is None else i32(extra))
    settings = {"num_heads": heads, "num_programs": programs}
    return Case(name, lens, settings, ([*rows, *[_ABSENT] * absent],))


def _blocks(
    name: str, blocks: list[int], programs: int, *rows: list[int], absent: int, heads: int = 64
) -> Case:
    return _case(name, [64 * n for n in blocks], None, heads, programs, *rows, absent=absent)


def _cases() -> list[Case]:
    case, blocks, most = _case, _blocks, 2**31 - 1
    few, six = [7, 1, 0, 5, 2], ([0, 0, 2, 0], [1, 0, 2, 2], [0, 1, 2, 0], [1, 1, 2, 2])
    # three tokens with 11 tiles on 4 programs leave one program free for an extra split
    one = ([2, 0, 2, 0], [2, 1, 2, 0], *_whole(0, 1))
    # tokens have 1 + 1, 10 + 0 and 9 + 1 tiles; splits of 5 tiles leave one of 6 programs free
    two = ([1, 0, 2, 0], [2, 0, 2, 2], [1, 1, 2, 0], [2, 1, 2, 2], [0, 0, 1, 0])
    # the expected time is 2 * 12 + 2 * 12 + 5 = 53 for splits of 2 tiles, and 36 + 2 * 12 + 3 = 63
    # for splits of 3; tokens with several splits come first, then tokens with 2, 1 and 0 tiles
    twelve = ([0, 0, 4, 0], [3, 0, 3, 4], [0, 1, 4, 0], [0, 2, 4, 0], [0, 3, 4, 0], [3, 1, 3, 4])
    # a combine reads only as many rows as there are programs, so split tokens come first
    late = (*_splits(150, 4), *_whole(*range(150)))
    pairs = [[token, split, 2, 2 * token] for split in range(2) for token in range(32)]
    lengths = ((0, 1), (1, 1), (64, 1), (65, 1), (256, 1), (257, 3), (384, 3))
    tiles = ((1, 6), (64, 6), (65, 3), (128, 3), (129, 2), (192, 2), (384, 1))
    return [
        case("one long token", [64, 0, 640], None, 64, 4, *one, absent=3),
        case("two long tokens", [1, 640, 576], [64, -5, 1], 8, 6, *two, absent=4),
        case("programs shared by two tiles of heads", [640], None, 65, 5, *_splits(0, 2), absent=1),
        case("more heads than programs", [640], None, 129, 2, *_whole(0), absent=1),
        case("no keys", [0, -1], [0, 0], 64, 2, *_whole(0, 1), absent=2),
        case("no token", [], None, 64, 3, absent=3),
        case("no token, and extra rows", [], [], 64, 3, absent=3),
        case("longest", [most] * 3, [most] * 3, 64, 2, *_whole(0, 1, 2), absent=2),
        case("longest and least", [most], [-(2**31)], 64, 7, *_splits(0, 7), absent=1),
        # on 3 programs, 4 tiles take no longer than a split of 2 tiles and a combine; the expected
        # time of 5 tiles is 2 * 3 + 2 * 3 + 2 = 14 for splits of 2, 3 * 3 + 2 * 3 + 1 = 16 for
        # splits of 3, and 15 without a split
        *[
            case(f"{keys} keys", [keys], None, 8, 3, *_splits(0, count), absent=4 - count)
            for keys, count in lengths
        ],
        # 60 tiles become splits of 10, 20, 30 or 60 tiles
        *[
            case(f"{heads} heads", [3840], None, heads, 6, *_splits(0, count), absent=1)
            for heads, count in tiles
        ],
        # 193 keys take 4 tiles and 63 keys take 1 tile, although 256 keys fit into 4 tiles
        case("apart", [193], [63], 1, 3, *_splits(0, 3), absent=1),
        case("window only", [2, 64], None, 1, 3, *_whole(0, 1), absent=3),
        blocks("12 programs", few, 12, *twelve, [3, 2, 3, 4], *_whole(4, 1, 2), absent=7),
        # the expected time is 5 * 5 + 2 * 5 + 1 = 36 for splits of 5 tiles, 41 for splits of 6, and
        # 35 without a split
        blocks("5 programs", few, 5, *_whole(0, 3, 4, 1, 2), absent=5),
        # the expected time is 61 for splits of 10 tiles, and 71 for splits of 12
        blocks("40 tiles", [20, 10, 1, 2, 7], 5, *_splits(0, 2), *_whole(1, 4, 3, 2), absent=4),
        # the expected time is 6 * 8 + 2 * 6 + 2 for splits of 8 tiles; splits of 6 tiles, which is
        # the mean, would need 4 extra splits
        blocks("two extra splits", [16, 10, 1, 7], 6, *six, *_whole(3, 2), absent=4),
        # tokens are sorted by their number of tiles in units of 31 / 14, rounded down: 31 tiles
        # give 14, 30 give 13, 3 and 4 give 1, and 1 gives 0
        blocks("longer first", [3, 30, 1, 31, 1, 4], 2, *_whole(3, 1, 0, 5, 2, 4), absent=2),
        # for splits of 10 tiles (the mean), the expected time is 1240 + 4 * (154 - 132) + 2 * 132 +
        # 3
        *[
            blocks(f"one long token of 151, {size}", [size] * 150 + [40], 132, *late, absent=129)
            for size in (8, 10)
        ],
        blocks("two splits each", [66000] * 32, 64, *pairs, absent=32),
        # with splits of 13 tiles (the mean) or more, the first 40 tokens would need 80 programs,
        # and so another round
        blocks("whole", [18] * 40 + [4] * 24, 132, *_whole(*range(64)), absent=66, heads=128),
    ]


def _call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7, 130), min_size)
    swa_lens, extra_lens = (i32([draw.one_of(*_LENS) for _ in range(num_tokens)]) for _ in range(2))
    alone = not min_size and draw.flag()
    return Case("sampled", (swa_lens, None if alone else extra_lens), settings)


sparse_mla_plan = OpTesting(
    cases=_cases,
    settings=(
        {"num_heads": 64, "num_programs": 132},
        {"num_heads": 128, "num_programs": 132},
        {"num_heads": 8, "num_programs": 3},
        {"num_heads": 8, "num_programs": 1},
    ),
    make=_call,
)


_METADATA_LENS = (0, 1, 63, 64, 65, 127, 128, 512, 8192, 2**31 - 1, -1, -(2**31))


def _mla_metadata_cases() -> list[Case]:
    def case(
        name: str, parts: int, swa: list[int], extra: list[int] | None, *rows: Any, width: int = 128
    ) -> Case:
        lens = (i32(swa), None if extra is None else i32(extra))
        settings = {"swa_width": width, "extra_width": 0 if extra is None else 512}
        return Case(name, lens, {**settings, "num_sm_parts": parts}, ([*rows],) if rows else None)

    unused = [0] * 8
    # token 0 has 2 + 8 blocks, token 1 has 1 + 0 blocks, and each token adds an overhead of 5: the
    # sum is 21, a third of which is 7, so each of 3 parts may take 7 + 5
    split = (
        [0, 0, 0, 7, 0, 1, 1, 0],
        [0, 0, 7, 10, 1, 1, 1, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [0, 2, 3, 0, 0, 0, 0, 0],
        *[unused] * 2,
    )
    # a token without keys has one block too: with overheads, the tokens take 6 + 7 = 13, a quarter
    # of which is less than 4, so each of 4 parts may take 4 + 5
    idle = (
        [0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 2, 0, 0, 0, 0],
        *[[2, 1, 0, 2, 0, 0, 0, 0]] * 2,
        [0, 1, 2, 0, 0, 0, 0, 0],
        *[unused] * 2,
    )
    # each token takes 5 blocks and an overhead of 5: part 0 ends at 10 + 5, after token 0 and
    # before the blocks of token 1
    left = ([0, 0, 0, 5, 0, 0, 0, 0], [1, 1, 0, 5, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0])
    empty = [0, -1, 0, 0, 0, 0, 0, 0]
    return [
        case("a split token", 3, [128, 64], [512, 0], *split),
        case("parts without work", 4, [-7, 200], None, *idle),
        case("less than an overhead is left", 2, [320] * 2, None, *left, *[unused] * 2, width=320),
        case("no token", 2, [], [], empty, empty, unused),
        case("seven tokens", 132, [128] * 7, [512] * 7),
        case("eight tokens", 66, [1] * 8, [9000] * 8),
    ]


def _mla_metadata_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 7, 8, 130), min_size)
    lens = [i32([draw.one_of(*_METADATA_LENS) for _ in range(num_tokens)]) for _ in range(2)]
    return Case("sampled", (lens[0], lens[1] if settings["extra_width"] else None), settings)


flash_mla_metadata = OpTesting(
    cases=_mla_metadata_cases,
    settings=(
        {"swa_width": 128, "extra_width": 512, "num_sm_parts": 132},
        {"swa_width": 128, "extra_width": 0, "num_sm_parts": 66},
        {"swa_width": 1, "extra_width": 8192, "num_sm_parts": 5},
        {"swa_width": 100, "extra_width": 37, "num_sm_parts": 1},
    ),
    make=_mla_metadata_call,
)


TAG = MainLayout.tag
SCALE = 512**-0.5
HEADS = 8
BARE = (None, None, None)
"""Arguments of a call without a plan and without inverse RoPE."""


def _sizes(swa: int, extra: int, layout: str) -> dict[str, Any]:
    sizes = {"swa_block_size": swa, "extra_block_size": extra}
    return {"softmax_scale": SCALE, **sizes, "layout": layout}


def _settings(
    swa: int, extra: int, *, layout: str = TAG, num_splits: int = 0, invariant: bool = False
) -> dict[str, Any]:
    splits = {"num_splits": num_splits, "batch_invariant": invariant}
    return {**_sizes(swa, extra, layout), **splits}


def one_key_page(value: float) -> Tensor:
    """Return a cache of one row whose values are all ``value``, uint8 [1, 1152]."""
    page = MainLayout(1).allocate(1)
    row = torch.full((1, 512), value, dtype=torch.bfloat16)
    slot = torch.zeros(1, dtype=torch.int64)
    quantize_and_insert_k_cache(row, page, slot, block_size=1, layout=TAG)
    return page


def _lists(*tensors: Any) -> tuple[Tensor, ...]:
    return tuple(i32(values) for values in tensors)


def _decode_cases() -> list[Case]:
    q, twos, fours = torch.zeros(1, 2, 512, dtype=torch.bfloat16), one_key_page(2), one_key_page(4)
    half, sixes = [[1.0] * 512, [0.0] * 512], [[[2.0] * 512, [0.0] * 512]]
    # the inverse RoPE of two pairs (1, 1): a quarter turn, then (cos, sin) = (-1, 2)
    back = [1.0, -1.0, 1.0, -3.0]
    rotated = [[1.0] * 448 + back + [1.0] * 60, [0.0] * 512]
    plan = i32([[0, 0, 2, 0], [1, 0, 1, 2], [0, 1, 2, 0]])
    adversarial = i64([1, -1, 2, 2**63 - 1])
    sink = torch.tensor([0.0, torch.inf])
    swa, none = _lists([[0, 7]], [1]), _lists([[-1, 0]], [1])
    case = partial(Case, settings=_settings(1, 1))
    absent, zeros, empty = (None, None, None), [[0.0, 0.0]], tuple(tensor[:0] for tensor in swa)
    one = (twos, *_lists([[0, 7]] * 4, [1] * 4))
    window, both = (q, twos, *none, fours), (q, twos, *swa, fours, *swa)
    return [
        case("one key", (q, twos, *swa, *absent, sink, *BARE), expected=([half], zeros)),
        case(
            "inverse RoPE, positions that do not exist",
            (q.repeat(4, 1, 1), *one, *absent, sink, None, adversarial, worked_table()),
            expected=([rotated, half, half, half], zeros * 4),
        ),
        case(
            "one key, of the compressed cache",
            (*window, *swa, sink, *BARE),
            expected=(sixes, zeros),
        ),
        case(
            "no key",
            (*window, *none, sink, *BARE),
            expected=([[[0.0] * 512] * 2], [[-torch.inf] * 2]),
        ),
        case("no token", (q[:0], twos, *empty, fours, *empty, sink, *BARE)),
        case("plan of a longer batch", (*both, sink, plan, None, None)),
        case("inverse RoPE, with a plan", (*both, sink, plan, i64([1]), worked_table())),
        case("no sink", (*both, None, *BARE)),
        *_unlike_decode_cases(),
    ]


def _unlike_decode_cases() -> list[Case]:
    """Make calls over four rows with different values or logits; one row is NaN."""
    rows = torch.tensor([[[300.0, 1.0], [0.0, 2.0], [torch.nan, torch.nan], [0.5, 3.0]]])
    q = torch.tensor([300.0, -300.0, 1.0]).view(1, 3, 1) * torch.tensor([1.0, 0.0])
    far = torch.tensor([1e30, -1e30, 0.0])
    settings = _settings(4, 4, layout="plain")

    def case(name: str, q: Tensor, slots: list[list[int]], sink: Tensor | None = far) -> Case:
        lists = _lists(slots, [len(slots[0])] * len(slots))
        return Case(name, (q, rows, *lists, None, None, None, sink, *BARE), settings)

    return [
        case("logits of which exp holds none", q, [[0, 1]]),
        case("and no sink", q, [[0, 1]], None),
        case("a row named twice", q[:, 2:], [[3, 1, 3]], None),
        case("a row of NaN, which one token sees", q.repeat(2, 1, 1), [[0, 2], [0, 1]]),
    ]


def _paged_cases() -> list[Case]:
    q, twos, fours = torch.zeros(1, 1, 512, dtype=torch.bfloat16), one_key_page(2), one_key_page(4)
    swa, sink = _lists([[0]], [0]), torch.zeros(1)
    settings = _settings(1, 1)
    row, nothing = ([[[2.0] * 512]], [[0.0]]), ([[[0.0] * 512]], [[-torch.inf]])
    back = [2.0, -2.0, 2.0, -6.0]  # two pairs (2, 2)
    rotated = ([[[2.0] * 448 + back + [2.0] * 60]], [[0.0]])
    return [
        Case(
            name,
            (q, twos, *swa, fours, *_lists([lens], [request], [[9, 0, 0]]), sink, *rotation),
            settings,
            expected,
        )
        for name, lens, request, rotation, expected in (
            ("page that does not exist, then one that does", 2, 0, BARE, row),
            ("inverse RoPE", 2, 0, (None, i64([1]), worked_table()), rotated),
            ("no such position", 2, 0, (None, i64([2]), worked_table()), row),
            ("no row", 0, 0, BARE, nothing),
            ("no request", 3, -1, BARE, nothing),
            ("request past the table", 3, 1, BARE, nothing),
            ("past the table", 2**31 - 1, 0, BARE, None),
        )
    ]


def _gathered_cases() -> list[Case]:
    q, kv = torch.zeros(1, 1, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0], [torch.nan, torch.nan]])
    scale = {"softmax_scale": 1.0}
    both = (*_lists([[1, -1, 2]], [2]), torch.zeros(1))
    past = (*_lists([[3, -1, 2]], [2]), torch.zeros(1))
    return [
        Case("one key", (q, kv, *both), scale, ([[[0.0, 1.0]]], [[0.0]], [[0.0]])),
        Case("no key", (q, kv, *past), scale, ([[[0.0, 0.0]]], [[-torch.inf]], [[-torch.inf]])),
        Case("no sink", (q, kv, *both[:2], None), scale),
        Case("no token", (q[:0], kv, both[0][:0], both[1][:0], None), scale),
    ]


def full_cache(
    seed: torch.Generator, settings: dict[str, Any], size: str, num_blocks: int, q: Tensor
) -> Tensor:
    """Sample a cache with a key in every slot; ``size`` is the name of the setting for its block
    size."""
    block_size = settings[size]
    keys = torch.randn(num_blocks * block_size, q.shape[2], generator=seed).to(q.dtype)
    if settings["layout"] != TAG:
        return keys.view(num_blocks, block_size, q.shape[2])
    cache = MainLayout(block_size).allocate(num_blocks)
    slots = torch.arange(num_blocks * block_size)
    quantize_and_insert_k_cache(keys, cache, slots, block_size=block_size, layout=TAG)
    return cache


def _cache(
    seed: torch.Generator, settings: dict[str, Any], size: str, num_blocks: int, q: Tensor
) -> tuple[Tensor, list[int]]:
    """Sample a cache with keys in some slots, and return these slots.

    An FP8 cache has keys in two of three slots and random bytes elsewhere. A plain cache has keys
    in every other slot and NaN elsewhere.
    """
    block_size, width = settings[size], q.shape[2]
    count = num_blocks * block_size
    if settings["layout"] == TAG:
        cache = random_bytes(seed, num_blocks, MainLayout(block_size).page_bytes)
        slots = torch.randperm(count, generator=seed)[: (2 * count + 2) // 3]
        keys = torch.randn(len(slots), width, generator=seed).to(torch.bfloat16)
        quantize_and_insert_k_cache(keys, cache, slots, block_size=block_size, layout=TAG)
        return cache, slots.tolist()
    cache = PlainLayout(block_size, width, q.dtype).allocate(num_blocks)
    cache.copy_(torch.randn(cache.shape, generator=seed))
    cache.view(-1, width)[1::2] = torch.nan
    return cache, list(range(0, count, 2))


def _listed(
    draw: Draw, seed: torch.Generator, num_tokens: int, slots: list[int], least: int
) -> Any:
    """Sample index lists with adversarial entries, and their lengths."""
    width = max(draw.one_of(3, 1, 64, 65, 130), least)
    picked = torch.randint(0, max(len(slots), 1), (num_tokens, width), generator=seed)
    indices = torch.tensor(slots or [-1], dtype=torch.int32)[picked]
    lens = [draw.one_of(width, 0, 1, width - 1, 2**31 - 1, -1) for _ in range(num_tokens)]
    draw.spoil(indices, (-1, -(2**31), 2**31 - 1, 10**6), 6)
    return indices, i32(lens)


def queries(draw: Draw, seed: torch.Generator, settings: dict[str, Any], least: int) -> Tensor:
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5), least)
    single = settings["layout"] != TAG and draw.flag()
    shape = (num_tokens, HEADS, 24 if single else 512)
    return torch.randn(shape, generator=seed).to(torch.float32 if single else torch.bfloat16)


def sink_of(seed: torch.Generator) -> Tensor:
    sink = torch.randn(HEADS, generator=seed)
    sink[:4] = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30])
    return sink


def _plan(draw: Draw, settings: dict[str, Any], num_tokens: int, least: int) -> Tensor | None:
    """Sample a plan or None. The plan is for lengths other than the lengths of the call."""
    free = settings["num_splits"] == 0 and not settings["batch_invariant"]
    if not free or not (least or draw.flag()):
        return None
    lens = [draw.one_of(64, 0, 500, 8192, 2**31 - 1, -1) for _ in range(num_tokens)]
    programs = draw.one_of(132, 1, 3)
    return reference.sparse_mla_plan(i32(lens), None, num_heads=HEADS, num_programs=programs)


def _rotation(draw: Draw, q: Tensor, least: int) -> tuple[Tensor | None, Tensor | None]:
    """Sample adversarial positions and a table for inverse RoPE; some calls have no inverse
    RoPE."""
    if not (least or draw.flag()):
        return None, None
    sizes = [4, q.shape[2], 0]
    if q.shape[2] == MainLayout.head_dim:
        sizes = [64] if least else [64, 64, 64, 4]  # only the reference supports a width of 4
    table = tables(draw, rope_dim=draw.one_of(*sizes), min_size=least)
    return positions(draw, num_tokens=q.shape[0], num_positions=table.shape[0]), table


def _decode_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    q = queries(draw, seed, settings, min_size)
    tensors: list[Tensor | None] = []
    for size in ("swa_block_size", "extra_block_size"):
        num_blocks = max(draw.one_of(2, 1, 3, 5), min_size)
        cache, slots = _cache(seed, settings, size, num_blocks, q)
        tensors += [cache, *_listed(draw, seed, q.shape[0], slots, min_size)]
    if not min_size and draw.flag():
        tensors[3:] = [None, None, None]
    sink = sink_of(seed) if min_size or draw.flag() else None
    plan = _plan(draw, settings, q.shape[0], min_size)
    rotation = _rotation(draw, q, min_size)
    return Case("sampled", (q, *tensors, sink, plan, *rotation), settings)


def _paged_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    q = queries(draw, seed, settings, min_size)
    num_tokens = q.shape[0]
    swa, slots = _cache(seed, settings, "swa_block_size", max(2, min_size), q)
    listed = _listed(draw, seed, num_tokens, slots, min_size)
    num_blocks = max(draw.one_of(4, 1, 3), min_size)
    extra = full_cache(seed, settings, "extra_block_size", num_blocks, q)
    num_reqs, max_blocks = (max(draw.one_of(2, 1, 0, 3), min_size) for _ in range(2))
    table = _table(draw, seed, num_reqs, max_blocks, num_blocks)
    requests = [draw.one_of(0, 1, -1, num_reqs, 2**31 - 1) for _ in range(num_tokens)]
    lens = [draw.one_of(0, 1, 2, 5, 70, 2**31 - 1, -1) for _ in range(num_tokens)]
    walked = (i32(lens), i32(requests), table)
    rest = (sink_of(seed), _plan(draw, settings, num_tokens, min_size))
    rotation = _rotation(draw, q, min_size)
    return Case("sampled", (q, swa, *listed, extra, *walked, *rest, *rotation), settings)


def _gathered_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    num_tokens = max(draw.one_of(3, 0, 1, 2, 5), min_size)
    num_rows = max(draw.one_of(9, 1, 2, 64), min_size)
    dtype = torch.bfloat16 if min_size or draw.flag() else torch.float32
    q = torch.randn(num_tokens, HEADS, 32, generator=seed).to(dtype)
    kv = torch.randn(num_rows, 32, generator=seed).to(dtype)
    kv[1::2] = torch.nan
    slots = list(range(0, num_rows, 2))
    lists = _listed(draw, seed, num_tokens, slots, min_size)
    sink = sink_of(seed) if min_size or draw.flag() else None
    return Case("sampled", (q, kv, *lists, sink), settings)


def _key_cache(blocks: Tensor, settings: dict[str, Any], which: str) -> reference.KeyCache:
    return reference.KeyCache(blocks, settings[f"{which}_block_size"], settings["layout"])


def _precise_decode(q: Tensor, *tensors: Any, **settings: Any) -> Any:
    (cache, *listed), rest, extra = tensors[3:6], tensors[6:], None
    if cache is not None:
        extra = _key_cache(cache, settings, "extra").listed(*listed)
    return _precise_over(q, tensors[:3], extra, *rest, **settings)


def _precise_paged(q: Tensor, *tensors: Any, **settings: Any) -> Any:
    extra = reference.paged_keys(_key_cache(tensors[3], settings, "extra"), *tensors[4:7])
    return _precise_over(q, tensors[:3], extra, *tensors[7:], **settings)


def _precise_over(
    q: Tensor,
    window: tuple[Tensor, ...],
    extra: Any,
    attn_sink: Tensor | None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    **settings: Any,
) -> Any:
    swa = _key_cache(window[0], settings, "swa").listed(*window[1:])
    out, lse = exact_over_both(q, swa, extra, attn_sink, settings["softmax_scale"])
    return exact_inverse_rope(out, positions, cos_sin_cache), lse


def _precise_gathered(
    q: Tensor, kv: Tensor, indices: Tensor, lens: Tensor, sink: Tensor | None, **settings: Any
) -> Any:
    exists = reference.listed(indices, lens) & (indices < kv.shape[0])
    keys = kv[torch.where(exists, indices, 0)]
    return exact_attention(q, keys, exists, sink, settings["softmax_scale"])


_ALL = (
    _settings(64, 64),
    _settings(64, 2, num_splits=1),
    _settings(64, 3, num_splits=5),
    _settings(64, 64, invariant=True),
    _settings(4, 2, layout="plain"),
)
sparse_mla_decode = OpTesting(
    cases=_decode_cases, settings=_ALL, make=_decode_call, precise=_precise_decode
)
sparse_mla_decode_paged = OpTesting(
    cases=_paged_cases, settings=(_settings(64, 2), *_ALL), make=_paged_call, precise=_precise_paged
)
sparse_mla_gathered = OpTesting(
    cases=_gathered_cases,
    settings=({"softmax_scale": 0.25},),
    make=_gathered_call,
    precise=_precise_gathered,
)


def _mla_prefill_settings(
    window: int, ratio: int, swa: int, extra: int, *, layout: str = TAG
) -> dict[str, Any]:
    visibility = {"window_size": window, "compress_ratio": ratio}
    return {**_sizes(swa, extra, layout), **visibility}


def _mla_prefill_cases() -> list[Case]:
    pages = torch.cat([one_key_page(value) for value in (2, 4, 6)])
    q, sink = torch.zeros(1, 1, 512, dtype=torch.bfloat16), torch.zeros(1)
    settings = _mla_prefill_settings(2, 2, 1, 1)
    first, pages_of, gone = i32([0]), i32([[0, 1, 2]]), i32([[3, 3, 3]])
    none, two = (None, None, None), float(torch.tensor(2.0).log())

    def case(
        name: str,
        position: int,
        value: float,
        lse: float,
        *extra: Tensor | None,
        request: Tensor = first,
        table: Tensor = pages_of,
    ) -> Case:
        tensors = (q, pages, i64([position]), request, table, *(extra or none), None)
        return Case(name, tensors, settings, ([[[value] * 512]], [[lse]]))

    return [
        case("first token", 0, 2.0, 0.0),
        case("second token sees the first", 1, 3.0, two),
        case("third no longer sees the first", 2, 5.0, two),
        case("padding", -1, 0.0, -torch.inf),
        case("past any request", 2**31 - 1, 0.0, -torch.inf),
        case("no request", 1, 0.0, -torch.inf, request=i32([1])),
        case("page of the window that is gone", 2, 4.0, 0.0, table=i32([[-1, -1, 1]])),
        case(
            "compressed row 0 alone, all rows of which the token sees one",
            *(2, 2.0, 0.0, pages, pages_of, None),
            table=gone,
        ),
        case(
            "selected rows, of which only row 0 may be seen yet",
            *(2, 4.0, 0.0, pages, i32([[1, 0, 2]]), i32([[1, 0, -1]])),
            table=gone,
        ),
        Case("sink", (q, pages, i64([1]), first, pages_of, *none, sink), settings),
        Case(
            "no token",
            (q[:0], pages, i64([]), first[:0], pages_of, pages, pages_of, i32([[0]])[:0], sink),
            settings,
        ),
    ]


def _table(draw: Draw, seed: Any, rows: int, columns: int, num_blocks: int) -> Tensor:
    table = torch.randint(0, num_blocks, (rows, columns), generator=seed).to(torch.int32)
    draw.spoil(table, (*ADVERSARIAL_BLOCKS, num_blocks), 3)
    return table


def _selected(draw: Draw, seed: Any, num_tokens: int, num_rows: int, least: int) -> Tensor:
    width = max(draw.one_of(5, 1, 64, 65, 130), least)
    chosen = torch.randint(-1, num_rows + 1, (num_tokens, width), generator=seed).to(torch.int32)
    draw.spoil(chosen, (-(2**31), 2**31 - 1, 10**6), 4)
    return chosen


def _mla_prefill_call(draw: Draw, settings: dict[str, Any], min_size: int) -> Case:
    seed = draw.generator()
    q = queries(draw, seed, settings, min_size)
    num_tokens = q.shape[0]
    num_reqs = max(draw.one_of(2, 1, 0, 3), min_size)
    tensors: list[Tensor | None] = []
    for size in ("swa_block_size", "extra_block_size"):
        num_blocks = max(draw.one_of(4, 1, 3), min_size)
        columns = max(draw.one_of(3, 1, 5), min_size)
        cache = full_cache(seed, settings, size, num_blocks, q)
        table = _table(draw, seed, num_reqs, columns, num_blocks)
        unnamed = ~torch.isin(torch.arange(num_blocks), table)
        cache[unnamed] = 0xFF if cache.dtype == torch.uint8 else torch.nan
        tensors += [cache, table]
    last = settings["swa_block_size"] * 4
    real = (last - 1, 0, 1, 2, settings["window_size"], settings["compress_ratio"] - 1, last)
    positions = i64([draw.one_of(*real, *real) for _ in range(num_tokens)])
    draw.spoil(positions, ADVERSARIAL_POSITIONS, 2)
    requests = [draw.one_of(0, 1, -1, num_reqs, 2**31 - 1) for _ in range(num_tokens)]
    token = (positions, i32(requests))
    swa_cache, swa_table, extra_cache, extra_table = tensors
    chosen = None
    if min_size or draw.flag():
        chosen = _selected(draw, seed, num_tokens, last // settings["compress_ratio"], min_size)
    elif draw.flag():
        extra_cache = extra_table = None
    sink = sink_of(seed) if min_size or draw.flag() else None
    assert q.shape[1] == HEADS
    window = (q, swa_cache, *token, swa_table)
    return Case("sampled", (*window, extra_cache, extra_table, chosen, sink), settings)


def _precise(q: Tensor, swa_cache: Tensor, *tensors: Any, **settings: Any) -> Any:
    position, request, swa_table, extra_cache, extra_table, topk_indices, attn_sink = tensors
    window, extra = _key_cache(swa_cache, settings, "swa"), None
    token = (position, request)
    swa = reference.window_keys(window, *token, swa_table, settings["window_size"])
    if extra_cache is not None:
        compressed = (_key_cache(extra_cache, settings, "extra"), topk_indices, *token, extra_table)
        extra = reference.compressed_keys(*compressed, settings["compress_ratio"])
    return exact_over_both(q, swa, extra, attn_sink, settings["softmax_scale"])


sparse_mla_prefill = OpTesting(
    cases=_mla_prefill_cases,
    settings=(
        _mla_prefill_settings(128, 4, 64, 64),
        _mla_prefill_settings(100, 3, 16, 2),
        _mla_prefill_settings(1, 128, 64, 2),
        _mla_prefill_settings(7, 2, 4, 2, layout="plain"),
        _mla_prefill_settings(3, 2**31 - 1, 4, 2, layout="plain"),
    ),
    make=_mla_prefill_call,
    precise=_precise,
)
