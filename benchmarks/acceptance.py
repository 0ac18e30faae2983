"""How many drafts of its own layer a trained model accepts: the copying model, trained with one.

    python -m benchmarks.acceptance                    # on a GPU if there is one
    python -m benchmarks.acceptance --steps 2 --batch 2 --sequences 2  # does it run

Model and draft layer are trained together, as the released ones were: the streams of a token have
to hold what the draft needs. They are then written as a released checkpoint, FP8 and FP4, and
loaded from it. Text after the first copied token is what is generated; rates are of random models
near one in the vocabulary, so that a trained one is needed to say anything. What drafts save is
tokens a step over the time of a step, of one request: of a model as small as this one most of it
are launches, which three passes of a draft layer add to as they would not to 43 layers.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import copying
from benchmarks.harness.timing import Capture, wall_us
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4.draft import DraftLayer
from dsv4_ops.integrations.transformers.loading.draft import released_weights
from dsv4_ops.testing.checkpoint import write_checkpoint

DRAFT_LOSS = 0.3
"""Weight of the draft layer's loss beside the model's."""
FIRST = copying.SEGMENT + copying.GAP + 1
"""Tokens of a prompt: the last is the first copied one, which nothing foretells."""


def new_draft(model: Any, seed: int) -> DraftLayer:
    """A draft layer with the weights that Hugging Face initialises its modules with."""
    draft = DraftLayer(model).to_empty(device=model.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in draft.modules():
            model._init_weights(module)
    experts: Any = draft.get_submodule("layers.0.mlp.experts")
    experts.forward = types.MethodType(copying.dense_experts, experts)
    return draft.train().requires_grad_(True)


def draft_logits(model: Any, draft: Any, streams: Tensor, tokens: Tensor) -> Tensor:
    """Logits of the token two behind each but the last one, by Hugging Face's modules."""
    following, body = tokens[:, 1:], model.model
    length = following.shape[1]
    embedded = body.embed_tokens(following)
    embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
    x = draft.e_proj(draft.enorm(embedded)).unsqueeze(2)
    x = x + draft.h_proj(draft.hnorm(streams[:, :-1]))
    position = torch.arange(length, device=tokens.device)
    back = position[:, None] - position
    seen = (back >= 0) & (back < model.config.sliding_window)
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)
    angles = {
        kind: body.rotary_emb(embedded, position_ids=position[None], layer_type=kind)
        for kind in ("main", "compress")
    }
    x = draft.layers[0](
        x, position_embeddings=angles, position_ids=position[None], attention_mask=mask[None, None]
    )
    logits: Tensor = model.lm_head(draft.norm(draft.hc_head(x)))
    return logits


def train(device: str, recipe: copying.Recipe) -> tuple[Any, Any]:
    """Train the copying model and a draft layer; return both, in evaluation mode."""
    model = copying.new_model(device, recipe.seed).train()
    draft = new_draft(model, recipe.seed + 2)
    both = nn.ModuleList([model, draft])
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    optimizer = torch.optim.AdamW(both.parameters(), lr=recipe.rate, betas=(0.9, 0.99))
    streams: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda *args: streams.append(args[2]))
    with torch.enable_grad(), copying.dense_forwards(model):
        for step in range(recipe.steps):
            tokens = copying.sequences(recipe.batch, generator).to(device)
            loss = copying.copy_loss(model(tokens, use_cache=False).logits, tokens)
            found = draft_logits(model, draft, streams.pop(), tokens)[:, FIRST - 2 : -1]
            wanted = tokens[:, FIRST:]
            drafted = nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())
            rate = recipe.rate * min(1.0, (step + 1) / 20)
            copying.optimize(optimizer, both, loss + DRAFT_LOSS * drafted, rate)
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {float(loss):.3f}, draft {float(drafted):.3f}")
    hook.remove()
    return model.eval().requires_grad_(False), draft.eval().requires_grad_(False)


