"""Requests through vLLM's engine on a GPU, in its CUDA graphs, which contain the metadata of a
step. ``.ci/vllm_bundle.py`` packs vLLM for a machine without a package index."""

import pytest

pytest.importorskip("vllm", reason=".ci/vllm_bundle.py brings it")

from tests.vllm.checkpoints import write_v3, write_v4
from tests.vllm.test_engine import serve

SHARED = {"count": 40, "new": 40, "shared": True, "enable_prefix_caching": True}
FEW = {
    "v4": {"num_gpu_blocks_override": 160},
    "v3": {"num_gpu_blocks_override": 24, "block_size": 64},
}
"""With too few blocks, some requests are preempted."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small V4 and V3 in float32."""
    path = tmp_path_factory.mktemp("models")
    return {"v4": write_v4(path / "v4"), "v3": write_v3(path / "v3")}


def graphs(cudagraph_mode, mode=0):
    """Return settings of vLLM's CUDA graphs; ``mode`` 3 also runs ``torch.compile``."""
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    return {"mode": mode, "cudagraph_mode": cudagraph_mode, **sizes}


@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("version", "mode"),
    [("v4", "NONE"), ("v4", "FULL_DECODE_ONLY"), ("v4", "FULL"), ("v3", "FULL")],
)
def test_answers_are_those_of_a_step_alone(folders, version, mode, runner, monkeypatch):
    """40 requests run in chunks; some share blocks that the step fills, some are preempted."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    settings = {**SHARED, **FEW[version], "enforce_eager": mode == "NONE"}
    settings |= {"compilation_config": graphs(mode)} if mode != "NONE" else {}
    report = serve(folders[version], **settings)
    assert report.error <= 1e-4
    assert report.cached > 1000
    assert report.preempted > 0
    assert (report.captured > 0) == (mode != "NONE")
    if mode == "FULL":
        assert report.eager == 0
    if mode == "FULL_DECODE_ONLY":
        assert 0 < report.eager < report.steps


def test_compiled_steps_in_cuda_graphs(folders):
    """Inductor compiles the steps, as vLLM does by default."""
    settings = {**SHARED, **FEW["v4"], "enforce_eager": False}
    report = serve(folders["v4"], **settings, compilation_config=graphs("FULL", mode=3))
    assert report.error <= 1e-4
    assert report.graphs > 12
    assert report.eager == 0
