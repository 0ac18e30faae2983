"""Run requests through vLLM's engine, and compare with a step over prompt and answer."""

import hashlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


def prompts(count: int, *, short: bool = False, shared: bool = False) -> list[list[int]]:
    """Sample prompts of 3 to 250 tokens (30 if ``short``), after a common text if ``shared``."""
    rng = random.Random(0)
    text = [rng.randrange(3, 250) for _ in range(600)]
    lengths = (3, 30) if short else (3, 30, 140, 250)
    begins = (0, 260, 520, 600) if shared else (0,)
    return [
        text[: rng.choice(begins)] + [rng.randrange(3, 250) for _ in range(rng.choice(lengths))]
        for _ in range(count)
    ]


class Report(NamedTuple):
    """What an engine did.

    Attributes:
        error: Largest difference of a logprob from that of a step over prompt and answer.
        wrong: Answered tokens that are not the greedy tokens of that step.
        steps, computed: Steps, and tokens that they computed.
        cached, preempted, drafted: Tokens found in the prefix cache, preemptions, tokens drafted.
        graphs, late: Graphs compiled before the first request, and after it.
        pool: Digest of every byte of all caches after the last request.
        captured, eager: CUDA graphs captured, and steps that ran in none.
        times: Median ms of steps in which all requests decode: ``step`` from a step to the next;
            on the host ``schedule``, ``execute`` (which launches), ``sample`` (which waits for the
            tokens) and ``update``; ``device`` from the first launch of ``execute`` to the last.
    """

    error: float
    wrong: int
    steps: int
    computed: int
    cached: int
    preempted: int
    drafted: int
    graphs: int
    late: int
    pool: str
    captured: int
    eager: int
    times: dict[str, float]


class Clock:
    """Count and time the steps of an engine.

    Args:
        llm: vLLM's ``LLM``, without asynchronous scheduling if times are to be read.
    """

    def __init__(self, llm: Any) -> None:
        import torch

        self.cuda = torch.cuda.is_available()
        self.steps: list[dict[str, Any]] = []
        scheduler = core_of(llm).scheduler
        for name, owner, function in (
            ("schedule", scheduler, "schedule"),
            ("execute", runner_of(llm), "execute_model"),
            ("sample", runner_of(llm), "sample_tokens"),
            ("update", scheduler, "update_from_output"),
        ):
            setattr(owner, function, partial(self._timed, name, getattr(owner, function)))

    def _timed(self, name: str, function: Any, *args: Any, **rest: Any) -> Any:
        begun, event = time.perf_counter(), self._event(name)
        result = function(*args, **rest)
        if name == "schedule":
            counts = result.num_scheduled_tokens.values()
            self.steps.append({"begun": begun, "counts": list(counts)})
        self.steps[-1][name] = time.perf_counter() - begun
        if event is not None:
            self.steps[-1]["events"] = (event, self._event(name))
        return result

    def _event(self, name: str) -> Any:
        import torch

        if name != "execute" or not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def medians(self) -> dict[str, float]:
        """Return median milliseconds of steps that decode as many requests as the next step."""
        times: dict[str, list[float]] = {}
        for step, after in itertools.pairwise(self.steps):
            if step["counts"] and set(step["counts"]) == {1} and after["counts"] == step["counts"]:
                for name in ("schedule", "execute", "sample", "update"):
                    times.setdefault(name, []).append(1e3 * step[name])
                times.setdefault("step", []).append(1e3 * (after["begun"] - step["begun"]))
                if self.cuda:
                    begin, end = step["events"]
                    times.setdefault("device", []).append(begin.elapsed_time(end))
        return {name: round(statistics.median(each), 4) for name, each in times.items()}


