"""Arguments of ``generate``: settings, prompts and their mask."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache, Text, check_kind
from dsv4_ops.integrations.transformers.steps.padded import matrix, shape_text

CACHES = (None, "static", "hybrid")
"""Values of ``cache_implementation`` with which ``generate`` makes a ``PagedCache``."""
MASK = "attention_mask"

_OP = "generate"
_PROMPTS = ("inputs_embeds", "inputs", "input_ids")
_COUNTS = (
    "max_new_tokens",
    "max_length",
    "num_beams",
    "num_return_sequences",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
)
"""Settings that our hooks use in calculations."""


def setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """Return a generation setting: the argument, or else the value in a generation config."""
    configs = arguments.get("generation_config"), getattr(model, "generation_config", None)
    values = [arguments.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in values if value is not None), None)


def check_kinds(model: Any, arguments: dict[str, Any]) -> None:
    """Raise if an argument that our hooks read has a wrong type, or if a count is below 1.

    Hugging Face checks the settings that our hooks do not read.
    """
    from transformers import GenerationConfig

    checks = Checks(_OP)
    for name in (*_PROMPTS, "position_ids"):
        value, shown = arguments.get(name), "input_ids" if name == "inputs" else name
        do = "Encode a text by the tokenizer: **tokenizer(text, return_tensors='pt')"
        if name in ("inputs_embeds", "position_ids"):
            do = f"Pass {name} as a tensor, or leave it out"
        checks.kind(shown, value, Tensor, must="be a tensor", do=do)
        if value is not None and shown == "input_ids":
            checks.floats(shown, value, torch.int64, torch.int32)
    for name in ("cache", "past_key_values"):
        check_kind(_OP, name, arguments.get(name))
    lists = "be a list"
    for name, kind, must, do in (
        ("generation_config", GenerationConfig, "be a GenerationConfig", "Pass one, or None"),
        ("logits_processor", (list, tuple), lists, "Pass a LogitsProcessorList, or None"),
        ("stopping_criteria", (list, tuple), lists, "Pass a StoppingCriteriaList, or None"),
    ):
        checks.kind(name, arguments.get(name), kind, must=must, do=do)
    streamer = arguments.get("streamer")
    if streamer is not None and (
        isinstance(streamer, Tensor) or not (hasattr(streamer, "put") and hasattr(streamer, "end"))
    ):
        raise checks.error(
            "streamer",
            must="have the methods put and end",
            got=kind_of(streamer),
            do="Pass a TextStreamer of transformers, or None",
            kind=TypeError,
        )
    for name in ("num_beams", "num_return_sequences"):  # None fails in Hugging Face's generate
        if arguments.get(name, 1) is None:
            del arguments[name]
    counts = {name: setting(model, arguments, name) for name in _COUNTS}
    checks.at_least(1, **{name: value for name, value in counts.items() if value is not None})


def check_prompts(arguments: dict[str, Any]) -> None:
    """Raise if a prompt has no tokens, or if the mask does not fit the prompts.

    Expand a mask of one row to all prompts. Without this check, Hugging Face would raise an error
    about positions, because Hugging Face computes positions from the mask.
    """
    name = next((each for each in _PROMPTS if isinstance(arguments.get(each), Tensor)), None)
    if name is None:
        return
    prompts, mask = arguments[name], arguments.get(MASK)
    if 0 in prompts.shape[:2]:
        raise argument_error(
            _OP,
            name,
            must="have a row and a token",
            got=f"shape {shape_text(prompts)}",
            do="Pass a prompt, or none to begin with bos_token_id",
        )
    if prompts.dim() < 2:
        raise argument_error(
            _OP,
            name,
            must="have shape [batch, tokens]",
            got=shape_text(prompts),
            do=f"Pass {name}[None] for one prompt",
        )
    if mask is None:
        return
    batch, length = prompts.shape[:2]
    rows, columns = matrix(mask)
    covers = rows in (1, batch) and columns >= length
    # masks with more dimensions are for other caches
    if not covers and not (isinstance(mask, Tensor) and mask.dim() > 2):
        raise argument_error(
            _OP,
            MASK,
            must=f"have shape [{batch}, {length} or more]",
            got=shape_text(mask),
            do="Pass the mask of the tokens, 0 for padding",
        )
    if covers:
        arguments[MASK] = mask.expand(batch, columns)


def check_ranks(model: Any, arguments: dict[str, Any]) -> None:
    """Raise on all ranks that share a cache if their prompts, masks or, in a call that samples,
    random states differ. Each rank computes a part of every token, so texts would be wrong."""
    ranks = model.dsv4_ops_spec.parallel
    if ranks is None:
        return
    state = None
    if setting(model, arguments, "do_sample"):
        on_gpu = model.device.type == "cuda"
        state = torch.cuda.get_rng_state(model.device) if on_gpu else torch.get_rng_state()
    prompts = [_digest(arguments.get(name)) for name in _PROMPTS]
    values = {MASK: _digest(arguments.get(MASK)), "random state": _digest(state)}
    ranks.agree(_OP, "call", model.device, prompts=prompts, **values)


def _digest(tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return None
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:12]


def whole_mask(
    inputs: Tensor, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> Tensor:
    """Return the mask of all tokens; a mask of ones if the call has no mask.

    If the call has no mask and the rows of the cache differ in length, the mask of ones is
    also passed to the model.
    """
    mask: Tensor | None = model_kwargs.get(MASK)
    if mask is None:
        columns = getattr(generation_config, "_mask_length", inputs.shape[1])
        mask = torch.ones(inputs.shape[0], columns, dtype=torch.int64, device=cache.device)
        if len(set(cache.seq_lens[: inputs.shape[0]].tolist())) > 1:
            model_kwargs[MASK] = mask
    elif not bool(((mask == 0) | (mask == 1)).all()):
        other = mask[(mask != 0) & (mask != 1)][0].item()
        raise argument_error(
            _OP,
            MASK,
            must="be 0 or 1",
            got=other,
            do="Pass 1 for every token and 0 for padding",
        )
    return mask


def remember(cache: PagedCache, ids: Tensor, mask: Tensor, padded: Tensor | None) -> None:
    """Keep the text that ``generate`` returned, for the next turn.

    ``mask`` is the mask of the prompts, and ``padded`` marks rows whose last token is padding.
    """
    lengths = cache.seq_lens[: ids.shape[0]].to(mask.device)
    answers, count = lengths - mask.sum(1), ids.shape[1] - mask.shape[1]
    cache.text = None
    if int(answers.max()) == count - 1:  # the prompts contain the whole earlier text
        is_token = torch.arange(count, device=mask.device) < answers[:, None]
        # the cache does not store the last token of an answer
        is_token[:, -1] = True if padded is None else ~padded.to(mask.device)
        whole = torch.cat([mask, is_token.to(mask.dtype)], 1)
        cache.text = Text(ids, whole.to(ids.device), lengths.to(ids.device))


def check_continues(ids: Tensor, mask: Tensor, cache: PagedCache) -> None:
    """Raise if ``remember`` kept the text in the cache and the prompts do not begin with this
    text."""
    lengths, text = cache.seq_lens[: ids.shape[0]].to(ids.device), cache.text
    if text is None or not torch.equal(text.seq_lens, lengths):
        return
    count = min(int(lengths.max()), ids.shape[1])
    stored = _without_padding(text.ids, text.mask)[:, :count]
    prompts = _without_padding(ids, mask.to(ids.device))[:, :count]
    differs = (stored != prompts) & (torch.arange(count, device=ids.device) < lengths[:, None])
    if bool(differs.any()):
        row, token = differs.nonzero()[0].tolist()
        raise argument_error(
            _OP,
            "input_ids",
            must="begin with the text that the cache stores",
            got=f"another token at {token} of {int(lengths[row])} in row {row}",
            do="Pass the whole conversation, or call cache.reset() to begin a new one",
        )


def _without_padding(ids: Tensor, mask: Tensor) -> Tensor:
    """Move the tokens of each row to the left, and the padding to the right."""
    order = torch.sort((mask == 0).to(torch.int8), dim=1, stable=True).indices
    return ids.gather(1, order)


def inferred_mask(inferred: Tensor, ids: Tensor, cache: PagedCache) -> Tensor:
    """Return a mask for prompts without a mask; raise if it is unclear which tokens are padding.

    Hugging Face infers the mask from ``pad_token_id``, but a text may contain this token too. A
    token that the cache stores is text.
    """
    batch, length = ids.shape
    lengths, text = cache.seq_lens[:batch].to(ids.device), cache.text
    if len(lengths) < batch or not bool(lengths.any()):
        return inferred
    if text is not None and torch.equal(text.seq_lens, lengths):
        columns = text.ids.shape[1]
        if torch.equal(text.ids, ids[:, :columns]):
            return torch.cat([text.mask, inferred[:, columns:]], 1)
    if bool(inferred.all()):
        return inferred
    longest = int(lengths.max())
    if text is None and bool((lengths == longest).all()) and bool(inferred[:, 0].all()):
        is_stored = torch.arange(length, device=ids.device) < longest
        return torch.where(is_stored, torch.ones_like(inferred), inferred)
    raise argument_error(
        _OP,
        MASK,
        must="be given if prompts contain pad_token_id and the cache has another text",
        got=None,
        do="Pass 1 for every token, including the tokens of the cache, and 0 for padding",
    )


def first_column(mask: Tensor, length: int, cache: PagedCache) -> int:
    """Return the first column that ``generate`` must compute; raise if a row cannot continue at
    this column."""
    lengths = cache.seq_lens[: mask.shape[0], None].to(mask.device)
    is_token = mask != 0
    new = is_token & (is_token.cumsum(1) > lengths)
    first = torch.where(new.any(1), new.to(torch.int8).argmax(1), mask.shape[1])
    columns_before = mask.shape[1] - length
    if not bool(is_token[:, -1].all()):
        row = int((~is_token[:, -1]).to(torch.int8).argmax())
        raise argument_error(
            _OP,
            MASK,
            must="be 1 in the last column, which the next token follows",
            got=f"0 in row {row}",
            do="Pad on the left (padding_side='left' of the tokenizer), or cut columns of padding",
        )
    earliest, last = int(first.min()), int(first.max())
    if last == mask.shape[1]:
        row = int(first.argmax())
        raise argument_error(
            _OP,
            MASK,
            must="have more tokens than the cache in every row",
            got=f"{int(is_token[row].sum())} of {int(lengths[row])} in row {row}",
            do="Pass all tokens, including those of the cache, or call cache.reset() first",
        )
    if earliest < columns_before:
        row = int(first.argmin())
        raise argument_error(
            _OP,
            MASK,
            must="count tokens before input_ids that the cache has, "
            f"{int(lengths[row])} in row {row}",
            got=int(is_token[row, :columns_before].sum()),
            do="Pass all tokens as input_ids",
        )
    return columns_before if columns_before else earliest
