"""Kernels around the calls of FlashMLA and DeepGEMM in Triton's interpreter, over stand-ins of both
that refuse what the libraries would misread; tests/test_providers_compiled.py starts it with
TRITON_INTERPRET=1. Prints what has passed."""

import sys
from collections.abc import Iterator

import fake_flash_mla
import torch
from fake_deep_gemm import FakeDeepGemm, indexer_call
from gpu_attention import DECODE, GATHERED, PAGED, decode_case, gathered_case, paged_case, turned
from gpu_prefill import MODES, PREFILL, prefill_case

from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels import foreign
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.compare import assert_agrees


def launched(name: str, library: str, *tensors: object, **settings: object) -> object:
    return OPS[name].launcher(library)(lambda kernel: kernel, *tensors, **settings)


def attention() -> Iterator[tuple[str, Case]]:
    for seed, tokens, heads in ((0, 7, 64), (1, 2, 128), (2, 1, 64)):
        yield DECODE, decode_case(seed, tokens, heads, 70)
        yield PAGED, paged_case(seed, tokens, heads, columns=150)
        yield GATHERED, gathered_case(seed, tokens, heads, 300)
    yield DECODE, decode_case(3, 5, 64, None)
    yield DECODE, turned(decode_case(4, 7, 64))
    yield PAGED, turned(paged_case(5, 7, 64, columns=20))
    case = turned(decode_case(6, 7, 64))
    yield DECODE, Case("other angles", (*case.tensors[:-1], case.tensors[-1][:, :8]), case.settings)
    wide = [None if each is None else torch.stack([each] * 2, -1)[..., 0] for each in case.tensors]
    kept = [wide[place] if place in (0, 2, 3, 5, 6, 7, 10) else each
            for place, each in enumerate(case.tensors)]  # fmt: skip
    yield DECODE, Case("strided", tuple(kept), case.settings)


SMALL = {"longest": 300, "max_reqs": 2, "window": 70}


def prefills() -> Iterator[tuple[str, Case]]:
    """Few entries and tokens of a request at a time as well as all of them."""
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


def main() -> None:
    assert foreign.kernels(torch.device("cpu")) is not None
    with fake_flash_mla.registered():
        for name, case in (*attention(), *prefills()):
            actual = launched(name, "flash_mla", *case.tensors, **case.settings)
            expected = case.run(OPS[name].reference)
            assert_agrees(f"{name}, {case.name}", testing.station(name), case, actual, expected)
    print("flash_mla", len(fake_flash_mla.calls))
    sys.modules["deep_gemm"] = FakeDeepGemm()
    for seed, num_rows in enumerate((1, 100, 256, 300, 1500)):
        queries, lens, rows = indexer_call(seed)
        tensors, settings = (*queries, lens, *rows), {"block_size": 64, "num_rows": num_rows}
        expected = OPS["indexer_logits"].reference(*tensors, **settings, layout="v4_indexer_fp8")
        assert torch.equal(launched("indexer_logits", "deep_gemm", *tensors, **settings), expected)
    print("deep_gemm", sys.modules["deep_gemm"].calls)


if __name__ == "__main__":
    main()