def make_engine(path: str, **settings: Any) -> Any:
    """Make a vLLM ``LLM`` in this process."""
    os.environ.update(
        DSV4_OPS_VLLM="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_USE_FLASHINFER_SAMPLER="0",  # the bundle lacks FlashInfer
        VLLM_HOST_IP="127.0.0.1",  # the machine may have no other address
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False  # vLLM then changes more settings
    from vllm import LLM

    defaults: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8}
    defaults |= {"skip_tokenizer_init": True, "dtype": "float32", "disable_log_stats": False}
    defaults |= {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    if torch.cuda.is_available():
        defaults |= {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.1}
        defaults |= {"async_scheduling": False}
    return LLM(model=path, **(defaults | settings))


def core_of(llm: Any) -> Any:
    """Return the engine of an ``LLM``, with its scheduler and worker."""
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm: Any) -> Any:
    """Return vLLM's runner, whose ``model`` is our model."""
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def greedy(new: int) -> Any:
    """Return the settings of a request for ``new`` greedy tokens with logprobs."""
    from vllm import SamplingParams

    settings = {"temperature": 0, "detokenize": False, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(max_tokens=new, **settings)


def run(
    path: str,
    count: int = 20,
    new: int = 24,
    short: bool = False,
    shared: bool = False,
    given: list[list[int]] | None = None,
    record: str = "",
    near: float = 0.0,
    **settings: Any,
) -> Report:
    """Serve ``count`` requests, or the prompts ``given``, greedily, with answers of ``new`` tokens.

    With ``record``, write to this file what steps got from vLLM. For ``near``, see ``compared``.
    """
    llm = make_engine(path, **settings)
    import torch
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    from dsv4_ops.integrations.vllm import _compat

    graphs = counters["stats"]["unique_graphs"]
    runner, eager, steps = runner_of(llm), [0], []
    model, clock = runner.get_model(), Clock(llm)
    before = model.forward

    def counted(input_ids: Any, positions: Any, *args: Any, **rest: Any) -> Any:
        eager[0] += 1
        if record:
            steps.append(_step(input_ids, _compat.group_tensors(), runner.input_batch.req_ids))
        return before(input_ids, positions, *args, **rest)

    model.forward = counted
    given = given or prompts(count, short=short, shared=shared)
    texts = [{"prompt_token_ids": prompt} for prompt in given]
    outs = llm.generate(texts, greedy(new), use_tqdm=False)
    if record:
        num_blocks = core_of(llm).scheduler.kv_cache_config.num_blocks
        text = json.dumps({"num_blocks": num_blocks, "steps": steps}, separators=(",", ":"))
        Path(record).write_text(text + "\n")
    storage = next(iter(model.pages.values())).kv_cache.untyped_storage()
    held = torch.empty(0, dtype=torch.uint8, device=storage.device)
    pool = hashlib.sha256(held.set_(storage).cpu().numpy()).hexdigest()
    late = counters["stats"]["unique_graphs"] - graphs
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return Report(
        *compared(model, outs, near),
        sum(any(step["counts"]) for step in clock.steps),
        sum(sum(step["counts"]) for step in clock.steps),
        sum(out.num_cached_tokens or 0 for out in outs),
        int(metrics.get("vllm:num_preemptions") or 0),
        int(metrics.get("vllm:spec_decode_num_draft_tokens") or 0),
        graphs,
        late,
        pool,
        compilation_counter.num_cudagraph_captured,
        eager[0],
        clock.medians(),
    )


def compared(model: Any, outs: list[Any], near: float = 0.0) -> tuple[float, int]:
    """Return the largest difference from logprobs of one step over prompt and answer, and the
    number of answered tokens whose logits there are more than ``near`` below the greedy ones."""
    import torch

    from dsv4_ops.integrations.transformers import PagedCache

    error, wrong = 0.0, 0
    for out in outs:
        device, prompt = model.hf.device, out.prompt_token_ids
        answer = torch.tensor(out.outputs[0].token_ids, device=device)
        ids = torch.cat((torch.tensor(prompt, device=device), answer))[None]
        most = model.max_model_len
        cache = PagedCache.for_model(model.hf, max_batch_size=1, max_cache_len=most, max_chunk=most)
        with torch.no_grad():
            logits = model.hf(ids, cache=cache).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        steps = zip(answer.tolist(), out.outputs[0].logprobs, strict=True)
        said = [step[token].logprob for token, step in steps]
        error = max(error, float((torch.tensor(said) - chosen.cpu()).abs().max()))
        wrong += int((logits.gather(-1, answer[:, None])[:, 0] < logits.amax(-1) - near).sum())
    return error, wrong


def _step(tokens: Any, metadata: Any, requests: list[str]) -> dict[str, Any]:
    """Return what ``EngineSteps`` gets in a step; caches that share a table are listed together."""
    groups: dict[int, list[str]] = {}
    for name, group in metadata.items():
        groups.setdefault(group.block_table.data_ptr(), []).append(name)
    first = next(iter(metadata.values()))
    return {
        "requests": list(requests),
        "tokens": tokens.tolist(),
        "query_start_loc": first.query_start_loc.tolist(),
        "seq_lens": first.seq_lens.tolist(),
        "max_query_len": int(first.max_query_len),
        "groups": [
            {
                "caches": names,
                "block_table": _trimmed(metadata[names[0]].block_table),
                "slot_mapping": metadata[names[0]].slot_mapping[: len(tokens)].tolist(),
            }
            for names in groups.values()
        ],
    }


def _trimmed(table: Any) -> list[list[int]]:
    """Return rows of a block table without the null blocks at their ends."""
    rows = []
    for row in table.tolist():
        while row and row[-1] == 0:
            row.pop()
        rows.append(row)
    return rows


if __name__ == "__main__":  # each engine runs in a process of its own
    print(json.dumps(run(**json.loads(sys.argv[1]))._asdict()))
