"""Run modules of a quantised model that Hugging Face's plans split over ranks.

Hugging Face's plan gives each of these modules a forward that calls Hugging Face's kernels. Our
forwards read this rank's part of the weights instead. Then our forwards add or gather the results
of the ranks, as the placement of a weight requires, with collectives that a graph can contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.torch_compat import group_members, group_rank, group_size
from dsv4_ops.integrations.transformers.modules.replacement import (
    QUANTIZED_EXPERTS,
    QUANTIZED_LINEAR,
    Forward,
    Maker,
    class_of,
    in_place_of,
    is_split,
    local,
    own_forward,
    quantized_weights,
)
from dsv4_ops.integrations.transformers.modules.rewrite import Rewrite
from dsv4_ops.ops.context_parallel import cp_gather_heads, cp_gather_rows

SPLIT = "dsv4_ops_split"
"""Attribute of a split module that holds its ``Split``."""
_OWN = "dsv4_ops_own_weight"
"""Buffer with this rank's rows of an embedding or a head."""
FORWARD_OF_PLAN = "_dsv4_ops_split_forward"
"""Attribute that holds the forward that Hugging Face's tensor-parallel plan set."""


class Split(NamedTuple):
    """How the weights of a module are split over ranks.

    Attributes:
        group: Name of the process group.
        ranks: Number of processes in the group.
        via: How ranks send: "symmetric_memory", or else torch's collectives.
        sums: Whether the module's output is the sum over the ranks' outputs.
        first: First expert, or first row of the embedding, on this rank. None for linear layers,
            and if every rank has a part of each expert or row.
    """

    group: str
    ranks: int
    via: str
    sums: bool = False
    first: int | None = None


def split_of(module: Any) -> Split | None:
    """Return how a module of a patched model is split, or None."""
    split: Split | None = vars(module).get(SPLIT)
    return split


def groups_of(model: Any, parallel: ContextParallel | None) -> tuple[Any, ...]:
    """Return the name, the ranks, and this process's rank of each group in which a step sends."""
    names = {split.group for split in map(split_of, model.modules()) if split is not None}
    if parallel is not None and parallel.world_size > 1:
        names.add(parallel.group)
    return tuple((name, tuple(group_members(name)), group_rank(name)) for name in sorted(names))


def sums(module: Any) -> bool:
    """Whether a module's output is the sum over the ranks' outputs."""
    split = split_of(module)
    return split is not None and split.sums


def summed(module: Any, out: Tensor) -> Tensor:
    """Return ``out``, or the sum of ``out`` over the ranks if the module's output is this sum."""
    split = split_of(module)
    return out if split is None or not split.sums else _sum(out, split)


def _sum(out: Tensor, split: Split) -> Tensor:
    if split.via == "symmetric_memory":
        rows = out.reshape(-1, out.shape[-1])
        parts = cp_gather_rows(rows, split.group, via=split.via)
        return parts.view(split.ranks, *out.shape).sum(0)
    collectives = torch.ops._c10d_functional
    sent = collectives.all_reduce(out.contiguous(), "sum", split.group)
    total: Tensor = collectives.wait_tensor(sent)
    return total


def own_weight(module: Any) -> Tensor:
    """Return this rank's rows of a split embedding or head."""
    weight: Tensor = module._buffers[_OWN]
    return weight


def gathered_columns(module: Any, out: Tensor) -> Tensor:
    """Gather the columns of a split head's output from all ranks, [.., columns]."""
    split = split_of(module)
    if split is None:
        return out
    rows = out.reshape(-1, out.shape[-1], 1)
    return cp_gather_heads(rows, split.group).view(*out.shape[:-1], -1)


