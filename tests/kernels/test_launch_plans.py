"""Later calls of the same form repeat the launches of a call."""

import inspect

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dsv4_ops.core.layout import CACHE_ALIGNMENT

pytest.importorskip("triton", reason="published for Linux only")
from dsv4_ops.kernels.launch_plans import LaunchPlans


class Kernel:
    """A kernel that adds ``number`` times ``COUNT`` to x, and its compiled code."""

    arg_names = ("x", "number", "COUNT")
    signature = inspect.signature(lambda x, number, COUNT=1: None)
    packed_metadata = ()

    def __init__(self):
        self.grids, self.chosen = [], 0

    def __getitem__(self, grid):
        def launch(x, number, COUNT=1, **options):
            self.grids.append(grid)
            with _disable_current_modes():  # a kernel calls no op of torch
                x += number * COUNT
            return self

        return launch


def called(plans, kernel, *args, factor=2):
    """Return args[0] + 3 * factor twice, by two launches; the arguments do not change."""

    def launcher(launch, x, *others, factor):
        kernel.chosen += 1
        first = torch.empty_like(x)
        first.copy_(x)
        launch(kernel)[len(x),](first, 3, COUNT=factor, num_warps=4)
        second = torch.stack((x, *others)).sum(0) if others else x.clone()
        launch(kernel)[2, 3](second, 3 * factor)
        return first, second

    return plans.run("op", lambda *call: (launcher, *call, True), args, {"factor": factor})


def test_a_call_of_the_same_form_launches_the_same_kernels():
    plans, kernel = LaunchPlans(), Kernel()
    for value in (1.0, 20.0, 50.0):
        first, second = called(plans, kernel, torch.full((4,), value))
        assert first.tolist() == second.tolist() == [value + 6.0] * 4
    assert kernel.chosen == 1
    assert kernel.grids == [(4,), (2, 3), (4, 1, 1), (2, 3, 1), (4, 1, 1), (2, 3, 1)]


def test_sizes_strides_dtypes_addresses_and_settings_are_forms():
    plans, kernel, row = LaunchPlans(), Kernel(), torch.zeros(3 * CACHE_ALIGNMENT)
    calls = [
        (row[:4], 2), (row[:4], 3), (row[:5], 2), (row[:8:2], 2), (row[1:5], 2),
        (row[:4].double(), 2), (row[:4].int(), 2),
        (torch.nn.Parameter(row[:4].bfloat16(), requires_grad=False), 2),
    ]  # fmt: skip
    for tensor, factor in 2 * calls:
        first, _ = called(plans, kernel, tensor, factor=factor)
        assert first.tolist() == [3.0 * factor] * len(tensor)
        assert first.dtype == tensor.dtype
    assert kernel.chosen == len(calls)


def test_one_tensor_passed_twice_is_another_form_than_two():
    plans, kernel = LaunchPlans(), Kernel()
    one, two = torch.ones(4), torch.full((4,), 2.0)
    assert called(plans, kernel, one, one)[1].tolist() == [8.0] * 4
    assert called(plans, kernel, one, two)[1].tolist() == [9.0] * 4
    assert called(plans, kernel, two, two)[1].tolist() == [10.0] * 4
    assert kernel.chosen == 2


@pytest.mark.parametrize("reads", ["a tensor of its own", "a value"])
def test_what_differs_by_call_is_not_repeated(reads):
    plans, kernel = LaunchPlans(), Kernel()

    def choose(args, kwargs):
        return launcher, args, kwargs, True

    def launcher(launch, x):
        kernel.chosen += 1
        out = torch.tensor([float(kernel.chosen)]) if reads != "a value" else x * x[0].item()
        launch(kernel)[1,](out, 1)
        return out

    found = [plans.run("op", choose, (torch.full((1,), value),), {}).item() for value in (2.0, 3.0)]
    assert found == ([5.0, 10.0] if reads == "a value" else [2.0, 3.0])
    assert kernel.chosen == 2


def test_other_implementations_are_chosen_each_time():
    plans, chosen = LaunchPlans(), []

    def choose(args, kwargs):
        chosen.append(args)
        return (lambda x: x + len(chosen)), args, kwargs, False

    found = [plans.run("op", choose, (torch.zeros(1),), {}).item() for _ in range(2)]
    assert found == [1.0, 2.0]
