"""Public functions and specs of the ops, one file per family. Importing this package registers
every op."""

from dsv4_ops.ops import (
    batch as batch,
    c4_step as c4_step,
    chunking as chunking,
    compressor as compressor,
    context_parallel as context_parallel,
    draft as draft,
    experts as experts,
    indexer as indexer,
    indices as indices,
    kv_cache as kv_cache,
    linear as linear,
    mla as mla,
    mla_context as mla_context,
    pack as pack,
    rope as rope,
    sinkhorn as sinkhorn,
    slot_mapping as slot_mapping,
    sparse_mla as sparse_mla,
    streams as streams,
)
