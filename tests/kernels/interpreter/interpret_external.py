"""Kernels around the calls of FlashMLA and DeepGEMM in Triton's interpreter, with fakes that refuse
what the libraries would misread. tests/dispatch/test_providers_compiled.py starts this file with
TRITON_INTERPRET=1. It prints the checks that passed."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels import opaque_op
from dsv4_ops.kernels.external import sanitize
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.sparse_mla import bf16_workspace as kernels
from dsv4_ops.reference import bf16_workspace
from dsv4_ops.reference.bf16_workspace import Prefill, Rows, Source
from dsv4_ops.reference.sanitize import compact_pages
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.fakes import flash_mla as fake_flash_mla
from tests.fakes.deep_gemm import FakeDeepGemm, indexer_call
from tests.helpers import INT32_MAX, INT32_MIN, assert_right, i32
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, PAGED, decode_case, integers, with_inverse_rope
from tests.support.mla_batches import DENSE, DS_FP8, SPARSE, flash_mla_case, mla_case
from tests.support.prefill_batches import MODES, PREFILL, prefill_case


def launched(name: str, library: str, *tensors: object, **settings: object) -> object:
    return OPS[name].launcher(library)(EAGER, *tensors, **settings)


def attention() -> Iterator[tuple[str, Case]]:
    for seed, tokens, heads in ((0, 7, 64), (1, 2, 128), (2, 1, 64)):
        yield DECODE, decode_case(seed, tokens, heads, 70)
        yield PAGED, batches.paged_case(seed, tokens, heads, columns=150)
        yield batches.GATHERED, batches.gathered_case(seed, tokens, heads, 300)
    yield DECODE, decode_case(3, 5, 64, None)
    yield DECODE, with_inverse_rope(decode_case(4, 7, 64))
    yield PAGED, with_inverse_rope(batches.paged_case(5, 7, 64, columns=20))
    case = with_inverse_rope(decode_case(6, 7, 64))
    yield DECODE, Case("other angles", (*case.tensors[:-1], case.tensors[-1][:, :8]), case.settings)
    wide = [None if each is None else torch.stack([each] * 2, -1)[..., 0] for each in case.tensors]
    kept = [wide[place] if place in (0, 2, 3, 5, 6, 7, 10) else each
            for place, each in enumerate(case.tensors)]  # fmt: skip
    yield DECODE, Case("strided", tuple(kept), case.settings)


def dense() -> Iterator[tuple[str, Case]]:
    """Dense rows for FlashMLA: padding tokens, absent blocks, a table without columns, and a cache
    without blocks whose table names block 0."""
    for seed, heads in enumerate((64, 128, 16)):
        yield DENSE, mla_case(seed, [2, 1, 3], heads, longest=(200, 64, 130)[seed])
    case = mla_case(3, [2, 1], 16, dtype=torch.float16)
    wide = [None if each is None else torch.stack([each] * 2, -1)[..., 0] for each in case.tensors]
    kept = [wide[place] if place in (0, 2, 3, 4) else each
            for place, each in enumerate(case.tensors)]  # fmt: skip
    yield DENSE, Case("strided", tuple(kept), case.settings)
    narrow = [each[:, :0] if place == 4 else each for place, each in enumerate(case.tensors)]
    yield DENSE, Case("no column", tuple(narrow), case.settings)
    none = [each[:0] if place == 1 else each for place, each in enumerate(case.tensors)]
    none[4] = torch.zeros_like(none[4])
    yield DENSE, Case("no block", tuple(none), case.settings)


def selected() -> Iterator[tuple[str, Case]]:
    """V3.2's rows for FlashMLA: codes, then plain rows."""
    for seed, layout in enumerate((DS_FP8, "plain")):
        made = {"longest": 130, "layout": layout, "block_size": 7}
        case = flash_mla_case(mla_case(seed, [2, 1, 3], 64, **made))
        yield SPARSE, case
        q, cache, *rest = case.tensors
        yield SPARSE, Case("no block", (q, cache[:0], *rest), case.settings)


SMALL = {"longest": 300, "max_reqs": 2, "window": 70}


def prefills() -> Iterator[tuple[str, Case]]:
    """A program has few entries and few tokens of a request, or all of them."""
    for seed, mode in enumerate(MODES):
        for tokens, heads in ((6, 64), (1, 128)):
            yield PREFILL, prefill_case(seed, tokens, heads, mode, topk=70, **SMALL)
    for seed, changed in enumerate(({"window": 200}, {"block": 7, "window": 1}, {"topk": 1})):
        sizes = {"topk": 70, **SMALL, **changed}
        case = prefill_case(seed, 9, 64, "C4", **sizes)
        tensors = (*case.tensors[:-1], None)
        yield PREFILL, Case("without a sink", tensors, case.settings)
    case = prefill_case(5, 9, 64, "C4", topk=70, **SMALL)
    wide = [None if each is None else torch.stack([each] * 2, -1)[..., 0] for each in case.tensors]
    kept = [each if place in (1, 5, 8) else wide[place] for place, each in enumerate(case.tensors)]
    yield PREFILL, Case("strided", tuple(kept), case.settings)
    for what, cut in (("no request", slice(0, 0)), ("no column", (slice(None), slice(0, 0)))):
        tables = [each[cut] if place in (4, 6) else each for place, each in enumerate(case.tensors)]
        yield PREFILL, Case(what, tuple(tables), case.settings)


