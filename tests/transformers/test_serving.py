"""``python -m dsv4_ops serve``: clients get the texts of ``generate``, and clear errors."""

import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from dsv4_ops.__main__ import main
from dsv4_ops.core.errors import install_extra
from dsv4_ops.core.versions import release
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.batching import hooks
from dsv4_ops.testing.models import small_mla_model
from dsv4_ops.testing.tokenizer import write_tokenizer
from tests.fakes import graphs

SERVES = release(transformers.__version__) >= hooks.OLDEST
needs_server = pytest.mark.skipif(not SERVES, reason="transformers is refused by name")
pytestmark = pytest.mark.usefixtures("frozen_heap")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "name", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a model, and a tokenizer of bytes with a chat template."""
    path = tmp_path_factory.mktemp("model")
    model = small_mla_model(num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    write_tokenizer(path)
    return str(path)


@pytest.fixture(scope="module")
def serve():
    """Import the module, if its dependencies are installed."""
    for package in ("fastapi", "uvicorn", "pydantic", "openai"):
        pytest.importorskip(package, reason="needs the extra serve")
    from dsv4_ops.cli import serve

    return serve


@pytest.fixture(scope="module")
def server(serve, folder):
    lines = []
    sizes = {"max_cache_len": 100, "max_requests": 4, "max_batch_tokens": 64, "max_queue": 8}
    sizes |= {"kv": "fp32", "precision": "reference"}
    made = serve.server(folder, port=0, on_progress=lines.append, **sizes)
    made.url = made.start()
    assert lines[0] == f"loading {folder}"
    assert lines[1].startswith("PagedCache(1 layers, max_batch_size=4")
    yield made
    made.stop()


def test_a_start_captures_all_sizes(monkeypatch, tmp_path, serve, folder):
    """Later requests replay the graphs."""
    pools, lines = graphs.install(monkeypatch, tmp_path), []
    sizes = {"max_cache_len": 100, "max_requests": 3, "max_batch_tokens": 70}
    sizes |= {"kv": "fp32", "precision": "reference"}
    made = serve.server(folder, port=0, on_progress=lines.append, **sizes)
    made.url = made.start()
    prefills = [f"capturing a prefill of up to {size} tokens" for size in (128, 64)]
    assert lines[2:] == [*prefills, *(f"capturing {size} decodes" for size in (3, 2, 1))]
    assert len(pools) == 5
    body = {"model": folder, "prompt": [5] * 69, "max_tokens": 9, "temperature": 0}
    assert post(made, TEXT, body)[0] == 200
    made.stop()
    assert len(pools) == 5


def test_a_server_ends_while_a_request_runs(serve, folder):
    made = serve.server(folder, port=0, kv="fp32", precision="reference")
    made.server.config.timeout_graceful_shutdown -= 4
    made.url = made.start()
    body = {"model": folder, "prompt": [5], "max_tokens": 8000, "stream": True}
    with opened(made, TEXT, body) as connection:
        assert connection.recv(1)
        made.stop()
    assert not made.manager.is_running()


def post(server, path, body):
    """Post a request; return status and answer, or the lines of a stream."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
            return answer.status, text if "event-stream" in answer.headers["content-type"] else (
                json.loads(text)
            )
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def opened(server, path, body):
    """Return a connection on which a request was sent."""
    body = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def chat(content, **rest):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **rest}


def streamed(answer):
    """Return the text of a stream, and the reason for its end."""
    parts = [json.loads(line[6:])["choices"][0] for line in answer.splitlines() if line]
    found = "".join(
        part.get("text") or part.get("delta", {}).get("content") or "" for part in parts
    )
    return found, parts[-1]["finish_reason"]


def settled(server):
    """Wait until no request runs; check that all rows and blocks are free."""
    for _ in range(200):
        if not server.manager.unfinished() and not server.manager.paged.requests:
            break
        time.sleep(0.05)
    cache = server.manager.paged
    assert (cache.requests, cache.num_free_blocks) == ({}, cache.num_blocks)
    assert server.manager.output_router.result_handlers == {}
    assert server.manager.output_router.output_queue.empty()


