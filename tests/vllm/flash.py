"""Time vLLM's engine over four layers of DeepSeek-V4-Flash's sizes with 16 experts, in bfloat16.

    python -m tests.vllm.flash 8 4096 FULL 3

The arguments are requests, tokens per prompt, vLLM's mode of CUDA graphs, and its mode of
``torch.compile`` (0: none). Requests decode 64 tokens. Compare the printed times with ``step_ms``
of ``python -m benchmarks model --batches 8 --contexts 4096``. On a CPU, the model is small.
"""

import random
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor.config  # vLLM would set the number of its workers to 1

from benchmarks.baselines.stock_model import flash_shaped
from tests.vllm.checkpoints import write_v4
from tests.vllm.engine import run


def main(requests: int, context: int, graphs: str, mode: int) -> None:
    rng = random.Random(0)
    given = [[rng.randrange(3, 250) for _ in range(context)] for _ in range(requests)]
    settings = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "max_model_len": context + 256,
        "max_num_seqs": requests,
        "max_num_batched_tokens": 2048,
        "enforce_eager": graphs == "NONE",
        "compilation_config": {"cudagraph_mode": graphs, "mode": mode},
    }
    if torch.cuda.is_available():
        settings |= {"kv_cache_memory_bytes": 2 * 2**30, "gpu_memory_utilization": 0.5}
        model = flash_shaped(num_experts=16, device=torch.device("cuda"))
    else:
        model = None
    with tempfile.TemporaryDirectory() as folder:
        path = write_v4(Path(folder), model)
        del model
        torch.cuda.empty_cache()
        print(run(str(path), given=given, new=64, **settings))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
