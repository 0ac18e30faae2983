"""The facts that a launcher object has about its launches."""

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.kernels.aot.launch_op import PACKAGED
from dsv4_ops.kernels.launcher import EAGER, TRACED, Launcher
from dsv4_ops.kernels.sparse_mla.decode import hopper_split_keys_kernel, split_keys_kernel

CPU = torch.device("cpu")


class Kernel:
    """A kernel that records its grids."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args: None


def test_only_graphs_that_inductor_compiles_keep_gluon_kernels_opaque():
    assert [each.opaque_gluon for each in (EAGER, TRACED, PACKAGED)] == [False, True, False]


def test_only_packages_copy_inputs_that_are_not_aligned():
    """A tensor of bytes is at an odd address from its second value on."""
    odd = torch.empty(64, dtype=torch.uint8)[1:]
    assert not EAGER.is_aligned(odd)
    assert EAGER.is_aligned(torch.empty(64, dtype=torch.uint8))
    assert PACKAGED.is_aligned(odd)


def test_a_device_that_is_not_here_is_what_was_said_of_it():
    assert EAGER.capability(CPU) is None
    assert EAGER.num_sms(CPU) == 132
    told = Launcher(EAGER.wrap, capability=(9, 0), num_sms=78)
    assert (told.capability(CPU), told.num_sms(CPU)) == ((9, 0), 78)


def test_what_a_gpu_offers_follows_from_its_compute_capability(monkeypatch):
    """Shared memory in KiB, and whether a GPU converts e4m3 codes and runs Hopper's kernels. Later
    GPUs are taken to have 99 KiB; GPUs before 8.9 do not convert."""
    monkeypatch.setattr(torch.version, "hip", None)
    offered = {
        (7, 5): (64, False, False),
        (8, 0): (163, False, False),
        (8, 6): (99, False, False),
        (8, 9): (99, True, False),
        (9, 0): (227, True, True),
        (10, 0): (227, True, False),
        (12, 0): (99, True, False),
        (13, 0): (99, True, False),
        None: (227, True, False),
    }
    for capability, expected in offered.items():
        target = Launcher(EAGER.wrap, capability=capability).target(CPU)
        found = (target.shared // 1024, target.converts_codes, target.is_hopper)
        assert found == expected, capability
        heads = {(8, 0): 64, (9, 0): 64, (10, 0): 32, None: 64}.get(capability, 16)
        assert target.head_tile == heads


def test_a_launch_has_an_empty_grid_if_one_of_its_predicates_is_0():
    kernel = Kernel()
    launcher = Launcher(lambda each: each, capability=(9, 0))
    for flag in (0, 1):
        predicated = launcher.predicated(flag)
        predicated(kernel)[(6, 4)]()
        assert predicated.capability(CPU) == (9, 0)
    launcher(kernel)[(2,)]()
    launcher.predicated(1).predicated(0)(kernel)[(3,)]()
    assert kernel.grids == [(0, 4), (6, 4), (2,), (0,)]


def test_a_package_calls_gluon_kernels_by_an_op():
    assert type(PACKAGED(hopper_split_keys_kernel)) is not type(PACKAGED(split_keys_kernel))