@pytest.fixture(scope="module")
def texts(folder):
    """Return texts that the model's ``generate`` writes after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")

    def text(prompt, limit=8):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": limit}
        out = model.generate(ids, **settings)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return text


@needs_server
def test_six_at_once_get_the_texts_of_generate(server, texts):
    """Two are streams, and one samples, which changes nothing for the others."""
    prompts = ["x" * (7 * n + 1) for n in range(6)]
    bodies = [chat(prompt, stream=n in (1, 4)) for n, prompt in enumerate(prompts)]
    bodies.append(chat("y", generation_config=json.dumps({"do_sample": True, "max_new_tokens": 8})))
    with ThreadPoolExecutor(7) as pool:
        answers = list(pool.map(lambda body: post(server, CHAT, body), bodies))
    assert [status for status, _ in answers] == [200] * 7
    for n, (_, answer) in enumerate(answers[:6]):
        want = texts(f"user: {prompts[n]}\n")
        if n in (1, 4):
            found, reason = streamed(answer)
            assert reason == "length"
        else:
            found = answer["choices"][0]["message"]["content"]
            assert answer["choices"][0]["finish_reason"] == "length"
        assert found == want
    settled(server)


@needs_server
def test_a_stream_ends_with_the_character_that_a_limit_cuts(server, texts):
    """Hugging Face's streamer drops the bytes of an incomplete character."""
    tokens, cut = 8, []
    for prompt in ("one", "x" * 15, "y"):
        for limit in range(1, tokens + 1):
            body = chat(prompt, stream=True) | {"max_tokens": limit}
            found, _ = streamed(post(server, CHAT, body)[1])
            assert found == texts(f"user: {prompt}\n", limit)
            cut.append(found.endswith("\ufffd"))
    assert {True, False} == set(cut)


@needs_server
def test_a_temperature_samples_and_no_value_of_it_ends_the_server(server, texts):
    """Greedy settings of the model do not matter. Clients may send NaN and Infinity."""
    greedy = texts("user: one\n")

    def answer(**rest):
        return post(server, CHAT, chat("one", **rest))

    def text(**rest):
        return answer(**rest)[1]["choices"][0]["message"]["content"]

    assert {text(temperature=value) for value in (0, 1e-45, 1e-5)} == {greedy}
    assert {text(temperature=5, seed=seed) for seed in range(3)} - {greedy}
    sampled = '{"do_sample": true, "max_new_tokens": 8, "temperature": 0.0}'
    assert text(generation_config=sampled) == greedy
    for value in (float("nan"), float("inf"), -1):
        status, error = answer(temperature=value)
        assert status == 400
        assert error["error"]["message"].startswith("temperature must be finite and not negative")
    assert answer(temperature=1, top_p=float("nan"))[0] == 400
    assert answer(temperature=1, generation_config='{"top_k": -2}')[0] == 400
    assert text() == greedy


@needs_server
def test_other_routes(server, texts, folder):
    status, answer = post(server, TEXT, {"prompt": "The sky", "max_tokens": 8})
    assert (status, answer["choices"][0]["text"]) == (200, texts("The sky"))
    path = Path(folder)
    for name in (path.name, f"{path}/", f"{path.parent}/./{path.name}"):
        body = chat("x", n=1, logprobs=False, model=name, chat_template_kwargs=None)
        body |= {"max_tokens": None, "generation_config": '{"max_length": 9.0}', "seed": -(2**63)}
        assert post(server, CHAT, body | {"temperature": 10**30})[0] == 200
    body = {"input": "one", "max_output_tokens": 8.0}
    assert isinstance(post(server, "/v1/responses", body | {"stream": True})[1], str)
    status, answer = post(server, "/v1/responses", body)
    (message,) = answer["output"]
    assert (status, message["content"][0]["text"]) == (200, texts("user: one\n"))
    with urllib.request.urlopen(server.url + "/v1/models", timeout=10) as answer:
        (listed,) = json.load(answer)["data"]
    assert listed["id"] == folder
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ok"}
    assert post(server, "/reset", {})[0] == 404
    _, events = post(server, "/load_model", {"model": "other/model"})
    assert "error" in events
    settled(server)


