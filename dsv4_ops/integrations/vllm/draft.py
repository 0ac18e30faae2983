"""The draft layer of a checkpoint, as vLLM's draft model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from dsv4_ops.integrations.vllm import _compat
from dsv4_ops.integrations.vllm.pages import Pages
from dsv4_ops.integrations.vllm.steps import cache_name


class DeepseekDraft(nn.Module):
    """The draft layer that the model loaded (``load_mtp``), with its own cache.

    Args:
        vllm_config: vLLM's configuration, with the caches of the model.
        prefix: Must be empty.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        caches = vllm_config.compilation_config.static_forward_context.values()
        self.owner = next(each.owner for each in caches if isinstance(each, Pages))
        (target,) = self.owner
        field, cache = target.steps.family.draft_cache()
        self.name = cache_name(len(target.steps.spec.kinds), field)
        self.pages = Pages(self.name, cache, self._given)
        # vLLM expects V3's draft models to return two results, for the head and for the next draft
        self.takes_two = target.prefix == "DeepseekV3"
        self.model = nn.Module()  # vLLM puts the model's embedding here

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Do nothing: the model has loaded the layer."""
        return set()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of ids."""
        (target,) = self.owner
        embeddings: Tensor = target.embed_input_ids(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the streams after the layer, [num_tokens, values per token]."""
        metadata, (target,) = _compat.group_tensors(), self.owner
        streams = hidden_states
        if metadata is not None:  # None in a run that measures memory
            streams = target.steps.draft(input_ids, streams, metadata[self.name])
        return (streams, streams) if self.takes_two else streams

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int = 0) -> Tensor:
        """Return the logits of the drafted tokens."""
        (target,) = self.owner
        logits: Tensor = target.compute_logits(target.steps.draft_hidden(hidden_states))
        return logits

    def _given(self) -> None:
        (target,) = self.owner
        target.steps.bind_draft(self.pages.kv_cache)
