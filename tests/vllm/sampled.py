"""Sampled arrivals, shared prefixes and cancels in one vLLM engine, in a process of its own."""

import itertools
import json
import random
import sys
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings, strategies as st

from tests.vllm.engine import compared, core_of, greedy, make_engine, runner_of

TEXT = [random.Random(0).randrange(3, 250) for _ in range(600)]
RULES: dict[str, Any] = {"deadline": None, "database": None, "derandomize": True}
SIZES = {"num_gpu_blocks_override": 260, "enable_prefix_caching": True, "max_num_seqs": 4}


class Request(NamedTuple):
    """A sampled request.

    Attributes:
        begin: Tokens of the text that many prompts begin with.
        own: The other tokens of the prompt.
        new: Tokens of the answer.
        wait: Steps from the arrival of the previous request to the arrival of this one.
        leaves: Steps after which the client leaves, or None.
    """

    begin: int
    own: list[int]
    new: int
    wait: int
    leaves: int | None


REQUESTS = st.builds(
    Request,
    begin=st.sampled_from((0, 255, 256, 300, 520)),
    own=st.lists(st.integers(3, 249), min_size=1, max_size=40),
    new=st.integers(1, 10),
    wait=st.integers(0, 3),
    leaves=st.none() | st.integers(0, 12),
)


def main(path: str, examples: int, **rest: Any) -> None:
    """Compare all answers, also those of cancelled requests, and count the free blocks."""
    llm = make_engine(path, **(SIZES | rest))
    engine, model = llm.llm_engine, runner_of(llm).model
    blocks = core_of(llm).scheduler.kv_cache_manager.block_pool
    free, names = blocks.get_num_free_blocks(), itertools.count()
    seen = {"requests": 0, "left": 0, "cached": 0, "error": 0.0}

    def step(last: dict[str, Any], leave: dict[str, int | None]) -> None:
        for out in engine.step():
            last[out.request_id] = out
        for name, steps in leave.items():
            leave[name] = None if steps is None else steps - 1
            if steps == 0:
                engine.abort_request([name])
                seen["left"] += name not in last or not last[name].finished

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), **RULES)
    @given(st.lists(REQUESTS, min_size=1, max_size=8))
    def serve(requests: list[Request]) -> None:
        llm.reset_prefix_cache()
        last: dict[str, Any] = {}
        leave: dict[str, int | None] = {}
        for request in requests:
            for _ in range(request.wait):
                step(last, leave)
            name = str(next(names))
            prompt = {"prompt_token_ids": TEXT[: request.begin] + request.own}
            engine.add_request(name, prompt, greedy(request.new))
            leave[name] = request.leaves
        while engine.has_unfinished_requests():
            step(last, leave)
        outs = [out for out in last.values() if out.outputs[0].token_ids]
        error, wrong = compared(model, outs)
        seen["requests"] += len(requests)
        seen["cached"] += sum(out.num_cached_tokens or 0 for out in outs)
        seen["error"] = max(seen["error"], error)
        assert wrong == 0
        assert error <= 1e-5
        assert blocks.get_num_free_blocks() == free
        for name, request in zip(leave, requests, strict=True):
            if request.leaves is None:
                assert len(last[name].outputs[0].token_ids) == request.new

    serve()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