@needs_server
def test_a_completion_of_several_prompts_has_a_choice_for_each(server, texts):
    """Prompts are texts, or tokens, which are bytes here; a list of tokens is one prompt."""
    prompts = ["The sky", "x" * 20, "y"]
    ids = [AutoTokenizer.from_pretrained(server.path)(each)["input_ids"] for each in prompts]
    for asked, whose in ((prompts, prompts), ([ids[0], "y"], prompts[::2]), (ids[1], prompts[1:2])):
        status, answer = post(server, TEXT, {"prompt": asked, "max_tokens": 8})
        assert [each["text"] for each in answer["choices"]] == list(map(texts, whose))
        assert [each["index"] for each in answer["choices"]] == list(range(len(whose)))
        prompt, new = sum(map(len, whose)), 8 * len(whose)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        assert (status, answer["usage"]) == (200, usage)
    _, answer = post(server, TEXT, {"prompt": ids[0], "max_tokens": 8, "stream": True})
    assert streamed(answer) == (texts("The sky"), "length")
    settled(server)


@needs_server
def test_tools_come_into_a_prompt_whose_template_has_them(server, monkeypatch):
    tokenizer = server._tokenizer
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tokenizer.chat_template
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    status, answer = post(server, CHAT, chat("x", tools=[TOOL], tool_choice="auto"))
    assert (status, answer["usage"]["prompt_tokens"]) == (200, len("nameuser: x\n"))
    body = {"input": "x", "tools": [{"type": "function", **TOOL["function"]}]}
    assert post(server, "/v1/responses", body)[1]["usage"]["input_tokens"] == len("nameuser: x\n")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles') }}")
    assert "got TemplateError: roles." in post(server, CHAT, chat("x"))[1]["error"]["message"]


@needs_server
def test_openai_s_client(server, texts):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)
    answer = client.chat.completions.create(model=server.path, **chat("one"), temperature=0)
    assert answer.choices[0].message.content == texts("user: one\n")
    with pytest.raises(openai.BadRequestError, match="The prompt must have at most 100 tokens"):
        client.chat.completions.create(model=server.path, **chat("x" * 200))


