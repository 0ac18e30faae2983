"""Ranks that share the cache of every sequence."""

from __future__ import annotations

import hashlib
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
    """Decode context parallelism: ranks take the rows of every sequence in turns.

    Each rank stores its rows, attends to them, and combines its attention with that of the others.
    Rows are those of positions, in DeepSeek-V4 compressed rows and the indexer's keys. Tokens and
    metadata of a step are the same on all ranks.

    Args:
        group: Name of the process group, ``ProcessGroup.group_name``.
        world_size: Its ranks; ``of`` asks it. 1 is no parallelism: nothing is left of it.
        interleave: Consecutive rows on one rank; divides the rows of a block.
        via: How ranks combine their attention, as for ``cp_combine``; not used where every rank
            keeps all heads. By "symmetric_memory" they gather too what a decode step gathers:
            queries, the indexer's candidates, and attention where every rank keeps all heads.
        shards_heads: Whether each rank has its part of the query heads (tensor parallelism of the
            projections around the attention). Ranks gather the queries of all heads, and each gets
            the output of its own. If not, each rank has all heads, gathers every rank's output, and
            in V3 computes the prefills alone.
        shards_index_heads: Whether each rank has its part of the indexer's heads. Ranks gather the
            queries of all and score with them, so that they select the rows of one GPU.

    Raises:
        ValueError, TypeError: a number out of range, or another ``via``.

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
        """Make one of a ``ProcessGroup``, or of all processes.

        Raises:
            ValueError: ``torch.distributed`` has no such group.
        """
        found = group
        if group is None and torch.distributed.is_initialized():
            found = torch.distributed.group.WORLD
        name = getattr(found, "group_name", found)
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
        """How ranks gather what a decode step gathers, as for ``cp_gather_heads``."""
        return self.via if self.via in GATHERS else GATHERS[0]

    @property
    def turn(self) -> int:
        """Rows after which the first rank is in turn again."""
        return self.world_size * self.interleave

    def rank(self, device: torch.device | str | None = None) -> Tensor:
        """Return the rank of this process, [1], int32, as ops take it."""
        return torch.tensor([group_rank(self.group)], dtype=torch.int32, device=device)

    def check(self, op: str, row_bytes: int, device: torch.device) -> None:
        """Raise an error of ``op`` if there are no such ranks, or they cannot merge attention of
        ``row_bytes`` bytes a head on ``device``."""
        size = process_group_size(op, self.group)
        if size != self.world_size:
            raise argument_error(
                op,
                "spec.parallel",
                must=f"have {size} ranks as its group",
                got=self.world_size,
                do="Make it with ContextParallel.of",
            )
        if self.shards_heads:
            check_combines(op, "spec.parallel.via", self.via, row_bytes, device)

    def agree(self, op: str, what: str, device: torch.device | str, **values: Any) -> None:
        """Raise on every rank if any of ``values`` differs between ranks, which would hang steps.

        Reads values of all ranks on the host: for setup, not for a step.

        Args:
            op: Public function to name in the error.
            what: What the values describe.
            device: Device of the tensors that the group sends.
            values: Anything whose ``repr`` tells it apart.

        Raises:
            ValueError: they differ.
        """
        if self.world_size == 1:
            return
        digests = [hashlib.sha256(f"{key}={value!r}".encode()) for key, value in values.items()]
        own = torch.tensor([int(each.hexdigest()[:15], 16) for each in digests], device=device)
        every = cp_gather_rows(own, self.group).view(self.world_size, -1)
        differing = (every != every[0]).any(0).tolist()
        for (name, value), differs in zip(values.items(), differing, strict=True):
            if differs:
                raise argument_error(
                    op,
                    what,
                    must=f"be the same {name} on all ranks of a context-parallel group",
                    got=f"{value!r} here",
                    do="Start every rank with the same arguments",
                )


def every_rank(out: Tensor, lse: Tensor, ranks: ContextParallel) -> Sequence[Tensor]:
    """Attention of all ranks, [world_size, num_tokens, ...]."""
    own = (out[None], lse[None])
    return gather_each("cp_gather_rows", own, ranks.group, dim=0, via=ranks.gathers_via)
