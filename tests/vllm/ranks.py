"""Run requests in vLLM with several processes, and print the logprobs of the answers."""

import json
import sys
from typing import Any

from tests.vllm.engine import greedy, make_engine, prompts


def main(path: str, **settings: Any) -> None:
    llm = make_engine(path, enable_prefix_caching=True, num_gpu_blocks_override=400, **settings)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(8, shared=True)]
    outs = llm.generate(asked, greedy(12), use_tqdm=False)
    answers = [
        zip(each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True) for each in outs
    ]
    print(json.dumps([[[token, step[token].logprob] for token, step in each] for each in answers]))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