LONG = (
    "The prompt must have at most 100 tokens, which the server's cache stores, got 102. "
    "Send a shorter one, or start the server with a larger --max-cache-len."
)
ROLES = "messages must be a list of messages, each with a role, and a text or parts, got "
BAD = [
    (CHAT, b"{not json", "JSON"),
    (CHAT, b"[1]", "dictionary"),
    (CHAT, {}, ROLES + "nothing."),
    *((CHAT, {"messages": value}, ROLES) for value in ("a", [], [5], [{"role": 5}])),
    *((CHAT, chat(value), ROLES) for value in (5, [5], [{"text": "x"}])),
    *((CHAT, chat("x") | {name: value}, f"{name} must be {rule}, got {json.dumps(value)}.")
      for name, rule, *values in (
          ("max_tokens", "an integer of at least 1", "x", "5", 1.5, True, 0, -3),
          ("max_completion_tokens", "an integer of at least 1", []),
          ("temperature", "a number", "x", True), ("top_p", "a number", {}),
          ("seed", "an integer of 64 bits", "x", 1.5, 2**63), ("stream", "true or false", "x", 1),
          ("model", "a string", 5),
          ("chat_template_kwargs", "an object without chat_template", [1], {"chat_template": ""}),
          ("tools", "a list of objects", "x", [5]),
          ("generation_config", "a string that holds a JSON object", {}, "{", "[]"))
      for value in values),
    (CHAT, chat("x", generation_config='{"top_k": "x"}'), "generation_config.top_k must be an int"),
    (CHAT, chat("x", tools=[TOOL]), "tools must be left out: the model's chat template"),
    (CHAT, chat([{"type": "image_url", "image_url": {}}]), "text, got image_url."),
    (CHAT, chat("x", max_tokens=None, generation_config='{"max_length": 8}'),
     "The prompt must have fewer tokens than max_length = 8, got 8. Pass max_tokens."),
    (CHAT, chat("x", generation_config="[" * 10**5), "got RecursionError: "),
    (CHAT, chat("x") | {"\ud800": 1}, "\\ud800 is not supported. Leave it out."),
    (CHAT, chat("x", model="other"), "pinned"),
    (CHAT, chat("x" * 95), LONG),
    (CHAT, chat("x" * 95, stream=True), LONG),
    (TEXT, {"prompt": ""}, "The prompt must have at least one token."),
    (TEXT, {"prompt": 5}, "prompt must be a text, tokens, or a list of these, got 5."),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    *(("/v1/responses", {"input": items}, "content must be text, got input_image.")
      for items in ([{"type": "input_image"}], chat([{"type": "input_image"}])["messages"])),
    *(("/v1/responses", body, f"input must be a text, or a list of messages, got {got}")
      for body, got in (({}, "nothing"), ({"input": [5]}, "[5]"), ({"input": 5}, "5"))),
    ("/v1/responses", {"input": "x", "max_output_tokens": "x"}, "max_output_tokens must be an int"),
    (TEXT, {"prompt": []}, "prompt must be a text, tokens, or a list of these."),
    (TEXT, {"prompt": ["x", 5]}, "prompt must be a text, tokens, or a list of these."),
    (TEXT, {"prompt": ["x", ""]}, "The prompt must have at least one token"),
    (TEXT, {"prompt": ["x"] * 9}, "prompt must have at most max_queue = 8 prompts, got 9. Send"),
    (TEXT, {"prompt": [10**6]}, "ids of the vocabulary, 0 to 259"),
    (TEXT, {"prompt": ["x", "y"], "stream": True}, "stream must be false for 2 prompts."),
    *((CHAT, chat("x", **{name: value}), f"{name} is not supported. Leave it out.")
      for name, value in {"stop": ["a"], "logit_bias": {"5": 1.0}, "frequency_penalty": 0.5, "n": 2,
      "logprobs": True, "presence_penalty": 1, "response_format": {"type": "json"}, "unknown": 1,
      "tool_choice": "none", "verbosity": "low", "repetition_penalty": 2}.items()),
    *((TEXT, {"prompt": "x", name: value}, f"{name} is not supported.")
      for name, value in {"logit_bias": {"5": 1.0}, "logprobs": 0}.items()),
    *(("/v1/responses", {"input": "x", name: "a"}, f"{name} is not supported.")
      for name in ("previous_response_id", "conversation")),
]  # fmt: skip


@needs_server
@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_requests_get_a_clear_error(server, path, body, message):
    found, answer = post(server, path, body)
    assert message in answer["error"]["message"]
    assert found == (422 if isinstance(body, bytes) else 400)
    settled(server)


@needs_server
def test_an_answer_ends_where_the_cache_does(server):
    status, answer = post(server, CHAT, chat("x" * 85) | {"max_tokens": 1000})
    assert (status, answer["usage"]["total_tokens"]) == (200, 101)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def slow(server, monkeypatch):
    """Make steps so slow that clients can leave between them."""
    before = server.manager._generation_step

    def step():
        time.sleep(0.05)
        before()

    monkeypatch.setattr(server.manager, "_generation_step", step)


@needs_server
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(server, slow, stream):
    """The client leaves long before its answer ends."""
    with opened(server, CHAT, chat("x", stream=stream) | {"max_tokens": 90}) as client:
        begun = time.monotonic()
        while not server.manager.paged.requests:
            time.sleep(0.01)
            assert time.monotonic() - begun < 10
        if stream:
            assert b"200 OK" in client.recv(1000)
    begun = time.monotonic()
    settled(server)
    assert time.monotonic() - begun < 3