@torch.no_grad()
def acceptance(model: Any, tokens: Tensor, num_drafts: int) -> dict[str, Any]:
    """Accepted drafts by position, and what of the copies is right.

    A position counts the steps that verified it and whose earlier drafts were accepted.
    """
    count, new = tokens.shape[0], tokens.shape[1] - FIRST
    sizes = {"max_batch_size": count, "max_cache_len": tokens.shape[1] + 2 * num_drafts + 1}
    cache = v4.PagedCache.for_model(model, next_n=num_drafts + 1, **sizes)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": tokens.device}
    starts = torch.arange(count + 1, **int32) * FIRST
    lens, rows = torch.full((count,), FIRST, **int32), torch.arange(count, **int32)
    batch = v4.StepBatch(tokens[:, :FIRST].flatten(), starts, lens, rows)
    found = v4.speculative_prefill(model, batch, cache, num_drafts=num_drafts)
    texts = found.tokens[:, :1].tolist()
    verified, accepted = [0] * num_drafts, [0] * num_drafts
    steps = made = 0
    while True:
        live = torch.tensor([len(text) < new for text in texts], device=tokens.device)
        if not bool(live.any()):
            break
        grown = torch.where(live, found.batch.seq_lens, torch.zeros_like(lens))
        batch = v4.StepBatch(found.batch.tokens, found.batch.query_start_loc, grown, rows)
        found = v4.speculative_step(model, batch, cache)
        for row, kept in enumerate(found.num_accepted.tolist()):
            if not live[row]:
                continue
            room = new - len(texts[row])  # drafts behind the copy have nothing to be right about
            texts[row] += found.tokens[row, : kept + 1].tolist()
            for place in range(min(num_drafts, room, kept + 1)):
                verified[place] += 1
                accepted[place] += place < kept
            if room > num_drafts:
                steps, made = steps + 1, made + kept + 1
    wanted = tokens[:, FIRST:].tolist()
    right = sum(
        one == other
        for text, want in zip(texts, wanted, strict=True)
        for one, other in zip(text, want, strict=False)
    )
    return {
        "num_drafts": num_drafts,
        "accepted": [round(a / max(v, 1), 4) for a, v in zip(accepted, verified, strict=True)],
        "verified": verified,
        "mean_length": round(made / max(steps, 1), 4),
        "accuracy": round(right / (count * new), 4),
    }


@torch.no_grad()
def step_us(model: Any, tokens: Tensor, num_drafts: int) -> float:
    """Time of a step of one request with so many drafts, or of a greedy one: in one CUDA graph,
    compiled, on a GPU; eager on a CPU."""
    sizes = {"max_batch_size": 1, "max_cache_len": tokens.shape[1] + 2 * num_drafts + 1}
    cache = v4.PagedCache.for_model(model, next_n=num_drafts + 1, **sizes)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": tokens.device}
    batch = v4.StepBatch(
        tokens[0, :FIRST], *(torch.tensor(each, **int32) for each in ([0, FIRST], [FIRST], [0]))
    )
    step: Callable[..., Any]
    if num_drafts:
        batch = v4.speculative_prefill(model, batch, cache, num_drafts=num_drafts).batch
        step = v4.speculative_step
    else:
        v4.prefill_step(model, batch, cache)
        grown = batch.seq_lens + 1
        batch = v4.StepBatch(
            tokens[0, FIRST : FIRST + 1], torch.tensor([0, 1], **int32), grown, batch.rows
        )

        def step(*given: Any) -> Any:
            return v4.decode_step(*given).argmax(-1)

    if tokens.device.type == "cpu":
        call = functools.partial(step, model, batch, cache)
        return float(wall_us(call, tokens.device, budget_s=1).median)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    call = functools.partial(compiled, model, batch, cache.tensors)
    call()
    return float(Capture([call]).device_us().median)


def main() -> None:
    """Train, write, load, and print a line of JSON for every number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=128)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    recipe = copying.Recipe(steps=options.steps, batch=options.batch)
    model, draft = train(device, recipe)
    trained = round(time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        weights = copying.released_weights(model, Path(folder) / "hugging_face")
        weights |= {name: weight.cpu() for name, weight in released_weights(draft).items()}
        path = write_checkpoint(Path(folder) / "released", copying.CONFIG, weights=weights)
        held = v4.patch(v4.load_quantized(path).to(device))
        held = v4.load_mtp(held, path)
    generator = torch.Generator().manual_seed(99)
    tokens = copying.sequences(options.sequences, generator).to(device)
    greedy = step_us(held, tokens, 0)
    for num_drafts in (1, 2, 3):
        row = acceptance(held, tokens, num_drafts)
        row["step_us"], row["greedy_us"] = step_us(held, tokens, num_drafts), greedy
        row["times_faster"] = round(row["mean_length"] * greedy / row["step_us"], 3)
        print(json.dumps({**row, "steps": options.steps, "training_s": trained, "device": device}))


if __name__ == "__main__":
    main()
