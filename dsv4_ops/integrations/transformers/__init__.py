"""Run Hugging Face's DeepSeek-V4, V3.2, V3 and V2, and GLM-5, on the ops of this package.

``patch`` lets a loaded model run from a ``PagedCache``. Batches may be ragged. A step, including
its metadata, can be one graph, one CUDA graph or one AOTInductor package. Weights and state dict do
not change, and ``from_pretrained`` and ``generate`` keep working.

Example:
    >>> import torch
    >>> from dsv4_ops.testing.models import small_model
    >>> from dsv4_ops.integrations import transformers as v4
    >>> model = v4.patch(small_model(), kv="fp32", precision="reference")
    >>> cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=512)
    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    >>> model(ids, cache=cache).logits.shape, cache.seq_lens.tolist()
    (torch.Size([2, 3, 260]), [3, 3])
"""

from importlib.metadata import version as _version

from dsv4_ops.core.public import public_names as _public_names
from dsv4_ops.core.versions import warn_if_newer as _warn_if_newer
from dsv4_ops.integrations.transformers.cache.paged_cache import (
    OutOfBlocks as OutOfBlocks,
    PagedCache as PagedCache,
)
from dsv4_ops.integrations.transformers.generation.kept import empty_cache as empty_cache
from dsv4_ops.integrations.transformers.generation.speculation import (
    SpeculativeStep as SpeculativeStep,
    speculative_prefill as speculative_prefill,
    speculative_step as speculative_step,
)
from dsv4_ops.integrations.transformers.loading.draft import load_mtp as load_mtp
from dsv4_ops.integrations.transformers.loading.quantized import load_quantized as load_quantized
from dsv4_ops.integrations.transformers.patch import (
    patch as patch,
    unpatch as unpatch,
)
from dsv4_ops.integrations.transformers.recipe import Recipe as Recipe
from dsv4_ops.integrations.transformers.steps.compiled import (
    CompiledStep as CompiledStep,
    compile_step as compile_step,
)
from dsv4_ops.integrations.transformers.steps.export import (
    decode_inputs as decode_inputs,
    export_decode as export_decode,
    export_prefill as export_prefill,
    input_names as input_names,
)
from dsv4_ops.integrations.transformers.steps.step import (
    decode_step as decode_step,
    prefill_step as prefill_step,
)
from dsv4_ops.integrations.transformers.tensors import (
    CacheTables as CacheTables,
    CacheTensors as CacheTensors,
    RopeTables as RopeTables,
    StepBatch as StepBatch,
)

_warn_if_newer("transformers", _version("transformers"))

__all__ = _public_names(globals())