@needs_server
@pytest.mark.nightly("each of these alone; test_batching.py has 200 requests without HTTP")
def test_two_hundred_clients_come_and_leave(serve, folder, texts):
    """Clients come within 20 seconds, and a third of them leaves. Nine blocks serve six rows."""
    sizes = {"max_cache_len": 128, "max_requests": 6, "max_batch_tokens": 64, "num_blocks": 9}
    made = serve.server(folder, port=0, kv="fp32", precision="reference", **sizes)
    made.url, rng = made.start(), random.Random(5)
    asked = [("x" * rng.choice((1, 5, 20, 60, 100)), rng.randint(1, 20)) for _ in range(200)]
    leaves = [rng.random() < 0.3 and rng.random() / 2 for _ in asked]
    waits, begun = [rng.random() * 20 for _ in asked], time.monotonic()

    def answer(n):
        time.sleep(max(0, begun + waits[n] - time.monotonic()))
        body = {"prompt": asked[n][0], "max_tokens": asked[n][1], "stream": n % 2 == 0}
        if leaves[n]:
            with opened(made, TEXT, body | {"max_tokens": 27}):
                return time.sleep(leaves[n])
        answer = post(made, TEXT, body)[1]
        return streamed(answer)[0] if n % 2 == 0 else answer["choices"][0]["text"]

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(answer, range(200)))
    want = [None if left else texts(*each) for each, left in zip(asked, leaves, strict=True)]
    assert found == want
    settled(made)
    made.stop()


@needs_server
def test_a_full_queue_is_refused(server, slow):
    """Eight prompts may wait or run. A list of three prompts is accepted or refused as a whole."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: post(server, TEXT, {"prompt": [f"{n}"] * 3}), range(12)))
    statuses, (*_, refused) = zip(*sorted(answers, key=lambda each: each[0]), strict=True)
    assert (statuses[1], set(statuses)) == (200, {200, 503})
    assert refused["error"]["message"].startswith("The server has 8 requests, its most. Send")
    settled(server)


@needs_server
@pytest.mark.nightly("test_batching.py compiles the same steps")
def test_a_server_compiles_before_it_listens(serve, folder):
    lines = []
    sizes = {"max_cache_len": 64, "max_requests": 2}
    made = serve.server(folder, port=0, compile="eager", on_progress=lines.append, **sizes)
    steps = made._model_manager.loaded_models[folder].model.dsv4_ops_decode_steps.values()
    parts = [f"compiling {p} of {s.step.__name__}" for s in steps for p in s.parts]
    assert sorted(lines[2:]) == sorted(parts)
    made.url = made.start()
    assert post(made, CHAT, chat("x"))[0] == 200
    made.stop()
    assert len(lines) == 2 + len(parts)


@needs_server
@pytest.mark.nightly("a server of another model; test_quantized.py has the loader")
def test_a_released_folder_is_served_in_its_precision(serve, folder, tmp_path):
    from dsv4_ops.testing.checkpoint import write_checkpoint

    write_checkpoint(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(folder) / file, tmp_path)
    sizes = {"max_cache_len": 64, "max_requests": 2}
    made = serve.server(str(tmp_path), port=0, quantized=True, **sizes)
    made.url = made.start()
    assert post(made, CHAT, chat("x"))[0] == 200
    layers = made._model_manager.loaded_models[str(tmp_path)].model.model.layers
    assert layers[0].mlp.experts.down_proj.dtype == torch.int8
    made.stop()


@needs_server
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_failed_server_drops_gets_an_error(server, stream, monkeypatch):
    """Hugging Face's ``add_request`` only logs this and returns None, so a client would wait."""
    monkeypatch.setattr(server.manager, "add_request", lambda *_, **__: None)
    status, answer = post(server, CHAT, chat("x", stream=stream))
    assert (status, answer["error"]["type"]) == (503, "server_error")
    assert answer["error"]["message"].startswith("The server must run to take requests, got its e")
    settled(server)


@needs_server
def test_a_server_whose_steps_fail_says_so(server, monkeypatch):
    """This test comes last: Hugging Face's thread ends at the first error of a step."""

    def fail():
        raise RuntimeError("out of luck")

    monkeypatch.setattr(server.manager, "_generation_step", fail)
    for statuses in ((500, 503), (503,)):  # the request that fails, and one after it
        status, answer = post(server, CHAT, chat("x"))
        assert status in statuses
        assert re.search("out of luck|must run", answer["error"]["message"])
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(server.url + "/health", timeout=10)


