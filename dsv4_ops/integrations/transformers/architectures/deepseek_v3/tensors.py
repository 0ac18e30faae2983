"""Tables of the cache of a dense MLA model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_ops.attention import pytrees


@dataclass(frozen=True)
class MlaTables:
    """Block table of a cache, int32 [max_batch_size, maximum blocks of a row].

    Attributes:
        blocks: Numbers of the pool's blocks that hold a row's latents; -1 where none is reserved.
    """

    blocks: Tensor

    @property
    def pool(self) -> Tensor:
        """The block table of the pool that all rows share."""
        return self.blocks


@dataclass(frozen=True)
class ShardedMlaTables(MlaTables):
    """Tables of a cache that several ranks share.

    Attributes:
        cp_rank: The rank, [1], int32; a tensor, so that one AOTInductor package serves all ranks.
    """

    cp_rank: Tensor


@dataclass(frozen=True)
class MlaRope:
    """Cosines and sines of all layers, [max_cache_len, qk_rope_head_dim], float32."""

    table: Tensor

    @property
    def num_positions(self) -> int:
        """Number of rows of the table."""
        return self.table.shape[0]


pytrees.register(MlaTables, ShardedMlaTables, MlaRope, namespace="dsv4_ops.transformers")
