"""The properties of GPUs that kernels depend on, by compute capability."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4_ops.core.tiles import HEAD_TILE

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """Properties of a GPU that kernels depend on.

    Args:
        shared: Maximum shared memory of a program, in bytes.
        converts_codes: Whether Triton converts e4m3 codes. If not, kernels convert them with
            integer arithmetic.
        is_hopper: Whether the GPU runs our code for Hopper: Gluon kernels, and products of codes.
        large_tiles: Whether attention in Triton uses the tile sizes of Hopper, whose tensor cores
            read operands from shared memory. With ``mma.sync``, operands and sums are in registers,
            and these tiles would spill. On Blackwell, these tiles exceed the tensor memory.
        mma_sync: Whether warps multiply with ``mma.sync`` alone, from registers.
        dependent_launch: Whether a kernel may start before the previous kernel ends.
    """

    shared: int
    converts_codes: bool = True
    is_hopper: bool = False
    large_tiles: bool = False
    mma_sync: bool = False
    dependent_launch: bool = False

    @property
    def head_tile(self) -> int:
        """Heads per program of sparse MLA in Triton. For 64 heads, queries, keys and P take 137 KiB
        of shared memory; for 32 heads, 104 KiB."""
        if self.large_tiles or (self.mma_sync and self.shared >= 137 * _KIB):
            return HEAD_TILE
        return HEAD_TILE // 2 if self.shared >= 104 * _KIB else HEAD_TILE // 4


HOPPER = (9, 0)

TARGETS = {
    (8, 0): Target(163 * _KIB, converts_codes=False, mma_sync=True),
    (8, 6): Target(99 * _KIB, converts_codes=False, mma_sync=True),
    (8, 7): Target(163 * _KIB, converts_codes=False, mma_sync=True),
    (8, 9): Target(99 * _KIB, mma_sync=True),
    HOPPER: Target(227 * _KIB, is_hopper=True, large_tiles=True, dependent_launch=True),
    (10, 0): Target(227 * _KIB),
    (10, 3): Target(227 * _KIB),
    (12, 0): Target(99 * _KIB, mma_sync=True),
    (12, 1): Target(99 * _KIB, mma_sync=True),
}
"""Targets by compute capability; sizes of shared memory as in the CUDA programming guide."""

_OTHER, _EARLIER = Target(99 * _KIB), Target(64 * _KIB, converts_codes=False)


def target_of(capability: tuple[int, int] | None) -> Target:
    """Return the target of a compute capability; None stands for a device not made by NVIDIA."""
    if capability is None:
        return Target(227 * _KIB, converts_codes=torch.version.hip is None, large_tiles=True)
    return TARGETS.get(capability, _OTHER if capability > (8, 9) else _EARLIER)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, else None. For an AMD GPU, torch reports
    numbers that mean something else."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)
