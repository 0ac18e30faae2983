"""Workers compile the kernels of a model's first steps for the GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

SCRIPT = """
import torch
from triton import knobs
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model

seen = []
knobs.compilation.listener = lambda *, src, cache_hit, **rest: seen.append((src, cache_hit))
model = v4.patch(small_model(device="cuda", dtype=torch.bfloat16))
ids = torch.arange(3, 67, device="cuda")[None]
model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
hits = [hit for src, hit in seen if src.fn.fn.__module__.startswith("dsv4_ops")]
print(sum(hits), len(hits), [src.name for src, hit in seen if not hit])
"""


def test_launches_read_what_workers_compiled(tmp_path):
    """The process begins with empty folders; some kernels depend on more than sizes."""
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = os.environ | {name: str(tmp_path / each) for name, each in folders.items()}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    command = [sys.executable, "-c", SCRIPT]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
    hits, asked = map(int, out.stdout.splitlines()[-1].split()[:2])
    assert asked > 20
    assert hits > 0.8 * asked, out.stdout
