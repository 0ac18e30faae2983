"""The demo: its model and text, what it measures, and what it says of it."""

import io
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from dsv4_ops.__main__ import main
from dsv4_ops.demo import jobs, measure, model, ours, run, stock, table, text
from dsv4_ops.demo.measure import Captured, Failed, Graphs, Unmeasured
from dsv4_ops.demo.progress import Progress
from dsv4_ops.integrations import transformers as v4

LM_HEAD = [0.14174489676952362, 0.026493901386857033, -0.1491500437259674]
SINKS = [5.1950483322143555, 4.153304576873779, 6.6722941398620605, 2.263639450073242]
EXPERTS = [[6, 5], [5, 4], [6, 3]]
NEUTRAL_ONE = ("scale", "norm.weight")
REDRAWN = (
    *("sinks", "position_bias", "correction_bias", "norm.weight", "tid2eid"),
    *("hc.base", "hc.scale", "hc.fn", "hc_base", "hc_scale", "hc_fn"),
    "indexer.q_b_proj.weight",
)


@pytest.fixture(scope="module")
def small():
    return model.small_model(eos_token_id=None)


@pytest.fixture(scope="module")
def prompts():
    return torch.tensor(text.prompts(2, 124))


@torch.no_grad()
def logits_of(small, num_tokens=220, last=80):
    ids = torch.tensor(text.prompts(1, num_tokens))
    return small(ids, use_cache=False).logits[:, -last:]


def test_the_small_model_has_all_types_of_layers_with_the_released_sizes(small):
    config = small.config
    assert config.layer_types == [model.SLIDING, model.SPARSE, model.HEAVY]
    assert config.mlp_layer_types == ["hash_moe", "moe", "moe"]
    assert config.compress_rates == {model.SPARSE: 4, model.HEAVY: 128}
    sizes = (config.sliding_window, config.head_dim, config.qk_rope_head_dim, config.index_head_dim)
    assert sizes == (128, 512, 64, 128)
    ropes = config.rope_parameters
    assert ropes["main"]["rope_type"] == "default"
    assert {**model.YARN, "attention_factor": 1.0}.items() <= ropes["compress"].items()
    assert ropes["compress"]["rope_theta"] == 160000
    assert config.vocab_size == text.VOCAB_SIZE
    assert not small.training


def test_layers_repeat_the_three_types_and_fields_can_be_replaced():
    config = model.small_config(num_hidden_layers=5, index_topk=7)
    assert config.layer_types == [*model.LAYER_TYPES, model.SLIDING, model.SPARSE]
    assert config.index_topk == 7
    assert model.small_config(layer_types=[model.HEAVY]).num_hidden_layers == 1


def test_logits_spread_by_about_one(small):
    logits = logits_of(small)
    assert 0.8 < logits.std() < 1.25
    assert logits.std(-1).min() > 0.5


def test_whatever_hugging_face_leaves_neutral_shows_in_the_logits(small):
    """Each of these weights, put back to what Hugging Face's initialisation leaves."""
    expected, tested = logits_of(small), 0
    for name, weight in small.state_dict().items():
        if name.endswith(REDRAWN):
            drawn = weight.clone()
            weight.fill_(1 if name.endswith(NEUTRAL_ONE) else 0)
            change = (logits_of(small) - expected).square().mean().sqrt()
            weight.copy_(drawn)
            assert change > 0.005, name
            tested += 1
    assert tested > 40
    assert torch.equal(logits_of(small), expected)


def test_biases_and_sinks_differ_from_head_to_head_and_expert_to_expert(small):
    for name, weight in small.state_dict().items():
        if name.endswith(("sinks", "correction_bias")):
            assert weight.float().std() > 0.1, name


def test_hash_routing_sends_a_token_to_different_experts_and_uses_all(small):
    table = small.model.layers[0].mlp.gate.tid2eid
    assert table.shape == (260, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.flatten().tolist()) == set(range(8))


def test_a_seed_decides_the_weights_and_other_layers_do_not_change_them(small):
    state = small.state_dict()
    again = model.small_model().state_dict()
    more = model.small_model(num_hidden_layers=4).state_dict()
    other = model.small_model(seed=1).state_dict()
    for name, weight in state.items():
        assert torch.equal(weight, again[name]), name
        assert torch.equal(weight, more[name]), name
        assert not torch.equal(weight, other[name]), name


