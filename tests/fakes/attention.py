"""Fakes, for benchmarks, of FlashMLA and vLLM's cache ops; the fakes run our ops."""

import torch

import dsv4_ops
from dsv4_ops.core.layout import MainLayout


def paged_cache(view):
    """Return our cache and its block size from FlashMLA's view of the cache."""
    blocks, size = view.shape[:2]
    return view.as_strided((blocks, MainLayout(size).page_bytes), (view.stride(0), 1)), size


class FlashMLA:
    """A fake of the baseline's library, which runs our ops."""

    def __init__(self, factor=1.0):
        self.factor, self.plans = factor, []

    def sparse_decode(
        self, q, kv, indices, *, topk_length, attn_sink, meta, extra_kv, extra_indices,
        extra_topk_length, scale,
    ):  # fmt: skip
        if meta is None:
            meta = object()
            self.plans.append(meta)
        assert meta is self.plans[-1]
        extra, sizes, each = (None, None, None), {}, q.shape[1]
        assert topk_length.shape == q.shape[:1]
        cache, sizes["swa_block_size"] = paged_cache(kv)
        if extra_kv is not None:
            other, sizes["extra_block_size"] = paged_cache(extra_kv)
            lens = extra_topk_length.repeat_interleave(each)
            extra = (other, extra_indices.flatten(0, 1).contiguous(), lens)
        out, lse = dsv4_ops.sparse_mla_decode(
            q.flatten(0, 1), cache, indices.flatten(0, 1).contiguous(),
            topk_length.repeat_interleave(each), *extra, attn_sink, softmax_scale=scale, **sizes,
        )  # fmt: skip
        by_request = (value.unflatten(0, (-1, each)) for value in (out * self.factor, lse))
        return next(by_request), next(by_request).transpose(1, 2), meta

    def sparse_prefill(self, q, kv, indices, *, scale, attn_sink, topk_length=None):
        assert kv.dtype == torch.bfloat16
        assert indices.shape[2] % 64 == 0
        lens = topk_length
        if lens is None:
            lens = torch.full((q.shape[0],), indices.shape[2], dtype=torch.int32)
        out, row_max, lse = dsv4_ops.sparse_mla_gathered(
            q, kv[:, 0], indices[:, 0], lens, attn_sink, softmax_scale=scale
        )
        return out * self.factor, row_max, lse


class Cache:
    """A fake of vLLM's cache ops, which runs our ops; a server's block tables are dense."""

    def __init__(self, missing=0):
        self.missing, self.gathered = missing, []

    def dequantize_and_gather_k_cache(
        self, out, k_cache, *, seq_lens, gather_lens, block_table, block_size, offset
    ):
        assert block_table.is_contiguous()
        cache, size = paged_cache(k_cache.unsqueeze(2))
        assert size == block_size
        self.gathered.append(int(seq_lens if gather_lens is None else gather_lens))
        dsv4_ops.dequantize_and_gather_k_cache(
            out, cache, seq_lens - self.missing, gather_lens, block_table, block_size=block_size,
            offset=offset,
        )  # fmt: skip

    def combine_topk_swa_indices(
        self, selected, starts, seq_lens, gather_lens, window, ratio, topk, rows, offset
    ):
        first = int(seq_lens) - int(starts[1])
        positions = torch.arange(first, int(seq_lens))
        return dsv4_ops.combine_topk_swa_indices(
            selected, positions, torch.zeros_like(positions, dtype=torch.int32), seq_lens,
            gather_lens, window_size=window, compress_ratio=ratio, topk=topk,
            workspace_rows=rows, swa_offset=offset,
        )  # fmt: skip