class SplitModules(Rewrite):
    """Let split modules of a quantised model run our forwards.

    Args:
        model: The model.
        parallel: The ranks that share the cache, or None.
        splits_head: Whether our forward computes the logits.
    """

    def __init__(self, model: Any, parallel: ContextParallel | None, splits_head: bool) -> None:
        self.model, self.parallel = model, parallel
        is_quantized = getattr(model.config, "quantization_config", None) is not None
        self.tables = (model.lm_head,) if splits_head else ()
        self.tables = (*self.tables, model.model.embed_tokens)
        self.runs = is_quantized and any(map(is_split, model.parameters()))

    def applies(self, module: Any) -> bool:
        """Whether a module is split, or holds split modules."""
        return self.runs and (
            module is self.model or hasattr(module, "shared_experts") or self._takes(module)
        )

    def check(self, op: str, name: str, module: Any) -> None:
        """Raise if a router numbers only its rank's experts, as Hugging Face's ``ep_router``
        does."""
        gate = getattr(module, "gate", None)
        if (
            hasattr(module, "shared_experts")
            and own_forward(gate) is not None
            and any(map(is_split, module.experts.parameters()))
        ):
            raise argument_error(
                op,
                f"{name}.gate",
                must="number the experts of all ranks",
                got="a forward of its own",
                do="Split the model with a plan that has no ep_router",
                kind=NotImplementedError,
            )

    def apply(self, module: Any) -> Iterator[tuple[str, Maker]]:
        """Mark the split modules, and yield forwards for embeddings and blocks of experts."""
        if module is self.model:  # mark all modules before other rewrites check forwards
            for each in filter(self._takes, module.modules()):
                self._take(each)
        elif class_of(module) == "DeepseekV4SparseMoeBlock":
            yield from _sum_once(module)
        elif isinstance(module, nn.Embedding):
            yield "forward", in_place_of(_embed)

    def restore(self, module: Any) -> None:
        """Put back the forward of Hugging Face's plan."""
        before = vars(module).pop(FORWARD_OF_PLAN, None)
        if before is not None:
            module.forward = before
        vars(module).pop(SPLIT, None)
        module._buffers.pop(_OWN, None)
        module._non_persistent_buffers_set.discard(_OWN)

    def _takes(self, module: Any) -> bool:
        weight = self._weight(module)
        return weight is not None and is_split(weight)

    def _weight(self, module: Any) -> Any:
        """Return a weight of ``module`` if our forwards run the module, else None."""
        weights = quantized_weights(module)
        if not weights and not any(module is table for table in self.tables):
            return None
        return module._parameters[weights[0] if weights else QUANTIZED_LINEAR[0]]

    def _take(self, module: Any) -> None:
        """Store Hugging Face's forward and the module's ``Split`` on the module."""
        setattr(module, FORWARD_OF_PLAN, vars(module).pop("forward", None))
        setattr(module, SPLIT, self._split(module))
        if not quantized_weights(module):
            module.register_buffer(_OWN, local(module.weight).detach(), persistent=False)

    def _split(self, module: Any) -> Split:
        weight: Any = self._weight(module)
        (placement,) = weight.placements
        group, via = self._ranks(weight.device_mesh)
        if placement.is_replicate() or (placement.is_shard(0) and not _adds(module)):
            return Split(group, group_size(group), via)
        first = group_rank(group) * local(weight).shape[0] if placement.is_shard(0) else None
        return Split(group, group_size(group), via, sums=True, first=first)

    def _ranks(self, mesh: Any) -> tuple[str, str]:
        """Return the name of a mesh's group, and how its ranks send. If ``parallel`` has the same
        ranks, return the group of ``parallel``, and how this group sends."""
        members = mesh.mesh.flatten().tolist()
        if self.parallel is not None and group_members(self.parallel.group) == members:
            return self.parallel.group, self.parallel.gathers_via
        return mesh.get_group().group_name, "all_gather"


def _sum_once(block: Any) -> Iterator[tuple[str, Maker]]:
    """On each rank, add the outputs of routed and shared experts; then sum over the ranks once."""
    parts = (block.experts, block.shared_experts.down_proj)
    splits = [split for split in map(split_of, parts) if split is not None and split.sums]
    if len(splits) == len(parts):
        for part, split in zip(parts, splits, strict=True):
            setattr(part, SPLIT, split._replace(sums=False))
        setattr(block, SPLIT, splits[0])
        yield "forward", _block_forward


def _adds(module: Any) -> bool:
    """Whether ranks must sum their outputs if the weights are split along dimension 0.
    Linear layers need no sum, because each rank computes other columns of the output."""
    return isinstance(module, nn.Embedding) or quantized_weights(module) == QUANTIZED_EXPERTS


def own_experts(module: Any, expert_ids: Tensor, count: int) -> Tensor:
    """Return the expert ids, numbered from this rank's first expert; -1 for the ids of other ranks'
    experts. A rank has ``count`` experts."""
    split = split_of(module)
    if split is None or split.first is None:
        return expert_ids
    own = expert_ids - split.first
    return torch.where((own >= 0) & (own < count), own, -1)


def _embed(self: Any, ids: Tensor) -> Tensor:
    split, weight = split_of(self), own_weight(self)
    assert split is not None
    assert split.first is not None
    own = ids - split.first
    is_own = (own >= 0) & (own < weight.shape[0])
    rows = torch.nn.functional.embedding(own.clamp(0, weight.shape[0] - 1), weight)
    return _sum(rows * is_own[..., None], split)


def _block_forward(before: Forward) -> Forward:
    def forward(self: Any, *args: Any, **rest: Any) -> Tensor:
        return summed(self, before(self, *args, **rest))

    return forward