def test_weights_have_the_same_bits_on_every_machine(small):
    """As drawn where this was written; a uniform draw is a product of integers."""
    state = small.state_dict()
    assert state["lm_head.weight"][0, :3].tolist() == LM_HEAD
    assert state["model.layers.0.self_attn.sinks"].tolist() == SINKS
    assert state["model.layers.0.mlp.gate.tid2eid"][:3].tolist() == EXPERTS


def test_dtypes_are_those_that_from_pretrained_gives(small, tmp_path):
    small.save_pretrained(tmp_path)
    loaded = type(small).from_pretrained(tmp_path, dtype=torch.bfloat16)
    made = model.small_model(dtype=torch.bfloat16)
    expected = {name: weight.dtype for name, weight in loaded.state_dict().items()}
    assert {name: weight.dtype for name, weight in made.state_dict().items()} == expected
    assert set(expected.values()) == {torch.bfloat16, torch.float32, torch.int64}
    assert made.model.rotary_emb.compress_inv_freq.dtype == torch.float32


def test_without_transformers_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'dsv4_ops\[transformers\]'"):
        model.small_model()
    assert main(["demo"]) == 2
    assert "dsv4_ops[transformers]" in capsys.readouterr().err


@given(st.text(), st.booleans())
def test_text_survives_the_tokenizer(words, bos):
    tokenizer = text.ByteTokenizer()
    tokens = tokenizer.encode(words, bos=bos)
    assert tokenizer.decode([*tokens, text.EOS, text.PAD]) == words
    assert len(tokens) == bos + len(words.encode())
    assert all(0 <= token < text.VOCAB_SIZE for token in tokens)


@given(st.lists(st.integers(0, text.VOCAB_SIZE - 1)))
def test_any_tokens_of_the_vocabulary_decode(tokens):
    assert isinstance(text.ByteTokenizer().decode(tokens), str)


@pytest.mark.parametrize("token", [-1, 260, 2**63])
def test_other_tokens_are_refused(token):
    with pytest.raises(ValueError, match=r"tokens must be 0 to 259, got -?\d+\. Pass ids"):
        text.ByteTokenizer().decode([65, token])


def test_text_is_real_the_same_every_time_and_a_prefix_of_more():
    longest = text.real_text(20000)
    assert longest.startswith("The Zen of Python, by Tim Peters")
    assert longest.isascii()
    assert len(set(longest.split())) > 500
    for size in (0, 1, 40, 856, 857, 5000):
        assert text.real_text(size) == longest[:size]


def test_a_python_without_documentation_repeats_what_it_has(monkeypatch):
    monkeypatch.setattr(text, "_sources", lambda: islice(["Now.\n"], 1))
    assert text.real_text(12) == "Now.\nNow.\nNo"
    monkeypatch.setattr(text, "_sources", lambda: iter(()))
    assert len(text.real_text(500)) == 500


def test_prompts_are_of_one_length_and_differ():
    found = text.prompts(4, 90)
    assert [len(prompt) for prompt in found] == [90] * 4
    assert len({tuple(prompt) for prompt in found}) == 4
    assert {prompt[0] for prompt in found} == {text.BOS}


def test_stock_decodes_what_its_own_generate_does_and_that_is_no_loop(small, prompts):
    decoded = measure.decode(stock.Stock(small, prompts), 40)
    assert decoded.tokens == stock.generated(small, prompts, 41)
    assert decoded.logits.shape == (41, 2, text.VOCAB_SIZE)
    assert min(len(set(row)) for row in decoded.tokens) > 20


def test_ours_decodes_the_tokens_of_stock(small, prompts):
    """Across the end of the window and of a C128 window, at position 128."""
    expected = measure.decode(stock.Stock(small, prompts), 8)
    patched = v4.patch(small, kv="fp32", precision="reference")
    try:
        decoded = measure.decode(ours.Ours(patched, prompts, 160), 8)
    finally:
        v4.unpatch(small)
    assert decoded.tokens == expected.tokens
    assert (decoded.logits - expected.logits).abs().max() < 1e-4


