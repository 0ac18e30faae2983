"""FP8 blocks of keys have the bytes of vLLM's Triton kernel, in Triton's interpreter on a CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

# vLLM uses Triton if a backend of this name is active. The interpreter rounds e4m3 differently
# from a GPU, so each block of 64 values is codes times a power of two.
BOTH = """
from types import SimpleNamespace
import torch, triton.backends
active = SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = SimpleNamespace(driver=active)
from vllm.models.deepseek_v4.common.ops import cache_utils
import dsv4_ops
codes = torch.randint(8, 0x7F, (200, 512)) | torch.randint(0, 2, (200, 512)) << 7
k = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
k[:, ::64] = 448.0
k *= torch.exp2(torch.randint(-12, 8, (200, 8))).repeat_interleave(64, 1)
for rows, size, padding in ((64, 37440, 0), (64, 37440, 37440), (2, 1728, 0), (2, 1728, 37440)):
    slots, blocks = torch.randperm(200 + 4 * rows)[:200], 200 // rows + 5
    slots[5] = -1
    pools = [torch.zeros(blocks, size + padding, dtype=torch.uint8) for _ in range(2)]
    for pool, ops in zip(pools, (dsv4_ops, cache_utils), strict=True):
        ops.quantize_and_insert_k_cache(k.bfloat16(), pool[:, :size], slots, block_size=rows)
    assert torch.equal(*pools)
    assert 114000 < int((pools[0] != 0).sum()) < 117000
"""


def test_pages_of_keys_have_vllms_bytes():
    more = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", BOTH], env=os.environ | more, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
