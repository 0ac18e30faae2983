"""The server of ``vllm serve`` with the plugin: an engine in a process of its own, over HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

import torch
from transformers import AutoTokenizer

from dsv4_ops.integrations.transformers import patch
from dsv4_ops.testing.models import small_model
from tests.support.tokenizer import write_tokenizer
from tests.vllm.checkpoints import write_v4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_v4(tmp_path_factory.mktemp("v4"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def address(folder):
    """Of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "float32"]
    settings += ["--enforce-eager", "--tokenizer-mode", "hf", "--no-enable-prefix-caching"]
    settings += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"]
    # not vllm serve, which looks for a distribution of the name vllm
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*server, "--model", str(folder), *settings]
    more = {"DSV4_OPS_VLLM": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=out)
    try:
        url, end = f"http://127.0.0.1:{port}", time.time() + 240
        while time.time() < end and server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-6000:])
        yield url
    finally:
        server.terminate()
        server.wait(60)


def ask(url, path, **body):
    data = json.dumps({"model": "small", "temperature": 0, "max_tokens": 16, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_a_chat_gets_the_text_of_generate(folder, address):
    message = [{"role": "user", "content": "What is a window?"}]
    found = ask(address, "/v1/chat/completions", messages=message, ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("user: What is a window?\n", return_tensors="pt")["input_ids"]
    model = patch(small_model(), kv="fp32")
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert found["choices"][0]["message"]["content"] == text


def test_a_grammar_of_vllm_holds(address):
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    found = ask(address, "/v1/completions", prompt="Is it?", **choice)
    assert found["choices"][0]["text"] in ("yes", "no")