KNOWN = "a folder, or a name of the Hub such as deepseek-ai/DeepSeek-V3, got"
REFUSED = {
    **{path: f"MODEL must be {KNOWN} '{path}'. Name a" for path in ("a", "./a", "a/b/c", "no/a/b")},
    "a/b --device cuda:99": "--device must be one",
    "{plain} --port 99999999": "--port must be at most 65535, got 99999999. Pass 65535 or less.",
    "{plain} --port -1": "--port must be at least 0, got -1. Pass 0 or more.",
    "{plain} --port {port}": "--port must be free to listen at, got ",
    "{plain} --host 192.0.2.1": "--host must be an address of this machine, got '192.0.2.1': ",
    "{plain} --host .": "--host must be an address of this machine, got '.': ",
    "{plain} --max-cache-len 0": "--max-cache-len must be at least 1, got 0.",
    "{plain} --max-cache-len 99999999999": "--max-cache-len must be at most 2147483647, got 9",
    "{plain} --max-requests 16384": "--max-requests must be at most 16383, got 16384. Pass 16383",
    "{plain} --num-blocks 2147483647": "--num-blocks must leave memory on cpu, which has ",
    "{plain} --dtype int8": "--dtype must be auto, bfloat16, float16 or float32, got int8. Leave",
    "{plain} --kv none": "--kv must be 'fp8' or ",
    "{plain} --precision none": "--precision must be 'serve' or 'reference', got 'none'.",
    "{plain} --compile none": "--compile must be a backend of torch.compile (eager, aot_eager, ",
    "{plain} --quantized": "--quantized must be left out for plain weights, got {plain}, whose con",
    "{fp8}": "--quantized must be set for FP8 weights on cpu, got False. Start the server with it.",
    "{fp8} --quantized": "MODEL must have a tokenizer, got {fp8}, whose tokenizer does not load.",
}


@needs_server
@pytest.mark.parametrize("words", REFUSED)
def test_settings_are_refused_before_a_model_is_loaded(
    server, words, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    config = json.loads((Path(folder) / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"plain": folder, "fp8": tmp_path, "port": server.url.rpartition(":")[2]}
    assert main(["serve", "--device", "cpu", *words.format(**names).split()]) == 1
    assert capsys.readouterr().err.startswith(f"serve: {REFUSED[words].format(**names)}")


def test_help_shows_the_values_of_options(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    values = r"--kv \{fp8,bf16,fp32,ds_fp8\}.*--precision \{serve,reference\}"
    assert re.search(values, capsys.readouterr().out, re.S)


PACKAGES = {
    "transformers.__version__": ("5.18.0", "transformers must be 5.19 or newer for continuous"),
    "transformers.utils.import_utils.is_serve_available": (lambda: False, "fastapi, uvicorn, pydan"
    f"tic and openai must be installed, got not all of them. {install_extra('serve')}."),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_the_command_names_what_is_missing(name, capsys, monkeypatch, folder):
    if not SERVES and name != "transformers.__version__":
        pytest.skip("transformers is refused by name")
    monkeypatch.setattr(name, PACKAGES[name][0])
    assert main(["serve", folder]) == 1
    assert capsys.readouterr().err.startswith(f"serve: {PACKAGES[name][1]}")


@needs_server
@pytest.mark.usefixtures("serve")
@pytest.mark.nightly("the same server runs in a thread")
def test_the_command_serves_until_it_is_interrupted(folder):
    command = [sys.executable, "-m", "dsv4_ops", "serve", folder, "--port", "0", "--kv", "fp32"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr.readline, "")
        url = next(m[1] for line in lines if (m := re.search(r"running on (http\S+)", line)))
        with urllib.request.urlopen(url + "/health", timeout=10) as answer:
            assert json.load(answer) == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(20) == 0


def test_the_tiny_checkpoint_has_a_tokenizer(tmp_path):
    """A token is a byte: "!" has the first id after the special tokens, "H" is 39 later."""
    from dsv4_ops.cli import checkpoint

    checkpoint.write(str(tmp_path), "v4", "instruct", 0, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("!H") == [0, 2, 41]
    text = "H\u00fc \u4f60\n  x"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    chat = [{"role": "user", "content": "Hi"}]
    made = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert made == "user: Hi\nassistant:"
