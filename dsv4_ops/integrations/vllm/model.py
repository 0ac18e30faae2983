"""vLLM's model class for patched DeepSeek models of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dsv4_ops.integrations.transformers import load_mtp, load_quantized, patch
from dsv4_ops.integrations.transformers.architectures import spec_of_config
from dsv4_ops.integrations.transformers.architectures.base import require_transformers
from dsv4_ops.integrations.vllm import _compat
from dsv4_ops.integrations.vllm.config import (
    CLASSES,
    OP,
    OWN_DRAFTS,
    check_config,
    compile_backend,
    patch_settings,
)
from dsv4_ops.integrations.vllm.pages import Pages
from dsv4_ops.integrations.vllm.steps import EngineSteps, cache_name, family_of


class DeepseekForCausalLM(nn.Module):
    """A patched model whose caches are in blocks that vLLM allocates.

    ``--additional-config '{"dsv4_ops": {...}}'`` passes arguments to ``patch``, such as
    ``precision``.

    Args:
        vllm_config: vLLM's configuration.
        prefix: Must be empty.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        check_config(vllm_config)
        config = vllm_config.model_config
        self.path, self.revision, self.dtype = config.model, config.revision, config.dtype
        self.max_model_len = config.max_model_len
        drafts = vllm_config.speculative_config
        self.decode_tokens = 1 + (0 if drafts is None else drafts.num_speculative_tokens)
        own = drafts is not None and drafts.method == OWN_DRAFTS
        self.most_drafted = vllm_config.scheduler_config.max_num_batched_tokens if own else 0
        self.target_device = torch.device(vllm_config.device_config.device)
        self.num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.settings, self.backend = patch_settings(vllm_config), compile_backend(vllm_config)
        library = require_transformers(OP)
        self.prefix = CLASSES[config.hf_config.model_type]
        # take Hugging Face's class by name, because vLLM registers its own config for V4
        self.config = getattr(library, f"{self.prefix}Config").from_pretrained(
            self.path, revision=self.revision
        )
        self.config.dtype = self.dtype
        settings = {"precision": "serve"} | self.settings
        family = family_of(spec_of_config(OP, self.config, **settings))
        self.pages = nn.ModuleDict()
        for layer, kind in enumerate(family.spec.kinds):
            for field, cache in family.caches(kind).items():
                name = cache_name(layer, field)
                pages = self.pages[name.replace(".", "_")] = Pages(name, cache, self._given)
                pages.owner = (self,)
        self.hf: Any = None
        self.steps: EngineSteps | None = None
        self._num_given = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load and patch Hugging Face's model from the checkpoint; ``weights`` is not read."""
        self.hf = self.steps = None  # vLLM may call this method again
        device = self.target_device
        place: dict[str, Any] = {} if device.type == "cpu" else {"device_map": device}
        if self.num_ranks > 1:
            place["tp_plan"] = "auto"  # splits experts and dense layers over vLLM's processes
        if self.revision is not None:
            place["revision"] = self.revision
        if getattr(self.config, "quantization_config", None) is None:
            library = require_transformers(OP)
            causal_lm = getattr(library, f"{self.prefix}ForCausalLM")
            model = causal_lm.from_pretrained(
                self.path, config=self.config, dtype=self.dtype, **place
            )
            if self.dtype == torch.float32 and device.type != "cpu":
                # the default implementation of experts reads values on the host
                model.set_experts_implementation("batched_mm")
        else:
            model = load_quantized(self.path, config=self.config, **place)
        self.hf = patch(model.eval().requires_grad_(False), **self.settings)
        if self.most_drafted:
            load_mtp(self.hf, self.path)
        self.steps = EngineSteps(
            self.hf,
            max_model_len=self.max_model_len,
            decode_tokens=self.decode_tokens,
            backend=self.backend,
            most_drafted=self.most_drafted,
        )
        return {name for name, _ in self.named_parameters()}

    @property
    def model(self) -> Any:
        """The module from which vLLM takes a draft model's embedding."""
        return self.hf.model

    def get_mtp_target_hidden_states(self) -> Tensor | None:
        """Return the streams of the last step (``ModelSpec.run_streams``) if a draft layer reads
        them, else None."""
        return None if self.steps is None else self.steps.streams

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of ids."""
        embeddings: Tensor = self.hf.model.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states of a step's tokens, [num_tokens, hidden_size]."""
        metadata = _compat.group_tensors()
        assert self.steps is not None  # vLLM loads weights first
        if metadata is None:
            return self.steps.profiled(input_ids)
        if not self.steps.layers:
            self._bind(self.steps)
        return self.steps(input_ids, metadata)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        logits: Tensor = self.hf.lm_head(hidden_states)
        return logits

    def _given(self) -> None:
        """Count the caches that vLLM has allocated; after the last, bind them and compile."""
        self._num_given += 1
        if self._num_given % len(self.pages) == 0 and self.steps is not None:
            self._bind(self.steps)
            self.steps.compile()

    def _bind(self, steps: EngineSteps) -> None:
        def allocated(layer: int, field: str) -> Tensor:
            pages: Any = self.pages[cache_name(layer, field).replace(".", "_")]
            return pages.kv_cache

        steps.bind(allocated)
