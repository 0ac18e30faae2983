"""Hugging Face's manager of continuous batching, which runs requests from one ``PagedCache``.

We replace the manager's cache, and the manager's call of the model. Queue, thread, scheduler, soft
resets, sampling and streams are still Hugging Face's.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api as api

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.integrations.transformers.batching.cache import BatchCache
from dsv4_ops.integrations.transformers.batching.hooks import CACHED, check_prompt, max_length
from dsv4_ops.integrations.transformers.batching.steps import BatchSteps
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.generation.decoding import OTHER_METHODS
from dsv4_ops.integrations.transformers.generation.kept import keeps_on
from dsv4_ops.integrations.transformers.steps.step import spec_of
from dsv4_ops.integrations.transformers.tensors import StepBatch

OP = "init_continuous_batching"

DEFAULT_REQUESTS, DEFAULT_BATCH_TOKENS, DEFAULT_LENGTH = 64, 1024, 8192
"""Defaults of the maximum requests per step, tokens per step and tokens per request."""

NEUTRAL = {
    **OTHER_METHODS,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "watermarking_config": None,
}
"""Settings of a ``GenerationConfig`` that have no effect or fail in continuous batching, with their
neutral values."""

_GPU_SHARE = 0.8
"""Default fraction of a GPU's free memory that the cache may take."""


def manager_of(model: Any, generation_config: Any, config: Any, hints: Any) -> Manager:
    """Return the manager that the model keeps, or a new one."""
    generation_config = copy.deepcopy(generation_config or model.generation_config)
    _check_settings(generation_config)
    kept = vars(model).get(CACHED)
    if isinstance(kept, Manager):
        kept.check_hints(hints)
        return kept
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # Hugging Face sets the same value
    config = config or getattr(generation_config, "continuous_batching_config", None)
    return Manager(model, generation_config, config or ContinuousBatchingConfig(), hints)


class StepModel:
    """A patched model that can be called as Hugging Face's continuous batching calls a model.

    Args:
        model: The patched model. A ``StepModel`` has all attributes of this model too.
        steps: The model's steps.
    """

    def __init__(self, model: Any, steps: BatchSteps) -> None:
        self.patched, self._steps = model, steps
        # for this copy of the config, Hugging Face makes one group of layers and no masks
        self.config = copy.deepcopy(model.config)
        self.config.layer_types = ["full_attention"] * self.config.num_hidden_layers
        self.config._attn_implementation = "flash_attention_2"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.patched, name)

    def eval(self) -> StepModel:
        """Set the model to evaluation mode."""
        self.patched.eval()
        return self

    def _supports_logits_to_keep(self) -> bool:
        return True

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seq_lens_q: Tensor,
        write_index: list[Tensor],
        logits_to_keep: Tensor,
        max_length_q: int,
        **_: Any,
    ) -> SimpleNamespace:
        """Return the logits of the tokens in ``logits_to_keep``, which are the last tokens of
        requests."""
        starts = cu_seq_lens_q.to(torch.int32)
        ends = starts[1:]
        last = (ends - 1).clamp(min=0).to(torch.int64)
        live = ends > starts[:-1]
        lens = torch.where(live, position_ids[0].index_select(0, last) + 1, 0)
        rows = torch.where(live, write_index[0].index_select(0, last), -1)
        tokens = input_ids[0].to(torch.int64)
        batch = StepBatch(tokens, starts, lens.to(torch.int32), rows.to(torch.int32))
        decodes = max_length_q == 1 and len(tokens) == len(rows)
        logits = self._steps(batch, decodes=decodes)
        kept = torch.searchsorted(ends, logits_to_keep.to(torch.int32), right=True)
        return SimpleNamespace(logits=logits.index_select(0, kept.clamp(max=len(lens) - 1))[None])


