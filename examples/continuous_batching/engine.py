"""The model, its cache and the one step that ``05_continuous_batching.py`` runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from continuous_batching.scheduler import Plan, Request, Scheduler
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model


class Engine:
    """A patched model that runs what a ``Scheduler`` plans.

    Args:
        sizes: Of the ``PagedCache``.
        num_tokens: Of a step.
        device: Where all of it lives.
        eager: Do not compile the step.
        digests: Keep a hash of the logits of every token that is sampled, by request.
    """

    def __init__(
        self, sizes: dict[str, int], num_tokens: int, *, device: str, eager: bool, digests: bool
    ) -> None:
        model = small_model(device=device)
        self.model = v4.patch(model, kv="fp32", precision="reference", batch_invariant=True)
        self.cache = v4.PagedCache.for_model(model, **sizes)
        self.num_tokens = num_tokens
        self.step: Callable[..., Tensor] = v4.decode_step
        if not eager:
            self.step = torch.compile(v4.decode_step, fullgraph=True, dynamic=False)
        self.digests: dict[int, list[bytes]] | None = {} if digests else None

    def scheduler(self) -> Scheduler:
        """For requests that stop at the model's end of text."""
        stop = self.model.config.eos_token_id
        return Scheduler(self.cache, num_tokens=self.num_tokens, stop=stop)

    def run(self, scheduler: Scheduler, plan: Plan) -> list[Request]:
        """Run a step; return the requests that it finished."""
        begun, graphs = time.perf_counter(), counters["stats"]["unique_graphs"]
        logits = self.step(self.model, plan.batch, self.cache.tensors)
        if counters["stats"]["unique_graphs"] > graphs:
            source = "from" if counters["inductor"]["fxgraph_cache_hit"] else "not from"
            seconds = time.perf_counter() - begun
            print(f"compiled, {source} Inductor's cache, in {seconds:.0f} s", flush=True)
        if self.digests is not None:
            for request, row in plan.samples:
                values = hashlib.sha1(logits[row].cpu().numpy().tobytes())
                self.digests.setdefault(request.name, []).append(values.digest())
        return scheduler.commit(plan, logits.argmax(-1).tolist())
