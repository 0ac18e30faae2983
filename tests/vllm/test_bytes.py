"""FP8 blocks have the bytes of vLLM's Triton kernels, in Triton's interpreter on a CPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

# vLLM uses Triton if a backend of this name is active. The interpreter rounds e4m3 differently
# from a GPU, so each block of values is codes times a power of two.
SETUP = """
from types import SimpleNamespace
import torch, triton.backends
active = SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = SimpleNamespace(driver=active)
from vllm.models.deepseek_v4.common.ops import cache_utils, fused_compress_quant_cache as fused
import dsv4_ops
def keys(width, most, exponents):
    codes = torch.randint(8, most, (200, width)) | torch.randint(0, 2, (200, width)) << 7
    k = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    block = width // exponents
    k[:, ::block] = torch.tensor(most - 1).to(torch.uint8).view(torch.float8_e4m3fn).float()
    return k * torch.exp2(torch.randint(-12, 8, (200, exponents))).repeat_interleave(block, 1)
def pools(rows, size, padding):
    slots, blocks = torch.randperm(200 + 4 * rows)[:200], 200 // rows + 5
    slots[5] = -1
    return slots, [torch.zeros(blocks, size + padding, dtype=torch.uint8) for _ in range(2)]
"""
KEYS = """
k = keys(512, 0x7F, 8)
for rows, size, padding in ((64, 37440, 0), (64, 37440, 37440), (2, 1728, 0), (2, 1728, 37440)):
    slots, both = pools(rows, size, padding)
    for pool, ops in zip(both, (dsv4_ops, cache_utils), strict=True):
        ops.quantize_and_insert_k_cache(k.bfloat16(), pool[:, :size], slots, block_size=rows)
    assert torch.equal(*both)
    assert 114000 < int((both[0] != 0).sum()) < 117000
"""
# vLLM's compressor with windows of one token, a norm that divides by 2**50, and no rotation
INDEXER_KEYS = """
k = keys(128, 0x7E, 1)
states, tokens = torch.cat((k, torch.randn(200, 128)), 1).view(50, 4, 256), torch.arange(200)
requests, table = torch.zeros(200, dtype=torch.int32), torch.arange(50, dtype=torch.int32)[None]
rope = torch.cat((torch.ones(200, 32), torch.zeros(200, 32)), 1)
for rows, size, padding in ((64, 8640, 0), (64, 8640, 8640), (2, 576, 0), (2, 576, 8640)):
    slots, (ours, of_vllm) = pools(rows, size, padding)
    dsv4_ops.quantize_and_insert_indexer_k(k.bfloat16(), ours[:, :size], slots, block_size=rows)
    fused._fused_kv_compress_norm_rope_insert_indexer_attn[(200,)](
        states, 1024, 256, requests, tokens, tokens, table, 50, 4, torch.full((128,), 2.0**50),
        2.0**100, rope, 64, of_vllm, slots, rows, HEAD_SIZE=128, TRITON_BLOCK_SIZE=128,
        STATE_WIDTH=128, COMPRESS_RATIO=1, OVERLAP=0, ROPE_HEAD_DIM=64, FP8_MAX=448.0,
        QUANT_BLOCK=128, TOKEN_STRIDE=128, SCALE_DIM=4, KV_BLOCK_STRIDE=of_vllm.stride(0),
    )
    assert torch.equal(ours, of_vllm)
    assert 25500 < int((ours != 0).sum()) < 26268
"""


@pytest.mark.parametrize("code", [KEYS, INDEXER_KEYS], ids=["keys", "indexer keys"])
def test_pages_of_keys_have_vllms_bytes(code):
    more = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", SETUP + code], env=os.environ | more, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