class Manager(api.ContinuousBatchingManager):  # type: ignore[misc]  # transformers is untyped
    """Hugging Face's manager of the requests of a patched model.

    Args:
        model: The patched model.
        generation_config: A ``GenerationConfig`` with an ``eos_token_id``.
        config: A ``ContinuousBatchingConfig``.
        hints: Hugging Face's ``WorkloadHints``, or None.

    Attributes:
        paged: The ``PagedCache`` of all requests.
        steps: The model's steps.
    """

    def __init__(self, model: Any, generation_config: Any, config: Any, hints: Any) -> None:
        _check_config(model, config)
        _check_settings(generation_config)
        sizes = cache_sizes(model, config, hints, max_length(generation_config))
        self.most_tokens: int = sizes["max_cache_len"]
        self.check_hints(hints)
        self.paged = PagedCache.for_model(model, **sizes)
        tokens = config.max_batch_tokens or DEFAULT_BATCH_TOKENS
        self._cache = BatchCache(self.paged, tokens)
        asked = config.use_cuda_graph  # one value, or one for each of Hugging Face's two paths
        wanted = asked is None or (any(asked) if isinstance(asked, tuple) else bool(asked))
        captures = keeps_on(model.device) and wanted
        compiled = _compile_config(config, generation_config)
        self.steps = BatchSteps(model, self._cache, compiled, captures)
        called = StepModel(model, self.steps)
        config = copy.deepcopy(config)
        config.num_blocks, config.max_batch_tokens = sizes["num_blocks"], tokens
        config.max_requests_per_batch = sizes["max_batch_size"]
        config.max_blocks_per_request = 0
        config.allow_block_sharing = config.use_async_batching = False
        config.use_cuda_graph = False  # steps have their own graphs
        config.varlen_compile_config = config.decode_compile_config = None
        config.default_compile_level = 0
        super().__init__(called, generation_config, config, hints)
        # make each answer a request, because a copy of a request would enter steps without a token
        self._num_answers: int = generation_config.num_return_sequences or 1
        self.num_return_sequences = 1

    def check_hints(self, hints: Any) -> None:
        """Raise if the hints' longest prompt and answer do not fit into the cache together."""
        if hints is not None:
            self._check_length(
                OP, "workload_hints", hints.max_prompt_length, hints.max_generated_length
            )

    def _check_length(self, op: str, name: str, prompt: int, new: int) -> None:
        # the cache does not store the last new token
        if prompt + max(new, 1) - 1 > self.most_tokens:
            raise argument_error(
                op,
                name,
                must=f"have at most {self.most_tokens + 1} tokens with the answer, of which "
                "the cache stores all but the last",
                got=f"{prompt} + {new} tokens",
                do="Pass a shorter prompt or fewer max_new_tokens, or a ContinuousBatchingConfig "
                "with more max_blocks_per_request and num_blocks",
            )

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Keep the model's attention, because calls without a cache still run this attention."""

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        **rest: Any,
    ) -> Any:
        """Add a request, as Hugging Face does.

        Raises:
            ValueError, TypeError: the prompt is empty, has ids outside of the vocabulary, is not
                shorter than ``max_length`` of the generation config, or does not fit into the cache
                with its answer; or a request of this id waits or runs.
        """
        op = "add_request"
        limit = None if max_new_tokens is not None else max_length(self.generation_config)
        check_prompt(op, "input_ids", input_ids, self.model.config.vocab_size, limit)
        if max_new_tokens is None:
            max_new_tokens = self.generation_config.max_new_tokens
        if max_new_tokens is None:
            self._check_length(op, "input_ids", len(input_ids), 1)
            most = self.most_tokens + 1  # the cache does not store the last new token
            max_new_tokens = min(most, most if limit is None else limit) - len(input_ids)
        Checks(op).at_least(1, max_new_tokens=max_new_tokens)
        self._check_length(op, "input_ids", len(input_ids), max_new_tokens)
        if request_id is not None and self.has_request(request_id):
            raise argument_error(
                op,
                "request_id",
                must="be that of no running request",
                got=repr(request_id),
                do="Pass another id, or None",
            )
        name = super().add_request(input_ids, request_id, max_new_tokens, **rest)
        more = self._num_answers - 1 if name is not None else 0  # None if no request is accepted
        for number in range(more):  # these ids are the ids that Hugging Face gives to copies
            super().add_request(input_ids, f"{name}__child#{number}", max_new_tokens, **rest)
        return name

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return request_id in self.unfinished()

    def unfinished(self) -> set[str]:
        """Return the ids of the requests that wait or run."""
        ids = {state.request_id for state in list(self.input_queue.queue)}
        if self.batch_processor is not None:
            scheduler = self.batch_processor.scheduler
            ids |= set(scheduler.waiting_requests) | set(scheduler.active_requests)
        return ids

    def stop(self, *args: Any, **rest: Any) -> None:
        """Stop the thread, as Hugging Face does."""
        super().stop(*args, **rest)
        if CACHED in vars(self.model):  # Hugging Face stored the manager on ``StepModel``
            delattr(self.model, CACHED)
            setattr(self.model.patched, CACHED, self)

    def _generation_step(self) -> None:
        stream = self.batch_processor.inputs_and_outputs.compute_stream
        if stream is not None:  # rows and tables are written on the current stream
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        super()._generation_step()

    def _create_batch_processor(self) -> Any:
        if isinstance(self.batch_processor, api.ContinuousBatchProcessor):
            self.batch_processor.reset()
            return self.batch_processor
        self._cache.reset()
        config = self.continuous_batching_config
        scheduler = api.SCHEDULER_MAPPING[config.scheduler_type](
            cache=self._cache,
            safety_margin=config.safety_margin,
            max_requests_per_batch=config.max_requests_per_batch,
        )
        return api.ContinuousBatchProcessor(
            cache=self._cache,
            config=self.model.config,
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )


def cache_sizes(model: Any, config: Any, hints: Any, longest: int | None = None) -> dict[str, int]:
    """Return the sizes of the ``PagedCache`` for a ``ContinuousBatchingConfig`` and requests of at
    most ``longest`` tokens."""
    block, checks = spec_of(OP, model).block_tokens, Checks(OP)
    names = ("num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    checks.at_least(1, **given)
    chunk = config.max_batch_tokens or DEFAULT_BATCH_TOKENS
    requests = DEFAULT_REQUESTS if hints is None else min(hints.num_requests, DEFAULT_REQUESTS)
    rows = min(config.max_requests_per_batch or max(requests, 1), chunk)
    length = DEFAULT_LENGTH
    if config.max_blocks_per_request is not None:
        length = config.max_blocks_per_request * block
    elif hints is not None and hints.max_generated_length:
        length = hints.max_prompt_length + hints.max_generated_length
    elif longest is not None:
        length = min(length, longest) if hints is None else longest
    length = min(length, model.config.max_position_embeddings)
    blocks = config.num_blocks or _default_blocks(model, config, rows, length, chunk)
    length = min(length, blocks * block)
    return {
        "max_batch_size": rows,
        "max_cache_len": length,
        "num_blocks": blocks,
        "max_chunk": min(chunk, length),
    }


def _default_blocks(model: Any, config: Any, rows: int, length: int, chunk: int) -> int:
    """Return the number of blocks for all rows; on a GPU, at most as many as fit into the free
    memory that the cache may take."""
    most = rows * -(-length // spec_of(OP, model).block_tokens)
    if model.device.type != "cuda":
        return most
    settings = {"max_batch_size": rows, "max_cache_len": length, "max_chunk": min(chunk, length)}
    one, two = (
        sum(PagedCache.for_model(model, num_blocks=n, device="meta", **settings).memory().values())
        for n in (1, 2)
    )
    free = int(torch.cuda.mem_get_info(model.device)[0] * (config.max_memory_percent or _GPU_SHARE))
    blocks = min(most, 1 + (free - one) // (two - one))
    if blocks < 1:
        raise argument_error(
            OP,
            "max_requests_per_batch",
            must=f"be small enough for {free} bytes of the GPU's free memory",
            got=f"{rows}, whose rows take {one} bytes",
            do="Pass fewer requests, or fewer max_batch_tokens",
        )
    return blocks


def _compile_config(config: Any, generation_config: Any) -> Any:
    """Return the ``CompileConfig`` that a user set in one of the two configs, or None."""
    default = CompileConfig() if config.default_compile_level else None
    places = (config.varlen_compile_config, config.decode_compile_config, default)
    chosen = [each for each in places if each is not None]
    return chosen[0] if chosen else getattr(generation_config, "compile_config", None)


def _check_settings(generation_config: Any) -> None:
    """Raise for settings that Hugging Face's continuous batching would ignore."""
    for name, neutral in NEUTRAL.items():
        value = getattr(generation_config, name, None)
        if value not in (None, neutral):
            raise argument_error(
                OP,
                f"generation_config.{name}",
                must=f"be {neutral} or None in continuous batching",
                got=value,
                do="Call generate, which has this setting",
                kind=NotImplementedError,
            )


def _check_config(model: Any, config: Any) -> None:
    """Raise for unsupported settings, and for models on several ranks."""
    checks, spec = Checks(OP), spec_of(OP, model)
    checks.one_of(
        "scheduler_type", config.scheduler_type, *api.SCHEDULER_MAPPING, belongs_to="schedules"
    )
    for name, rule, value in (
        ("use_async_batching", "be False or None", config.use_async_batching),
        ("cpu_offload_space", "be 0", config.cpu_offload_space),
    ):
        if value:
            raise checks.error(
                name,
                must=f"{rule} with a patched model",
                got=value,
                do="Leave out this setting: a request without blocks runs its prompt again",
                kind=NotImplementedError,
            )
    if spec.parallel is not None or getattr(model, "_device_mesh", None) is not None:
        raise checks.error(
            "model",
            must="be on one device",
            got="one of several ranks",
            do="Call generate, or decode_step with batches of your own",
            kind=NotImplementedError,
        )
