"""A fake of DeepGEMM on a CPU, and calls of the indexer for tests of it."""

import torch

import dsv4_ops as ops
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from tests.fakes.flash_mla import require
from tests.helpers import i32
from tests.oracles.plan import paged_mqa_logits_metadata as planned


class FakeDeepGemm:
    """Computes paged logits as DeepGEMM documents them. The fake refuses arguments that
    DeepGEMM would misread, and writes nothing past the lengths."""

    def __init__(self) -> None:
        self.calls = self.schedules = 0

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lens, block, num_sms):
        require(lens.dim() == 2 and lens.is_contiguous() and lens.dtype == torch.int32, "lens")
        self.schedules += 1
        return self.schedule_of(lens, block, num_sms)

    def schedule_of(self, lens, block, num_sms):
        return i32(planned(lens[:, -1].tolist(), block_size=block, num_sms=num_sms))

    def fp8_fp4_paged_mqa_logits(
        self, q, kv_cache, weights, lens, table, schedule, columns, clean_logits
    ):
        self.calls += 1
        (codes, scales), (b, next_n, heads, dim) = q, q[0].shape
        require(scales is None and not clean_logits, "the mode")
        require(torch.equal(schedule, self.schedule_of(lens, 64, 132)), "a stale schedule")
        require((next_n, dim) == (1, 128) and heads in (32, 64) and codes.is_contiguous(), "q")
        require(kv_cache.shape[1:] == (64, 1, 132) and kv_cache.stride(0) % 4 == 0, "the cache")
        require(weights.shape == (b, heads) and weights.is_contiguous(), "the weights")
        require(table.dtype == torch.int32 and table.shape[0] == b, "the table")
        require(bool(((table >= 0) & (table < len(kv_cache))).all()), "pages that do not exist")
        require(bool(((lens >= 0) & (lens <= columns)).all()), "lens out of range")
        pages = kv_cache.as_strided((len(kv_cache), 64 * 132), (kv_cache.stride(0), 1))
        requests = torch.arange(b, dtype=torch.int32)
        found = OPS["indexer_logits"].reference(
            codes[:, 0], weights, pages, lens[:, 0], requests, table,
            block_size=64, num_rows=columns, layout="v4_indexer_fp8",
        )  # fmt: skip
        wide = torch.full((b, columns + 256), torch.nan)  # memory that nothing has written
        wide[:, :columns] = torch.where(found > -torch.inf, found, torch.nan)
        return wide[:, :columns]


def indexer_call(seed: int, tokens: int = 9, heads: int = 64):
    """Sample a call with adversarial blocks, requests and lengths over a full cache. Values are
    small integers, so that scores are exact in any order."""

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=made).bfloat16()

    made = torch.Generator().manual_seed(seed)
    cache = IndexerLayout(64).allocate(5)
    keys = whole(5 * 64, 128)
    ops.quantize_and_insert_indexer_k(keys, cache, torch.arange(5 * 64), block_size=64)
    table = torch.randint(0, 5, (3, 4), generator=made).int()
    table[0, 1], table[1, 2], table[2, 0], table[2, 3] = -1, 5, 2**31 - 1, -(2**31)
    q = whole(tokens, heads, 128).to(torch.float8_e4m3fn)
    weights = whole(tokens, heads).float() / 8
    requests = i32([0, 1, 2, 0, 1, 2, -1, 3, 2**31 - 1])[:tokens]
    lens = i32([256, 256, 200, 0, 1, 2**31 - 1, 40, 40, -5])[:tokens]
    return (q, weights, cache), lens, (requests, table)