class Growing:
    """A side whose cache is a Python int: every step is another graph."""

    def __init__(self):
        self.prompts = torch.zeros(2, 1, dtype=torch.int64)
        self.length = 0

    @staticmethod
    def step(tokens, length):
        return torch.nn.functional.one_hot((tokens + length) % 5, 5).float()

    def start(self):
        self.length = 0
        return torch.eye(5)[:2]

    def arguments(self, tokens):
        self.length += 1
        return tokens, self.length


class Steady(Growing):
    """The same with a tensor: one graph."""

    def arguments(self, tokens):
        self.length += 1
        return tokens, torch.tensor(self.length)


def test_decoding_follows_the_arguments():
    assert measure.decode(Growing(), 3).tokens == [[0, 1, 3, 1], [1, 2, 4, 2]]


def test_graphs_of_a_step_with_tensors_only():
    found = measure.count_graphs(Steady(), 12, backend="eager")
    assert (found.graphs, found.breaks, found.recompiles, found.fails_at) == (1, 0, 0, None)
    assert found.tokens == measure.decode(Steady(), 12).tokens


@torch._dynamo.config.patch(specialize_int=True)
def test_a_step_that_recompiles_fails_at_torchs_limit_and_is_counted_beyond():
    said = []
    found = measure.count_graphs(Growing(), 12, backend="eager", progress=said.append)
    limit = torch._dynamo.config.recompile_limit
    assert (found.graphs, found.recompiles, found.breaks) == (12, 11, 0)
    assert (found.limit, found.fails_at) == (limit, limit + 1)
    assert found.tokens == measure.decode(Growing(), 12).tokens
    assert len(said) == 13


