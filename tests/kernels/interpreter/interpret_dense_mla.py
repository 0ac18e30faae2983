"""Dense MLA decode in Triton's interpreter: ragged batches of all layouts and dtypes, and plans.
tests/kernels/interpreter/test_scripts.py starts this file with TRITON_INTERPRET=1. It prints the
checks that passed."""

import sys

import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.testing.case import Case
from tests.support import mla_batches
from tests.support.mla_batches import DENSE, DS_FP8, FP8, LAYOUTS, assert_exact, mla_case, planned


def run(case: Case) -> tuple[Tensor, ...]:
    return tuple(OPS[DENSE].implementation("kernels")(EAGER, *case.tensors, **case.settings))


def check(case: Case, of: Case | None = None) -> None:
    assert_exact(run(case), of or case)


def formats() -> dict[str, Case]:
    return {
        "fp8": mla_case(20, [3, 2], 16, longest=70, layout=FP8),
        "fp8 queries": mla_case(21, [3, 2], 16, longest=70, layout=FP8, codes=True),
        "ds_fp8": mla_case(22, [3, 2], 16, longest=70, layout=DS_FP8),
        "heads of part of a tile": mla_case(26, [3, 2], 24, longest=70),
        "float16": mla_case(23, [3, 2], 8, longest=70, dtype=torch.float16),
        "float32": mla_case(24, [3, 2], 8, longest=50, dtype=torch.float32),
        "small rows": mla_case(
            25, [3, 2], 4, longest=50, dtype=torch.float32, width=24, rank=16, block_size=4
        ),
    }


def main(thorough: bool) -> None:
    # test_dense_mla.py runs all ``kernel_cases`` with the Gluon kernel
    cases = mla_batches.kernel_cases() if thorough else {}
    for name, case in (cases | formats()).items():
        check(case)
        print(name)
    case = mla_case(26, [1] * 4, 8, longest=200, hint=False)
    plan = ops.sparse_mla_plan(case.tensors[2], None, num_heads=8, num_programs=5)
    check(planned(case, plan), case)
    print("plan")
    for layout in LAYOUTS if thorough else LAYOUTS[:1]:
        for splits in (1, 2) if thorough else (2,):
            settings = {"longest": 150, "adversarial": False, "num_splits": splits}
            case = mla_case(27, [4, 2], 8, layout=layout, **settings)
            mla_batches.assert_spoils_what_sees_it(run, case)
    print("rows of NaN")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(thorough=len(sys.argv) > 1)
