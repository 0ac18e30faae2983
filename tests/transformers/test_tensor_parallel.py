"""Hugging Face's tensor parallel: ``from_pretrained(tp_plan="auto")``, then ``patch``."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", "5.23", reason="splits DeepSeek-V4 since")
pytest.importorskip("accelerate", reason="transformers loads split models with it")

from dsv4_ops.testing.models import small_model
from tests.support.hf_models import text

LENGTH = 24


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes(tmp_path):
    """Both have Hugging Face's logits of the whole model, eager and in one graph."""
    model, tokens = small_model(layer_types=["compressed_sparse_attention"]), text()[:1, :LENGTH]
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.save({"tokens": tokens.clone(), "logits": model(tokens).logits}, tmp_path / "want.pt")
    script = Path(__file__).with_name("tensor_parallel.py")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    paths = os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")])
    processes = [
        subprocess.Popen(
            [sys.executable, script, tmp_path],
            env={**os.environ, **shared, "PYTHONPATH": paths, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0] + outputs[1]
