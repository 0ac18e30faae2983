"""``load_mtp``: load the draft layer of a released checkpoint. Hugging Face skips this layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4_ops.checkpoint.config import scale_format
from dsv4_ops.checkpoint.format import V4, draft_tensors
from dsv4_ops.checkpoint.headers import CONFIG, read_json
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers import forwards
from dsv4_ops.integrations.transformers.architectures.base import DRAFT, draft_of
from dsv4_ops.integrations.transformers.loading import mla_draft, v4_draft
from dsv4_ops.integrations.transformers.loading.draft_reader import DraftReader, check_sizes
from dsv4_ops.integrations.transformers.modules import rewrite
from dsv4_ops.integrations.transformers.patch import add_replacements
from dsv4_ops.integrations.transformers.steps.step import spec_of

OP = "load_mtp"


def load_mtp(model: Any, path: Path | str) -> Any:
    """Load the draft layer (MTP) of a released checkpoint into a patched model.

    ``generate(num_draft_tokens=)`` and ``speculative_step`` then draft with this layer. If the
    model is not quantised, ``load_mtp`` dequantises the layer's weights to the model's dtype. The
    layer is the model's module ``mtp``, and its parameters are in the state dict; ``unpatch``
    removes the layer.

    Args:
        model: A patched ``DeepseekV4ForCausalLM``, ``DeepseekV3ForCausalLM``,
            ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM``, whole on one device.
            ``load_mtp`` changes this model.
        path: Folder of the checkpoint. Only the draft layer's tensors are read.

    Returns:
        ``model``.

    Raises:
        ValueError: the model is not patched, has a draft layer already, or has other sizes than the
            checkpoint; the checkpoint has no draft layer; a tensor of the layer is missing,
            transposed, unknown, of another dtype, or contains NaN or an infinity; or a float32
            scale is no power of two, if Hugging Face stores the model's scales as bytes (as in V4).
            The error names the tensor.
        NotImplementedError: the checkpoint has a DSpark draft, several draft layers, another
            architecture, or a draft layer without quantisation for a quantised model; or the model
            is split over ranks, or several ranks share its cache. An error leaves the model
            unchanged.
        ImportError: safetensors is missing.

    Example:
        >>> import tempfile
        >>> from dsv4_ops.integrations import transformers as v4
        >>> from dsv4_ops.testing.checkpoint import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = v4.patch(v4.load_quantized(write_checkpoint(folder)))
        ...     model = v4.load_mtp(model, folder)
        >>> model.mtp.e_proj.weight.dtype
        torch.float8_e4m3fn
    """
    spec = spec_of(OP, model)
    if draft_of(model) is not None:
        raise argument_error(
            OP,
            "model",
            must="have no draft layer yet",
            got="one that has",
            do="It is loaded already",
        )
    spec.draft_kinds(OP)
    for name, weight in model.named_parameters():
        if hasattr(weight, "to_local"):
            raise argument_error(
                OP,
                name,
                must="be whole on this rank",
                got="a part of it",
                do="Load the model without a tp_plan",
                kind=NotImplementedError,
            )
    kind = model.config.model_type
    prefix, headers = draft_tensors(path, kind=kind, op=OP)
    family: Any = v4_draft if kind == V4 else mla_draft
    check_sizes(OP, model.config, family.sizes_of(model.config, headers))
    draft = spec.draft_layer(OP, model)
    written = read_json(Path(path) / CONFIG, OP)
    of_bytes = "quantization_config" in written and scale_format(OP, written) == "ue8m0"
    reader = DraftReader(OP, prefix, headers, kind == V4 or of_bytes, model.device)
    reader.fill(draft, family.names_of(headers))
    return attach(model, draft)


def attach(model: Any, draft: Any) -> Any:
    """Add a draft layer with weights to a patched model; return the model."""
    spec = spec_of(OP, model)
    rewrites = forwards.rewrites(model, spec)
    rewrite.check(OP, draft, rewrites)
    add_replacements(model, list(rewrite.apply(draft, rewrites)))
    model.add_module(DRAFT, draft)
    return model
