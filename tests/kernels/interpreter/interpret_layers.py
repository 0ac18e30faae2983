"""The attention of C128 layers in Triton's interpreter, by the plan of their step and by that of
another step of as many tokens; tests/compile/test_compiled_plans.py starts it with
TRITON_INTERPRET=1. Prints how many calls were compared."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_ops.testing.case import Case
from tests.kernels.interpreter.interpret_kernels import check
from tests.support.attention_batches import PAGED
from tests.support.layers import HEADS, SPEC, Engine, SmallLayer, hidden_states, poison, projected
from tests.support.prefill_batches import with_plan

STEPS = (
    ([20, 1, 17, 30], 0),
    ([2, 2, 2, 2], 2),  # two tokens a request, and padding
    ([1, 1, 1, 1], 6),
    ([0, 0, 1, 1], 8),
)


class Calls(TorchDispatchMode):
    """The calls of the op, as they were before anything else was written."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: list[Case] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "dsv4_ops" and op._opname == PAGED:
            self.cases.append(Case("layer", tuple(args), dict(kwargs)).copy())
        return op(*args, **(kwargs or {}))


def calls() -> list[Case]:
    """Of decode steps behind a prefill, of ten tokens each."""
    layer = SmallLayer("c128", SPEC)
    layer.plan_heads = HEADS
    poison(layer)
    engine, inputs = Engine(layer), projected(layer, hidden_states())
    with Calls() as made:
        for counts, padding in STEPS:
            engine.run(inputs, counts, padding)
    return made.cases[1:]


def plan_in(case: Case) -> Tensor:
    plan: Tensor = case.tensors[-3]
    return plan


def main() -> None:
    found = calls()
    for case, other in zip(found, [*found[1:], found[0]], strict=True):
        assert int((plan_in(case)[:, 2] > 1).sum()) > 1, "tokens of several splits"
        assert not torch.equal(plan_in(case), plan_in(other))
        check(PAGED, case)
        check(PAGED, with_plan(case, plan_in(other)))
    print(len(found), "calls")


if __name__ == "__main__":
    main()
