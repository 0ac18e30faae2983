"""Ranks that share the cache of every sequence."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.torch_compat import group_rank
from dsv4_ops.ops.context_parallel import (
    COMBINES,
    GATHERS,
    check_combines,
    cp_gather_rows,
    gather_each,
    process_group_size,
)


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Decode context parallelism: ranks share the rows of every sequence, round-robin.

    Each rank stores its rows, attends to them, and combines its attention with that of the other
    ranks. A row is a position's latent or, in DeepSeek-V4, a compressed row and its indexer key.
    All ranks have the same tokens and step metadata.

    Args:
        group: Name of the process group, ``ProcessGroup.group_name``.
        world_size: Number of ranks; ``of`` reads it from the group. 1 disables the parallelism.
        interleave: Consecutive rows on one rank; divides the rows per block.
        via: How ranks combine their attention, as for ``cp_combine``. If every rank keeps all
            heads, ranks gather attention instead. "symmetric_memory" is also used for this gather,
            and to gather a decode step's queries and indexer candidates; with another ``via``,
            ranks all-gather them.
        shards_heads: Whether each rank has a part of the query heads (tensor parallelism of the
            projections around the attention). Ranks then gather the queries of all heads, and each
            rank gets the output of its own heads. Otherwise each rank has all heads and gathers
            every rank's output; in V3, each rank then computes all prefills.
        shards_index_heads: Whether each rank has a part of the indexer's heads. Ranks then score
            with the gathered queries of all heads, so that they select the same rows as one GPU.

    Raises:
        ValueError, TypeError: a number is out of range, or ``via`` is unknown.

    Example:
        >>> from dsv4_ops.attention import ContextParallel
        >>> ContextParallel(group="0", world_size=2, interleave=16).turn
        32
    """

    group: str
    world_size: int
    interleave: int = 1
    via: str = "reduce_scatter"
    shards_heads: bool = False
    shards_index_heads: bool = False

    def __post_init__(self) -> None:
        checks = Checks("ContextParallel")
        checks.at_least(1, world_size=self.world_size, interleave=self.interleave)
        checks.one_of("via", self.via, *COMBINES, belongs_to="ranks shall combine")
        checks.flag("shards_heads", self.shards_heads)
        checks.flag("shards_index_heads", self.shards_index_heads)

    @classmethod
    def of(cls, group: Any = None, **settings: Any) -> ContextParallel:
        """Make a ``ContextParallel`` for a ``ProcessGroup``, or for all processes.

        Raises:
            ValueError: ``torch.distributed`` has no such group.
        """
        resolved = group
        if group is None and torch.distributed.is_initialized():
            resolved = torch.distributed.group.WORLD
        name = getattr(resolved, "group_name", resolved)
        size = process_group_size("ContextParallel.of", "default" if name is None else name)
        return cls(group=name, world_size=size, **settings)

    @property
    def head_parts(self) -> int:
        """Ranks that the query heads are divided among."""
        return self.world_size if self.shards_heads else 1

    @property
    def index_head_parts(self) -> int:
        """Ranks that the indexer's heads are divided among."""
        return self.world_size if self.shards_index_heads else 1

    @property
    def gathers_via(self) -> str:
        """How ranks gather in a decode step, as for ``cp_gather_heads``."""
        return self.via if self.via in GATHERS else GATHERS[0]

    @property
    def turn(self) -> int:
        """Number of consecutive rows in which every rank has one turn."""
        return self.world_size * self.interleave

    def rank(self, device: torch.device | str | None = None) -> Tensor:
        """Return the rank of this process, [1], int32, for the argument ``cp_rank`` of ops."""
        return torch.tensor([group_rank(self.group)], dtype=torch.int32, device=device)

    def check(self, op: str, row_bytes: int, device: torch.device) -> None:
        """Raise an error that names ``op`` unless the group has ``world_size`` ranks and can merge
        their attention.

        The attention output has ``row_bytes`` bytes per head and is on ``device``."""
        size = process_group_size(op, self.group)
        if size != self.world_size:
            raise argument_error(
                op,
                "spec.parallel",
                must=f"have {size} ranks, as its group has",
                got=self.world_size,
                do="Make it with ContextParallel.of",
            )
        if self.shards_heads:
            check_combines(op, "spec.parallel.via", self.via, row_bytes, device)

    def agree(self, op: str, what: str, device: torch.device | str, **values: Any) -> None:
        """Raise on every rank if any of ``values`` differs between ranks, because steps would hang.

        The method synchronises with the host: call it at setup, not in a step.

        Args:
            op: Public function to name in the error.
            what: What the values describe.
            device: Device of the tensors that the group sends.
            values: Values to compare by their ``repr``.

        Raises:
            ValueError: a value differs between ranks.
        """
        differing = self.differing(device, **values)
        for name, value in values.items():
            if name in differing:
                raise argument_error(
                    op,
                    what,
                    must=f"be the same {name} on all ranks of a context-parallel group",
                    got=f"{value!r:.200} here",
                    do="Start every rank with the same arguments, prompts and seeds",
                )

    def differing(self, device: torch.device | str, **values: Any) -> list[str]:
        """Return the names of the values that differ between ranks. For the arguments, see
        ``agree``; all ranks must call the method."""
        if self.world_size == 1:
            return []
        digests = [hashlib.sha256(f"{key}={value!r}".encode()) for key, value in values.items()]
        own = torch.tensor([int(each.hexdigest()[:15], 16) for each in digests], device=device)
        every = cp_gather_rows(own, self.group).view(self.world_size, -1)
        return list(itertools.compress(values, (every != every[0]).any(0).tolist()))


def every_rank(out: Tensor, lse: Tensor, ranks: ContextParallel) -> Sequence[Tensor]:
    """Gather the attention of all ranks, [world_size, num_tokens, ...]."""
    own = (out[None], lse[None])
    return gather_each("cp_gather_rows", own, ranks.group, dim=0, via=ranks.gathers_via)
