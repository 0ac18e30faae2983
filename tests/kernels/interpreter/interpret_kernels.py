"""Every kernel in Triton's interpreter against its reference.
tests/kernels/interpreter/test_kernels.py starts this file with TRITON_INTERPRET=1. It skips calls
that a kernel does not support, and prints the number of calls per op."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given

from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS, TRITON
from dsv4_ops.dispatch import limits
from dsv4_ops.kernels.launch_plans import LaunchPlans
from dsv4_ops.kernels.launcher import EAGER, Launcher
from dsv4_ops.testing.case import Case, results
from tests.helpers import assert_right
from tests.support.sampled import sampled

SCALE_BYTES = (105, 247)  # as inserts write; the interpreter is wrong about subnormal products


def tamed(name: str, case: Case) -> Case:
    """Replace random scale bytes, which a gather would read, by bytes that an insert writes."""
    if case.settings.get("layout") != MainLayout.tag or "gather" not in name:
        return case
    tensors = list(case.copy().tensors)
    layout = MainLayout(case.settings["block_size"])
    cache = tensors[OPS[name].parameters.index("k_cache")]
    cache[:, layout.block_size * layout.data_bytes :].clamp_(*SCALE_BYTES)
    return Case(case.name, tuple(tensors), case.settings)


SMALL_TILES = {"sparse_mla_decode": 3, "sparse_mla_decode_paged": 2, "sparse_mla_prefill": 3}
"""Numbers of named cases that also run with the tiles of GPUs other than Hopper."""


def repeated(name: str, case: Case) -> tuple[torch.Tensor, ...]:
    """Repeat the launches of an earlier call, whose tensors are spoiled first."""
    spec, plans = OPS[name], LaunchPlans()

    def choose(args, kwargs):
        return spec.implementation("kernels"), args, kwargs, True

    first, again = case.copy(), case.copy()
    plans.run(name, choose, first.tensors, first.settings)
    for tensor in first.tensors:
        if tensor is not None:
            tensor.zero_()
    assert None not in plans.plans.values(), name
    returned = plans.run(name, None, again.tensors, again.settings)
    return results(returned, *(again.tensors[place] for place in spec.mutated))


def run(name: str, case: Case, launch: Launcher = EAGER) -> tuple[torch.Tensor, ...]:
    spec, copy = OPS[name], case.copy()
    returned = spec.implementation("kernels")(launch, *copy.tensors, **copy.settings)
    return results(returned, *(copy.tensors[place] for place in spec.mutated))


def check(name: str, case: Case, run: Callable[..., Any] = run) -> None:
    spec = OPS[name]
    case = tamed(name, case)
    if limits.limit(name, TRITON, spec.arguments(case.tensors, case.settings)) is not None:
        return
    assert_right(name, case, run(name, case))


def fuzz(name: str, examples: int) -> None:
    @sampled(examples, examples)
    @given(testing.strategy(name))
    def compare(case: Case) -> None:
        check(name, case)

    compare()


def main(examples: int, *names: str) -> None:
    for name, spec in OPS.items():
        if names and name not in names:
            continue
        if spec.has_kernel and name != "sparse_mla_gathered":  # in Gluon: test_gathered.py
            for case in testing.cases_of(name):
                check(name, case)
            for case in testing.cases_of(name)[: SMALL_TILES.get(name, 0)]:
                check(name, case, partial(run, launch=Launcher(EAGER.wrap, capability=(8, 6))))
            check(name, testing.cases_of(name)[-1], repeated)
            fuzz(name, examples)
            print(name, len(testing.cases_of(name)) + examples)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), *sys.argv[2:])
