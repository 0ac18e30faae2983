"""References of the ops of sparse MLA."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.core.tiles import (
    CLASSES,
    COMBINE_TILES,
    EXTRA_SPLIT_SHARE,
    EXTRA_SPLIT_TILES,
    KEY_TILE,
    METADATA_COLUMNS,
    PART_OVERHEAD,
    SPLIT_SIZES,
    SPLIT_STEPS,
    START_TILES,
    programs_per_tile,
)
from dsv4_ops.core.torch_compat import sym_max
from dsv4_ops.core.types import SparseMla, SparseMlaGathered
from dsv4_ops.reference.batch import token_map
from dsv4_ops.reference.common import masked_rows, take, valid_tokens, visible_rows
from dsv4_ops.reference.kv_cache import row_bits
from dsv4_ops.reference.pages import locate, words
from dsv4_ops.reference.rotation import rotate_values


def sparse_mla_plan(
    swa_lens: Tensor, extra_lens: Tensor | None, *, num_heads: int, num_programs: int
) -> Tensor:
    programs = programs_per_tile(num_heads, num_programs)
    order, counts, first_extra = splits(swa_lens, extra_lens, programs)
    return rows(order, counts, *token_map(first_extra, counts - 1, num_tokens=programs))


def splits(
    swa_lens: Tensor, extra_lens: Tensor | None, programs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order the tokens. Tokens with several splits come first; the others follow in classes of
    length, the longest first.

    Returns:
        Three int32 tensors, each in that order of tokens: the tokens, their numbers of splits, and
        the exclusive prefix sums of their numbers of extra splits, with the total at the end."""
    tiles = _tiles(swa_lens)
    if extra_lens is not None:
        tiles = tiles + _tiles(extra_lens)
    size = _split_size(tiles, programs)
    shares = tiles * (CLASSES - 2) // size
    order = shares.where(tiles <= size, CLASSES - 1).argsort(stable=True, descending=True)
    counts = ((tiles[order] + size - 1) // size).clamp(min=1)
    first_extra = pad((counts - 1).cumsum(0), (1, 0))
    return order.to(torch.int32), counts.to(torch.int32), first_extra.to(torch.int32)


def _tiles(lens: Tensor) -> Tensor:
    return (lens.long().clamp(min=0) + KEY_TILE - 1) // KEY_TILE


def _split_size(tiles: Tensor, programs: int) -> Tensor:
    """Choose the split size, in key tiles, with the least expected time.

    Candidates are 15 sizes from the mean load of a program up to 12 times this load, and the length
    of the longest token. The extra splits of a candidate must not outnumber the free programs, or a
    fixed share of all programs, whichever is more. The expected time is the time to combine plus
    the larger of two times: the time of one split, and a program's share of all splits with their
    start-up costs. Ties go to the smallest size. No token is split if the longest token exceeds the
    mean load by less than the cost of a combine plus one tile."""
    total, num_tokens = tiles.sum(), tiles.shape[0]
    mean = ((total + programs - 1) // programs).clamp(min=1)
    longest = pad(tiles, (0, 1)).amax().clamp(min=1)
    index = torch.arange(SPLIT_SIZES, device=tiles.device)
    steps = mean * (SPLIT_STEPS + index % SPLIT_STEPS) << index // SPLIT_STEPS
    sizes = torch.minimum((steps + SPLIT_STEPS - 1) // SPLIT_STEPS, longest)
    sizes = torch.where(index == SPLIT_SIZES - 1, longest, sizes)
    counts = ((tiles + sizes[:, None] - 1) // sizes[:, None]).clamp(min=1).sum(1)
    shared, extra = total + START_TILES * (counts - programs), counts - num_tokens
    combines = torch.where(extra > 0, COMBINE_TILES * programs, 0) + EXTRA_SPLIT_TILES * extra
    time = torch.maximum(sizes * programs, shared) + combines
    most = sym_max(programs - num_tokens, programs // EXTRA_SPLIT_SHARE)
    least = torch.where(extra <= most, time * SPLIT_SIZES + index, 2**62).amin() % SPLIT_SIZES
    size = torch.where(index == least, sizes, 0).sum()
    is_longer = (longest - COMBINE_TILES - 1) * sym_max(programs, num_tokens) >= total
    return torch.where(is_longer, size, longest)


def rows(order: Tensor, counts: Tensor, places: Tensor, index: Tensor) -> Tensor:
    """Lay out the plan: the first splits of tokens with several splits, the extra splits of these
    tokens, the other tokens, then rows of -1.

    For every extra split, ``places`` holds the position of its token in ``order``, and ``index``
    holds its index among the extra splits of the token."""
    num_tokens = counts.shape[0]
    place = torch.arange(num_tokens, dtype=torch.int32, device=counts.device)
    places = torch.cat([place, places])
    split = torch.cat([torch.zeros_like(place), index.to(torch.int32) + 1])
    if num_tokens == 0:
        return places[:, None].expand(-1, 4).contiguous()
    shared = torch.where(counts > 1, counts, 0)
    before = torch.where(counts > 1, shared.cumsum(0).to(torch.int32) - shared, 0)
    exists, place = places >= 0, places.clamp(min=0)
    columns = (take(order, place), split, take(counts, place), take(before, place))
    plan = torch.stack([torch.where(exists, column, -1) for column in columns], 1)
    several, extra = (counts > 1).sum(), (counts - 1).sum()
    row = torch.arange(plan.shape[0], device=counts.device)
    whole = (row >= several + extra) & (row < num_tokens + extra)
    behind = (row >= several) & (row < several + extra)
    row = torch.where(behind, row + num_tokens - several, torch.where(whole, row - extra, row))
    return plan.index_select(0, row)


def flash_mla_metadata(
    swa_lens: Tensor,
    extra_lens: Tensor | None,
    *,
    swa_width: int,
    extra_width: int,
    num_sm_parts: int,
) -> Tensor:
    """Places of work are numbered through all tokens. A token has one place per block, and then
    PART_OVERHEAD places. So a place determines a token and a block. The place at which a part
    starts determines the place at which the part ends, and the next part starts there."""
    num_tokens = swa_lens.shape[0]
    blocks = _blocks(swa_lens, swa_width).clamp(min=1)
    most = _blocks_of(swa_width)
    if extra_lens is not None:
        blocks = blocks + _blocks(extra_lens, extra_width)
        most = most + _blocks_of(extra_width)
    first = pad((blocks + PART_OVERHEAD).cumsum(0), (1, 0))
    last = first[-1]
    payload = (last + num_sm_parts - 1) // num_sm_parts + PART_OVERHEAD
    place = torch.arange(num_tokens * (most + PART_OVERHEAD) + 1, device=first.device)
    # for each place, the latest start of a token at or before this place
    floor = torch.zeros_like(place).index_copy(0, first, first).cummax(0).values
    reached = (place + payload).clamp(max=last)
    after = torch.maximum(reached - PART_OVERHEAD, floor.index_select(0, reached))
    after = torch.where(place + payload >= last, last, after)
    begins = _iterate(after, num_sm_parts)
    begin = begins[:-1]
    passed = (first[1:] <= begins[:, None]).sum(1)
    block = begins - first.index_select(0, passed)
    begin_token, begin_block = passed[:-1], block[:-1]
    end_token = torch.where(block[1:] > 0, passed[1:], passed[1:] - 1)
    stop = end_token.clamp(min=0)
    whole = first.index_select(0, (stop + 1).clamp(max=num_tokens)) - first.index_select(0, stop)
    whole = (whole - PART_OVERHEAD).clamp(min=0)
    end_block = torch.where(block[1:] > 0, block[1:], whole)
    # for each part, flag the part itself and the earlier parts that begin inside the same token
    inside = (begin > first.index_select(0, begin_token)[:, None]) & (begin <= begin[:, None])
    splits = torch.where(begin_block > 0, inside.sum(1), 0)
    cut_before, cut_behind = begin_block > 0, end_block != whole
    alone = begin_token == end_token
    columns = (
        begin_token,
        end_token,
        begin_block,
        end_block,
        splits,
        cut_before | (alone & cut_behind),
        cut_behind | (alone & cut_before),
        torch.zeros_like(splits),
    )
    rows = torch.stack([column.to(torch.int32) for column in columns], 1)
    boundaries = torch.where(begin_block > 0, begin, last)
    token = torch.arange(num_tokens + 1, device=first.device)
    num_splits = (token + (boundaries < first[:, None]).sum(1)).to(torch.int32)
    behind = pad(num_splits, (0, (num_tokens + 1) * (METADATA_COLUMNS - 1)))
    return torch.cat([rows, behind.view(-1, METADATA_COLUMNS)])


def _blocks(lens: Tensor, width: int) -> Tensor:
    return (lens.long().clamp(0, width) + KEY_TILE - 1) // KEY_TILE


def _blocks_of(width: int) -> int:
    """Return the maximum number of blocks of a list of ``width`` columns, at least one."""
    return sym_max((width + KEY_TILE - 1) // KEY_TILE, 1)


def _iterate(after: Tensor, count: int) -> Tensor:
    """Compute 0, after[0], after[after[0]] and so on, ``count`` + 1 values, by pointer doubling."""
    index = torch.arange(count + 1, device=after.device)
    place = torch.zeros_like(index)
    for bit in range(count.bit_length()):
        place = torch.where((index >> bit) & 1 > 0, after.index_select(0, place), place)
        after = after.index_select(0, after)
    return place


def listed(indices: Tensor, lens: Tensor) -> Tensor:
    """Flag the entries of ``indices`` that are not negative and among the first ``lens`` entries of
    their row."""
    column = torch.arange(indices.shape[1], device=indices.device)
    return (column < lens[:, None]) & (indices >= 0)


class KeyCache(NamedTuple):
    """A paged cache of keys: its blocks, the rows per block, and its layout."""

    blocks: Tensor
    block_size: int
    layout: str

    def at(self, pages: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [..., head_dim] at (block, row), and the mask of existing keys; absent
        keys are zeros."""
        exists = (pages >= 0) & (pages < self.blocks.shape[0])
        bits = row_bits(self.blocks, pages, rows, block_size=self.block_size, layout=self.layout)
        dtype = self.blocks.dtype if self.layout == "plain" else torch.bfloat16
        return bits.view(dtype), exists

    def listed(self, indices: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys [num_tokens, width, head_dim] of the listed slots, and the mask of
        existing keys."""
        mask = listed(indices, lens)
        slots = torch.where(mask, indices, 0)
        return self.at(torch.where(mask, slots // self.block_size, -1), slots % self.block_size)

    def of_requests(
        self, req_indices: Tensor, block_table: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys at ``positions`` of each token's request, and the mask of keys that
        exist and are not masked."""
        request = req_indices[:, None]
        pages, rows = locate(block_table, request, positions, mask, self.block_size)
        return self.at(pages, rows.expand(pages.shape))

    def num_rows(self, block_table: Tensor) -> int:
        """Return the maximum number of rows of a request."""
        return block_table.shape[1] * self.block_size


def paged_keys(
    cache: KeyCache, lens: Tensor, req_indices: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys of the first ``lens`` rows of each token's request, and the mask of existing
    keys."""
    row = torch.arange(cache.num_rows(block_table), device=lens.device)
    return cache.of_requests(req_indices, block_table, row, row < lens[:, None])


def attend(
    q: Tensor, keys: Tensor, exists: Tensor, attn_sink: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output, largest logit and log-sum-exp of queries [num_tokens, num_heads,
    head_dim] over keys [num_tokens, num_keys, head_dim].

    Sums are in float32. For bf16 queries, P is rounded to bf16 before the product with the values,
    as on tensor cores.
    """
    values = keys.to(torch.float32)
    logits = torch.matmul(q.to(torch.float32), values.mT) * softmax_scale
    logits = torch.where(exists[:, None, :], logits, -torch.inf)
    row_max = logits.amax(-1)
    origin = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = torch.exp(logits - origin[..., None])
    total = weights.sum(-1)
    summed = torch.matmul(weights.to(q.dtype).to(torch.float32), values)
    sink = torch.zeros_like(total) if attn_sink is None else torch.exp(attn_sink - origin)
    out = summed / (total + sink)[..., None]
    out = torch.where(total[..., None] == 0.0, 0.0, out)
    return out.to(q.dtype), row_max, origin + torch.log(total)


def over_both(
    q: Tensor,
    swa: tuple[Tensor, Tensor],
    extra: tuple[Tensor, Tensor] | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
) -> SparseMla:
    both = [swa] if extra is None else [swa, extra]
    keys = torch.cat([keys for keys, _ in both], 1)
    exists = torch.cat([exists for _, exists in both], 1)
    out, _, lse = attend(q, keys, exists, attn_sink, softmax_scale)
    return SparseMla(out, lse)


def apply_inverse_rope(
    attended: SparseMla, positions: Tensor | None, cos_sin_cache: Tensor | None
) -> SparseMla:
    """Apply inverse RoPE to the end of every head, like ``inverse_rope_group``."""
    if positions is None or cos_sin_cache is None:
        return attended
    out, lse = attended
    rotated = rotate_values(out.to(torch.float32), positions, cos_sin_cache, inverse=True)
    return SparseMla(rotated.to(out.dtype), lse)


def sparse_mla_decode(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_lens: Tensor | None,
    attn_sink: Tensor | None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    flash_mla_plan: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    extra = None
    if extra_cache is not None and extra_indices is not None and extra_lens is not None:
        extra = KeyCache(extra_cache, extra_block_size, layout).listed(extra_indices, extra_lens)
    swa = KeyCache(swa_cache, swa_block_size, layout).listed(swa_indices, swa_lens)
    attended = over_both(q, swa, extra, attn_sink, softmax_scale)
    return apply_inverse_rope(attended, positions, cos_sin_cache)


def sparse_mla_decode_paged(
    q: Tensor,
    swa_cache: Tensor,
    swa_indices: Tensor,
    swa_lens: Tensor,
    extra_cache: Tensor,
    extra_lens: Tensor,
    req_indices: Tensor,
    extra_block_table: Tensor,
    attn_sink: Tensor | None,
    plan: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    flash_mla_plan: Tensor | None = None,
    *,
    softmax_scale: float,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    num_splits: int,
    batch_invariant: bool,
    impl: str = "auto",
) -> SparseMla:
    swa = KeyCache(swa_cache, swa_block_size, layout).listed(swa_indices, swa_lens)
    cache = KeyCache(extra_cache, extra_block_size, layout)
    extra = paged_keys(cache, extra_lens, req_indices, extra_block_table)
    attended = over_both(q, swa, extra, attn_sink, softmax_scale)
    return apply_inverse_rope(attended, positions, cos_sin_cache)


def sparse_mla_gathered(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    impl: str = "auto",
) -> SparseMlaGathered:
    exists = listed(indices, lens) & (indices < kv.shape[0])
    keys = masked_rows(words(kv), exists, indices).view(kv.dtype)
    out, row_max, lse = attend(q, keys, exists, attn_sink, softmax_scale)
    return SparseMlaGathered(out, row_max, lse)


def window_keys(
    cache: KeyCache, positions: Tensor, req_indices: Tensor, block_table: Tensor, window_size: int
) -> tuple[Tensor, Tensor]:
    """Return the keys [num_tokens, window_size, head_dim] of each token's window, and the mask of
    existing keys."""
    back = torch.arange(1 - window_size, 1, device=positions.device)
    mask = valid_tokens(positions, req_indices, block_table.shape[0])[:, None]
    place = torch.where(mask, positions[:, None] + back, -1)
    return cache.of_requests(req_indices, block_table, place, mask)


def compressed_keys(
    cache: KeyCache,
    topk_indices: Tensor | None,
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    compress_ratio: int,
) -> tuple[Tensor, Tensor]:
    """Return the keys of the selected rows, or of all rows of the block table if ``topk_indices``
    is None, and the mask of keys that a token sees."""
    if topk_indices is None:
        row = torch.arange(cache.num_rows(block_table), device=positions.device)[None, :]
    else:
        row = topk_indices.long()
    visible = visible_rows(positions, compress_ratio)[:, None]
    mask = valid_tokens(positions, req_indices, block_table.shape[0])[:, None]
    return cache.of_requests(req_indices, block_table, row, mask & (row >= 0) & (row < visible))


def sparse_mla_prefill(
    q: Tensor,
    swa_cache: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    extra_cache: Tensor | None,
    extra_block_table: Tensor | None,
    topk_indices: Tensor | None,
    attn_sink: Tensor | None,
    *,
    softmax_scale: float,
    window_size: int,
    compress_ratio: int,
    swa_block_size: int,
    extra_block_size: int,
    layout: str,
    impl: str = "auto",
) -> SparseMla:
    window, extra = KeyCache(swa_cache, swa_block_size, layout), None
    swa = window_keys(window, positions, req_indices, swa_block_table, window_size)
    if extra_cache is not None and extra_block_table is not None:
        cache = KeyCache(extra_cache, extra_block_size, layout)
        tokens = (positions, req_indices, extra_block_table)
        extra = compressed_keys(cache, topk_indices, *tokens, compress_ratio)
    return over_both(q, swa, extra, attn_sink, softmax_scale)
