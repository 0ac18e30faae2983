"""Tests of ops that need a GPU: run ``pytest -m gpu tests``."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_ops.attention.metadata import build_decode_metadata
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import build_package, compile_and_get_code, load_package
from dsv4_ops.testing.contract import checks
from tests.attention.test_metadata import assert_equal, decode, prefill
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, PAGED, agrees_when_sampled, graph_of
from tests.support.inductor_bugs import mended
from tests.support.metadata_batches import SPEC, random_inputs, tables_of
from tests.support.prefill_batches import GRAPHS, PREFILL


@pytest.mark.parametrize("name", OPS)
def test_contract_on_cuda(name):
    spec = OPS[name]
    checks.check_cases(spec, "cuda")
    checks.check_opcheck(spec, "cuda")
    checks.check_fake(spec, "cuda")
    with mended(name):
        compiled = checks.CompiledOps([spec], "cuda")
        compiled.check_cases()
        compiled.fuzz(200)
        checks.check_fusion(spec, "cuda")
        checks.check_cuda_graph(spec)


COMPRESSORS = ("save_compressor_states", "compress_and_insert", "save_and_compress")
OTHERS = (DECODE, PAGED, PREFILL, "apply_rope", "inverse_rope_group", "pack_seq", "unpack_seq")
OTHERS += ("inverse_rope_group_quantize", "qnorm_rope_kv_insert")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", [*COMPRESSORS, *OTHERS])
def test_sampled_calls_of_every_configuration(name, part):
    """Eager calls run our kernels, or those of torch, over NaN, infinities, adversarial slots and
    positions, plain layouts, one head, and empty tensors."""
    agrees_when_sampled(name, part, precise=name in COMPRESSORS)


def test_sampled_calls_of_a_reference_that_takes_half_a_second():
    agrees_when_sampled("insert_c4_step", 0, precise=True)


@pytest.mark.parametrize("build", [decode, prefill], ids=lambda build: build.__name__)
def test_metadata_replays_exactly_after_in_place_changes(build):
    """200 random batches are written into the captured inputs; results equal the CPU reference,
    without a host sync."""
    sizes = {"num_reqs": 16, "num_tokens": 67, "max_query": 4 if build is decode else 30}
    static = tuple(tensor.cuda() for tensor in random_inputs(0, **sizes))
    for tensor in static:
        torch._dynamo.mark_static_address(tensor)
    torch._dynamo.reset()
    compiled = torch.compile(build, fullgraph=True, options=GRAPHS)
    for _ in range(3):
        compiled(*static)
    for seed in range(200):
        inputs = random_inputs(seed, **sizes)
        for tensor, fresh in zip(static, inputs, strict=True):
            tensor.copy_(fresh)
        with batches.no_host_sync():
            result = compiled(*static)
        on_cpu = torch.utils._pytree.tree_map(lambda tensor: tensor.cpu(), result)
        assert_equal(on_cpu, build(*inputs))


def test_package_is_built_run_and_captured(tmp_path):
    """A package that is loaded single-threaded can be captured; replays read changed inputs."""

    def call(*inputs):
        return build_decode_metadata(SPEC, *inputs[:3], tables_of(inputs)).as_tuple()

    sizes = {"num_reqs": 9, "num_tokens": 31}
    static = tuple(tensor.cuda() for tensor in random_inputs(0, **sizes))
    package = build_package(checks.export_dynamic(call, static), tmp_path / "decode.pt2")
    for seed in range(5):
        inputs = random_inputs(seed, num_reqs=3 + seed, num_tokens=11 + 5 * seed)
        moved = tuple(tensor.cuda() for tensor in inputs)
        found = [x.cpu() for x in load_package(package)(*moved)]
        checks.assert_same("package", found, call(*inputs))
    run = load_package(package, run_single_threaded=True)
    graph, captured = graph_of(lambda: run(*static))
    for seed in range(50):
        inputs = random_inputs(seed, **sizes)
        for tensor, fresh in zip(static, inputs, strict=True):
            tensor.copy_(fresh)
        graph.replay()
        checks.assert_same("replay", [x.cpu() for x in captured], call(*inputs))


def test_decode_metadata_is_three_kernels():
    """One kernel is over tokens, one over window entries, and one over C128 entries."""
    torch._dynamo.reset()
    spec = dataclasses.replace(SPEC, max_model_len=32768)
    inputs = random_inputs(0, num_reqs=5, num_tokens=23, spec=spec)
    inputs = tuple(tensor.cuda() for tensor in inputs)

    def decode(*inputs):
        return build_decode_metadata(spec, *inputs[:3], tables_of(inputs))

    _, code = compile_and_get_code(torch.compile(decode, fullgraph=True, dynamic=True), *inputs)
    launches = [line for line in code.splitlines() if ".run(" in line and "triton" in line]
    assert len(launches) == 3, launches


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("name", OPS)
def test_adversarial_values_stay_in_bounds(name):
    """The compiled op runs under compute-sanitizer on adversarial inputs. The caching allocator is
    off, because it would hide reads out of bounds."""
    script = Path(__file__).parent / "sanitize.py"
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, str(script), name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert "sampled batches" in done.stdout