def sampled(made: torch.Generator, tensor: Tensor | None, *values: int) -> Tensor | None:
    """Replace four in ten entries by entries that name nothing, or something else."""
    if tensor is None:
        return None
    extremes = (INT32_MIN, INT32_MAX, INT32_MAX - 1)
    pool = torch.tensor([*extremes, *values, *range(-1, 9)], dtype=tensor.dtype)
    wild = pool[integers(made, 0, len(pool), *tensor.shape).long()]
    return torch.where(torch.rand(tensor.shape, generator=made) < 0.6, tensor, wild)


def adversarial_prefill(seed: int) -> tuple[Prefill, Tensor]:
    """Windows and ratios are as large as in any table; one call has a sink."""
    made, mode = batches.generator(seed), list(MODES)[seed % 3]
    sizes = {"block": (1, 4, 64, 53)[seed % 4], "topk": (3, 130)[seed % 2], "longest": 100}
    tokens, max_reqs = int(integers(made, 1, 14, 1)), 1 + seed % 4
    case = prefill_case(seed, tokens, 64, mode, cache_seed=1, max_reqs=max_reqs, **sizes)
    _, swa_cache, positions, owners, swa_table, cache, table, chosen, sink = case.tensors
    swa = Source(swa_cache, sampled(made, swa_table), sizes["block"])
    extra = None
    if cache is not None:
        extra = Source(cache, sampled(made, table), case.settings["extra_block_size"])
    batch = sampled(made, positions, 2**40, -(2**63), 2**63 - 1, 99), sampled(made, owners)
    tokens = (1, 2, 5, 70, 200, 2**31 - 1, 2**31, 2**40)[seed % 8]
    numbers = tokens, (4, 1, 2**31 - 1)[seed // 3 % 3]
    return Prefill(*batch, swa, extra, sampled(made, chosen, 24, 25), *numbers), sink


def counted(rows: Rows) -> Tensor:
    """Return the lists up to their lengths."""
    column = torch.arange(rows.slots.shape[1])
    return torch.where(column < rows.lens[:, None], rows.slots, -1)


def lists(count: int) -> int:
    """All integers and all bits of listed rows are equal, also for few entries at a time."""
    usual = kernels.COLUMNS, kernels.TOKENS
    for seed in range(count):
        kernels.COLUMNS, kernels.TOKENS = (usual, (64, 4))[seed // 2 % 2]
        call, sink = adversarial_prefill(seed)
        expected = bf16_workspace.gather_rows(call, sink, 128)
        actual = kernels.gather_rows(EAGER, call, sink, 128)
        assert torch.equal(counted(actual), counted(expected)), seed
        assert torch.equal(actual.lens, expected.lens), seed
        assert torch.equal(actual.sink, expected.sink), seed
        named = expected.slots[expected.slots >= 0].long()
        assert equal(actual.kv[named], expected.kv[named]), seed
    kernels.COLUMNS, kernels.TOKENS = usual
    return count


def pages(count: int) -> int:
    """All blocks and lengths are equal, with tables narrower and wider than a program."""
    table = i32([[7, -1, 3, 9], [2, 8, INT32_MAX, 0]])  # of 8 blocks of 10 rows
    asked = i32([0, 0, 1, 1, -1, 2, 0]), i32([40, 25, 40, 31, 9, 9, -3])
    usual = sanitize.COMPACT_COLUMNS
    for at_a_time in (2, usual):
        sanitize.COMPACT_COLUMNS = at_a_time
        found, lens = sanitize.compact_pages(EAGER, table, *asked, 8, 10)
        expected = [[7, 3, 0, 0], [7, 3, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0], *[[0] * 4] * 3]
        assert found.tolist() == expected
        assert lens.tolist() == [20, 15, 20, 11, 0, 0, 0]
    for seed in range(count):
        made, size = batches.generator(seed), (1, 7, 64)[seed % 3]
        sanitize.COMPACT_COLUMNS = (4, usual)[seed // 3 % 2]
        reqs, columns, blocks = (int(integers(made, least, 12, 1)) for least in (1, 0, 0))
        table = sampled(made, integers(made, 0, max(blocks, 1), reqs, columns), blocks)
        requests = sampled(made, integers(made, 0, reqs, 9), reqs)
        wanted = sampled(made, integers(made, 0, columns * size + 2, 9), columns * size)
        if seed % 2:
            table = torch.stack([table] * 2, -1)[..., 1]
        expected = compact_pages(table, requests, wanted, blocks, size)
        actual = sanitize.compact_pages(EAGER, table, requests, wanted, blocks, size)
        assert all(map(torch.equal, actual, expected)), seed
    sanitize.COMPACT_COLUMNS = usual
    return count


def main(every: int) -> None:
    """Run all calls, or each ``every``-th call."""
    print("lists", lists(12 // every))
    print("pages", pages(24 // every))
    assert opaque_op.kernel_module(torch.device("cpu")) is not None
    with fake_flash_mla.registered():
        for name, case in [*attention(), *dense(), *selected(), *prefills()][::every]:
            actual = launched(name, "flash_mla", *case.tensors, **case.settings)
            assert_right(name, case, actual)
    print("flash_mla", len(fake_flash_mla.calls))
    sys.modules["deep_gemm"] = FakeDeepGemm()
    for seed, num_rows in list(enumerate((1, 100, 256, 300, 1500)))[::every]:
        queries, lens, rows = indexer_call(seed)
        tensors, settings = (*queries, lens, *rows), {"block_size": 64, "num_rows": num_rows}
        expected = OPS["indexer_logits"].reference(*tensors, **settings, layout="v4_indexer_fp8")
        assert torch.equal(launched("indexer_logits", "deep_gemm", *tensors, **settings), expected)
    print("deep_gemm", sys.modules["deep_gemm"].calls)


if __name__ == "__main__":
    main(1 if len(sys.argv) > 1 else 6)
