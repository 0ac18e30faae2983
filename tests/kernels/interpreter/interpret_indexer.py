"""The indexer's selection in Triton's interpreter with small scratch rows, so that short rows
already have parts, reductions and groups. tests/kernels/interpreter/test_indexer_kernels.py starts
this file with TRITON_INTERPRET=1. It prints how often each of the three occurred."""

import sys
from collections import Counter

import numpy as np
import torch
from hypothesis import given

from dsv4_ops import testing
from dsv4_ops.core.layout import IndexerLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.indexer import logits as indexer, topk as launchers
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.indexer import beyond_int32
from tests.kernels.interpreter.interpret_kernels import check, fuzz
from tests.support.sampled import sampled

SMALL = {
    "PROGRAMS": 40, "CAPACITY": 64, "MERGE_CAPACITY": 64, "GROUPS": 3, "WIDE": 32,
    "WIDE_GROUP": 256, "MIN_PART": 16, "LOGITS_STEP": 16, "LOGITS_MIN_PART": 16, "SAMPLE": 32,
    "KEEP_STEP": 16, "KEPT_CAPACITY": 64,
}  # fmt: skip
TOPK = 16
happened: Counter[str] = Counter()


def counted(name: str, kernel: object) -> object:
    class Recorder:
        def __getitem__(self, grid):
            happened[name] += 1
            return kernel[grid]

    return Recorder()


def long_rows(seed: int, kind: str, topk: int = TOPK) -> Case:
    """Make rows of up to 2500 logits: random, full of ties, ascending, descending, constant."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(500, 2500, (), generator=generator))
    logits = torch.randn(3, num_rows, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind != "random":
        column = torch.arange(num_rows, dtype=torch.float32)
        logits[:] = {"ascending": column, "descending": -column, "constant": 0 * column}[kind]
    lens = torch.randint(0, num_rows + 1, (3,), generator=generator, dtype=torch.int32)
    lens[0] = num_rows
    logits[0, ::7] = -torch.inf
    logits[1, 3:9] = torch.nan
    lens[1] = num_rows // 8  # parts have at most 40 logits
    return Case(kind, (logits, lens), {"topk": topk})


def main(examples: int) -> None:
    vars(launchers).update(SMALL)
    indexer.STEP = 16
    for name in ("merge_groups_kernel", "merge_parts_kernel", "select_kept_kernel"):
        setattr(launchers, name, counted(name, getattr(launchers, name)))
    thorough = examples > 1
    every = ("random", "ties", "ascending", "descending", "constant")
    for kind in every if thorough else ("ties",):
        check("indexer_topk", long_rows(0, kind))
        # two complete lists in one merge, and complete lists that are too many for one merge
        launchers.MERGE_CAPACITY = 128
        check("indexer_topk", long_rows(1, kind))
        check("indexer_topk", long_rows(2, kind, topk=40))
        launchers.MERGE_CAPACITY = SMALL["MERGE_CAPACITY"]
    for name in ("indexer_topk", "indexer_select"):
        for case in testing.cases_of(name):
            check(name, case)
        fuzz(name, examples)
    small = {"block_size": 64, "compress_ratio": 1, "topk": TOPK, "layout": IndexerLayout.tag}

    @sampled(examples, examples)
    @given(testing.op_testing("indexer_select").strategy(settings=small))
    def compare(case: Case) -> None:
        check("indexer_select", case)

    for stored, small["slots"] in ((2048, False), (2048, True), (1, False), (1, True)):
        launchers.STORED_TOPK = stored
        compare()
    known = launchers.positive, launchers.STORED_BYTES
    # no int, as for symbolic sizes: both variants are launched, and one of them has no programs
    symbol = (lambda number: np.int64(number > 0)), 500
    for launchers.positive, launchers.STORED_BYTES in (symbol, known):
        for case in testing.cases_of("indexer_select"):
            check("indexer_select", case)
    spec, tensors, small["topk"] = OPS["indexer_select"], beyond_int32(), 130
    found = spec.implementation("kernels")(EAGER, *tensors, **small)
    assert torch.equal(found, spec.reference(*tensors, **small))
    print(happened)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