def test_speed_is_of_all_requests(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.tokens_per_second(Steady(), 23) == 2 * measure.CHUNK_STEPS


def test_an_attempt_keeps_the_error():
    assert measure.attempt(lambda: 3) == 3
    assert measure.attempt(lambda: {}["missing"]) == Failed("KeyError: 'missing'")


def test_a_package_that_does_not_load_says_how_its_process_ended(tmp_path):
    bad = tmp_path / "decode.pt2"
    bad.write_bytes(b"none")
    torch.save({"inputs": [torch.zeros(1)] * 4, "steps": 1}, tmp_path / "inputs.pt")
    with pytest.raises(RuntimeError, match=r"the process of the package ended with 1: \w"):
        ours.decode_in_process(bad, tmp_path / "inputs.pt")


@pytest.mark.parametrize("name", ["dsv4_ops", "transformers"])
def test_the_process_of_a_package_can_import_neither(name):
    code = (
        f"import runpy, sys; refuse = runpy.run_path({str(ours.RUNNER)!r})['Refuse']\n"
        f"sys.meta_path.insert(0, refuse)\nimport {name}"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"ImportError: {name} is not to be imported here" in ended.stderr


WORK = jobs.Work(torch.device("cpu"), 1, 8)


def test_a_job_whose_process_dies_has_failed(monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", shutil.which("false"))
    with jobs.Job("package", WORK, Progress()) as job:
        assert job.result() == Failed("RuntimeError: its process ended with 1")


def test_a_job_that_raises_prints_its_error(monkeypatch, capsys):
    def raises(*_):
        raise OSError("no compiler")

    monkeypatch.setitem(jobs.JOBS, "package", (raises, ours.Package))
    assert main(["demo", "--job=package", "--layers=1", "--steps=8", "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"error": "OSError: no compiler"}


def test_a_job_gives_its_result_and_the_clock_is_that_of_the_demo(capfd):
    """Stock's graphs of one window layer: one with a first cache, one with a longer one, ..."""
    with jobs.Job("count-stock", WORK, Progress(since=time.time() - 1000)) as job:
        found = job.result()
    expected = measure.decode(stock.Stock(WORK.model(), WORK.prompts()), WORK.steps)
    assert isinstance(found, Graphs)
    assert found.tokens == expected.tokens
    assert found.graphs == found.recompiles + 1 > 1
    assert re.search(r"\[10\d\d\.\d s\]   stock, step 1: 1 graphs", capfd.readouterr().err)


TOKENS = [[1, 2, 3], [4, 5, 6]]


def graphs(**changed):
    made = Graphs(
        backend="eager", graphs=1, breaks=0, recompiles=0, limit=8, fails_at=None, seconds=2.0,
        tokens=TOKENS,
    )  # fmt: skip
    return replace(made, **changed)


def fake_demo(**changed):
    """A demo in which all went as it should; ``changed`` are figures of ours."""
    theirs = table.Figures(
        tokens=TOKENS,
        eager_speed=12.34,
        compiled_speed=Unmeasured("a reason"),
        graphs=graphs(graphs=16, recompiles=15, fails_at=9),
        host_syncs=Unmeasured("needs a GPU"),
        cuda_graph=Captured([[1, 2, 2], [4, 5, 5]]),
        static_generate=Failed("KeyError: 'x'"),
        package=Failed("ValueError: Unsupported input type"),
    )
    good = table.Figures(
        tokens=TOKENS,
        eager_speed=7.0,
        compiled_speed=463.2,
        graphs=graphs(backend="inductor"),
        host_syncs=0.0,
        cuda_graph=Captured(TOKENS),
        static_generate=[[1, 2], [4, 5]],
        package=ours.Package(3.25, 100.4, TOKENS, []),
    )
    setting = table.Setting("CPU", 2, "2.13", "5.23", "0.1", 2, "The Zen", 100, 2, 2, 3)
    return table.Demo(setting, theirs, replace(good, **changed), 1.2e-5, 3.0)


def test_the_table_says_what_was_measured_and_what_was_not():
    assert table.rows(fake_demo()) == [
        ("compiled decode: graphs", "16 (eager, 2 s)", "1 (inductor, 2 s)"),
        ("  graph breaks", "0", "0"),
        ("  recompiles over 2 steps", "15", "0"),
        ("  at torch's recompile limit", "fails at step 9 (limit 8)", "runs (limit 8)"),
        ("host syncs per step", "not measured: needs a GPU", "0"),
        ("CUDA graph", "no: replayed, only 4 of 6 the same", "yes, 6 of 6 the same"),
        ("greedy tokens", "6 (reference)", "6 of 6 the same, logits within 1.2e-05"),
        ("  compiled", "6 of 6 the same", "6 of 6 the same"),
        ("tokens/s, eager", "12.3", "7"),
        ("tokens/s, compiled", "not measured: a reason", "463"),
        ("generate(cache_implementation='static')", "fails: KeyError", "4 of 4 the same"),
        ("torch.export and AOTInductor package", "fails: ValueError", "3.2 MB in 100 s"),
        ("  its tokens, in a process with torch only", "-", "6 of 6 the same"),
    ]


def test_the_table_is_followed_by_errors_in_full_and_the_setting():
    printed = table.render(fake_demo())
    assert "stock Hugging Face, package: ValueError: Unsupported input type" in printed
    assert "2 requests with prompts of 100 tokens, 'The Zen' and so on, 2 decode steps" in printed
    assert "torch 2.13, transformers 5.23, dsv4_ops 0.1" in printed
    assert not any(line != line.rstrip() for line in printed.splitlines())


WRONG = [[1, 2, 3], [4, 5, 7]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": WRONG}, "greedy tokens of eager decode differ from stock Hugging Face: "
         "only 5 of 6 the same"),
        ({"graphs": graphs(tokens=WRONG)}, "greedy tokens of compiled decode differ"),
        ({"cuda_graph": Captured(WRONG)}, "greedy tokens of the CUDA graph differ"),
        ({"static_generate": WRONG}, "greedy tokens of generate with a static cache differ"),
        ({"static_generate": [[], []]}, "generate with a static cache differ from stock Hugging "
         "Face: 0 of 0 the same, 4 expected"),
        ({"package": ours.Package(1, 1, WRONG, [])}, "greedy tokens of the AOTInductor package"),
        ({"package": Failed("CppCompileError: no g++")}, "package failed with CppCompileError: no"),
        ({"graphs": Failed("Unsupported: print")}, "compiled decode failed with Unsupported"),
        ({"compiled_speed": Failed("Error: x")}, "compiled_speed failed with Error: x"),
        ({"graphs": graphs(graphs=3)}, "decode compiled to 3 graphs, 0 breaks, not 1"),
        ({"host_syncs": 2.0}, "waits for the device 2 times, not 0"),
        ({"package": ours.Package(1, 1, TOKENS, ["dsv4_ops"])}, "process imported dsv4_ops"),
    ],
)  # fmt: skip
def test_what_ours_did_not_do_is_a_problem(changed, said):
    (problem,) = table.problems(fake_demo(**changed))
    assert said in problem
    assert table.as_json(fake_demo(**changed))["problems"] == [problem]


@pytest.mark.parametrize("difference", [1.1e-4, float("nan"), float("inf")])
def test_logits_beyond_the_promise_are_a_problem(difference):
    (problem,) = table.problems(replace(fake_demo(), logits_difference=difference))
    assert problem.startswith("logits differ from stock Hugging Face by")


@pytest.mark.parametrize("field", ["host_syncs", "cuda_graph", "package"])
def test_what_was_not_measured_is_no_problem(field):
    assert table.problems(fake_demo(**{field: Unmeasured("needs a GPU")})) == []


def test_all_measurements_are_json():
    found = json.loads(json.dumps(table.as_json(fake_demo())))
    assert found["ours"]["graphs"]["graphs"] == 1
    assert found["stock"]["host_syncs"] == {"reason": "needs a GPU"}
    assert found["table"][0]["stock"] == "16 (eager, 2 s)"


@pytest.mark.parametrize(("wrong", "status"), [({}, 0), ({"tokens": WRONG}, 1)])
def test_the_exit_status_says_whether_tokens_differ(monkeypatch, capsys, tmp_path, wrong, status):
    monkeypatch.setattr(run, "run", lambda *_, **__: fake_demo(**wrong))
    out = tmp_path / "new" / "demo.json"
    assert main(["demo", "--device", "cpu", "--out", str(out)]) == status
    printed = capsys.readouterr()
    assert ("differ from stock Hugging Face" in printed.err) == bool(status)
    assert "16 (eager, 2 s)" in printed.out
    assert json.loads(out.read_text())["setting"]["torch"] == "2.13"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "7"], "must be 8 to 4096, got 7"),
        (["--steps", "many"], "invalid"),
        (["--layers", "0"], "must be 1 to 61, got 0"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_options_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device must be one that torch sees, got cuda" in capsys.readouterr().err
    assert main(["demo", "--device", "tpu"]) == 2
    assert "--device must be auto, cpu or cuda, got 'tpu'" in capsys.readouterr().err


def test_a_long_task_says_that_it_goes_on():
    stream = io.StringIO()
    progress = Progress(since=time.time() - 100, every=0.01, stream=stream)
    with progress.during("a task"):
        time.sleep(0.2)
    first, *more = stream.getvalue().splitlines()
    assert first.startswith("[ 100.")
    assert first.endswith("s] a task")
    assert len(more) > 1
    assert all("still at it after 0 s: a task" in line for line in more)


@pytest.mark.slow
def test_the_demo_of_one_layer_from_end_to_end(tmp_path):
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "dsv4_ops", "demo", "--layers=1", "--steps=8"]
    ended = subprocess.run(
        [*command, "--device=cpu", f"--out={out}"], capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    mine = found["ours"]
    assert found["problems"] == []
    assert (mine["graphs"]["graphs"], mine["graphs"]["recompiles"]) == (1, 0)
    assert mine["package"]["tokens"] == mine["graphs"]["tokens"] == found["stock"]["tokens"]
    assert mine["package"]["imported"] == []
    assert mine["package"]["megabytes"] > 0
    assert found["stock"]["graphs"]["graphs"] > 1
    assert "s] ours: compile the decode step" in ended.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_demo_on_a_gpu(tmp_path):
    out = tmp_path / "demo.json"
    assert main(["demo", "--fast", "--steps=40", "--device=cuda", f"--out={out}"]) == 0
    found = json.loads(out.read_text())
    assert found["ours"]["host_syncs"] == 0
    assert found["ours"]["cuda_graph"]["tokens"] == found["stock"]["tokens"]
