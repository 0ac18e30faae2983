"""Requests through vLLM's engine on a CPU; ``make test-vllm`` runs these."""

import json
import subprocess
import sys

import pytest

from dsv4_ops.testing.checkpoint import write_checkpoint
from dsv4_ops.testing.models import small_model
from tests.vllm.checkpoints import write_drafting_v3, write_drafting_v4, write_v3, write_v4
from tests.vllm.engine import Report

pytest.importorskip("vllm", reason="make test-vllm has an environment with it")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
NGRAM |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
AOT_EAGER = {"enforce_eager": False, "additional_config": {"dsv4_ops": {"backend": "aot_eager"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a small V4 and V3 in float32, and a V4 in FP8 and FP4."""
    path = tmp_path_factory.mktemp("models")
    write_checkpoint(path / "released")
    small_model().save_pretrained(path / "saved")
    made = {"v4": write_v4(path / "v4"), "v3": write_v3(path / "v3")}
    return made | {name: path / name for name in ("released", "saved")}


def in_process(module, settings):
    """Run a module that starts an engine; return the last JSON line that it prints."""
    command = [sys.executable, "-m", module, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("{", "[["))][-1]


def serve(path, **settings):
    """Run requests in an engine."""
    report = Report(**json.loads(in_process("tests.vllm.engine", {"path": str(path), **settings})))
    print(report)
    assert report.wrong == 0  # all answered tokens are greedy
    return report


SHARES = {"shared": True, "enable_prefix_caching": True}
DRAFTS = {"count": 10, "speculative_config": NGRAM, **SHARES}
COMPILED = {"count": 10, "enforce_eager": False, **SHARES}
FEW = {"count": 8, "new": 150, "short": True, "max_model_len": 512, "num_gpu_blocks_override": 120}
CASES = {
    "whole prefills": ("v4", {"max_num_batched_tokens": 1024}, {}),
    "a folder of save_pretrained": ("saved", {"count": 4, "max_num_batched_tokens": 1024}, {}),
    "chunks of 64 tokens": ("v4", {}, {"steps": 80}),
    "requests that lose their blocks": ("v4", FEW, {"preempted": 0}),
    "prefixes that others fill in the same step": ("v4", SHARES, {"cached": 5000}),
    "drafts by n-grams": ("v4", DRAFTS, {"drafted": 0}),
    "v3": ("v3", {"count": 10, "block_size": 64, **SHARES}, {"cached": 1000}),
    "compiled as by default": ("v4", COMPILED, {"graphs": 11}),
}


@pytest.mark.parametrize("case", CASES)
def test_requests_get_the_logprobs_of_a_step_alone(folders, case):
    """With Inductor, which compiles before the first request, a case takes five minutes."""
    version, settings, least = CASES[case]
    report = serve(folders[version], **settings)
    assert report.error <= (2e-5 if settings is COMPILED else 1e-5)  # Inductor sums in other orders
    assert all(getattr(report, name) > value for name, value in least.items())


@pytest.mark.parametrize("version", ["v4", "v3"])
def test_compiled_steps_leave_every_byte_of_the_pool_as_eager_steps_do(folders, version):
    settings = {"shared": True, "enable_prefix_caching": True, "num_gpu_blocks_override": 300}
    settings |= {"count": 6, "new": 8} | ({"block_size": 64} if version == "v3" else {})
    eager = serve(folders[version], **settings)
    settings |= AOT_EAGER
    report = serve(folders[version], **settings)
    assert report.pool == eager.pool
    assert report.graphs == {"v4": 12, "v3": 8}[version]
    assert (eager.graphs, report.late) == (0, eager.late)  # vLLM compiles one graph of its own
    assert report.error <= 1e-5


RELEASED = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "enable_prefix_caching": True}


@pytest.mark.parametrize(
    ("count", "settings", "error"),
    [(10, {}, 0.02), (6, {**AOT_EAGER, "num_gpu_blocks_override": 300, "near": 0.1}, 0.2)],
)
def test_a_released_folder_is_served_from_fp8_and_fp4(folders, count, settings, error):
    """In bfloat16 a chunk rounds differently from a whole prompt, and a graph from eager code; both
    are as far from float32: ``test_compiled_fp8_is_as_close_to_float32_as_eager``."""
    report = serve(folders["released"], count=count, shared=True, **RELEASED, **settings)
    assert report.error <= error
    assert (report.graphs > 12) == bool(settings)
    assert report.late <= 1  # a graph of vLLM's own; layers of a kind are in two groups of windows


WHOLE = {"enable_prefix_caching": True, "max_num_batched_tokens": 5120}
# AOT_EAGER copies all blocks in every op; whole prompts, so that no cached prefix is in chunks
DRAFTING = {"compiled": {**WHOLE, **AOT_EAGER, "num_gpu_blocks_override": 2500}}
DRAFTING |= {"whole prompts": WHOLE, "chunks of 64 tokens": {}}


@pytest.mark.parametrize("case", DRAFTING)
@pytest.mark.parametrize("version", ["v4", "v3"])
def test_drafts_by_the_own_layer_are_those_of_a_step_alone(folders, version, case, tmp_path):
    """Steps in float32 have two drafts."""
    settings = dict(DRAFTING[case])
    if version == "v4":
        path = write_drafting_v4(tmp_path, folders["released"])
    else:
        path, settings["block_size"] = write_drafting_v3(tmp_path), 64
    settings |= {"path": str(path), "count": 6, "new": 8}
    seen = json.loads(in_process("tests.vllm.drafts", settings))
    print(seen)
    assert seen["error"] <= 1e-5
    assert (seen["wrong"], seen["others"]) == (0, 0)
    assert seen["drafts"] > 30
    assert seen["cached" if DRAFTING[case] else "chunks"] > 0


@pytest.mark.parametrize(
    ("version", "examples", "settings"),
    [
        ("v4", 12, {"speculative_config": NGRAM}),
        ("v4", 6, AOT_EAGER),
        ("v3", 12, {"block_size": 64}),
    ],
)
def test_requests_that_come_and_leave_at_any_time(folders, version, examples, settings):
    """Samples have few blocks, shared prefixes, and chunks."""
    settings = {"path": str(folders[version]), "examples": examples, **settings}
    seen = json.loads(in_process("tests.vllm.sampled", settings))
    print(seen)
    assert seen["requests"] > 2 * examples
    assert seen["cached"] > 0
    assert seen["left"] > 0


@pytest.mark.parametrize(("version", "settings"), [("v4", {}), ("v3", {"block_size": 64})])
def test_two_ranks_split_experts_and_dense_layers(folders, version, settings):
    """Ranks use gloo, repeat the attention, and each store all caches."""
    answers = []
    for ranks in (1, 2):
        given = {"path": str(folders[version]), "tensor_parallel_size": ranks, **settings}
        answers.append(json.loads(in_process("tests.vllm.ranks", given)))
    for alone, split in zip(*answers, strict=True):
        assert [token for token, _ in split] == [token for token, _ in alone]
        assert [said for _, said in split] == pytest.approx([said for _, said in alone], abs=1e-5)
