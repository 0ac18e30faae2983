"""Record the inputs that vLLM passes in a few steps, for ``test_steps.py``, which lacks vLLM.

.venv-vllm/bin/python -m tests.vllm.record v4  # and v3
"""

import random
import sys
import tempfile
from pathlib import Path

from tests.vllm.checkpoints import write_v3, write_v4
from tests.vllm.engine import run

RECORDED = Path(__file__).parent / "recorded"

# a prompt, one that shares its first 256 tokens in the same step, and one in two chunks
SIZES, SHARED, STEP_TOKENS = (260, 265, 20), 256, 280


def main(version: str) -> None:
    rng = random.Random(0)
    text = [rng.randrange(3, 250) for _ in range(SHARED)]
    given = [
        (text if size >= SHARED else [])
        + [rng.randrange(3, 250) for _ in range(size - SHARED if size >= SHARED else size)]
        for size in SIZES
    ]
    settings = {"max_model_len": 512, "max_num_batched_tokens": STEP_TOKENS}
    settings |= {"enable_prefix_caching": True, "num_gpu_blocks_override": 200}
    with tempfile.TemporaryDirectory() as folder:
        if version == "v4":
            path = write_v4(Path(folder))
        else:
            path = write_v3(Path(folder))
            settings["block_size"] = 64
        RECORDED.mkdir(exist_ok=True)
        record = str(RECORDED / f"{version}.json")
        print(run(str(path), given=given, new=4, record=record, **settings))


if __name__ == "__main__":  # each engine runs in a process of its own
    main(sys.argv[1])
