"""The package of a whole decode step of DeepSeek-V3 in a C++ program linked to libtorch only."""

import subprocess

import pytest
import torch

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v3")

from dsv4_ops.integrations import transformers as hf
from dsv4_ops.testing.models import small_mla_model
from dsv4_ops.testing.text import prompts
from examples.demo import ours, stock
from tests.compile.test_export import build_cpp_runner, read_tensors, write_tensors

STEPS, LENGTH = 4, 62  # decodes cross a block of 64 rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly("test_package_runs_in_a_cpp_program, test_a_package_decodes"),
]


@torch.no_grad()
def test_a_program_in_cpp_decodes_as_hugging_face_does(tmp_path):
    """A dense layer and one of experts. The program leaves its caches in its inputs."""
    changed = {"num_hidden_layers": 2, "eos_token_id": None}
    ids = torch.tensor(prompts(2, LENGTH))
    expected = stock.generated(small_mla_model(**changed), ids, STEPS + 1)
    model = hf.patch(small_mla_model(**changed), kv="fp32", precision="reference")
    side = ours.Ours(model, ids, max_cache_len=LENGTH + STEPS)
    package = hf.export_decode(model, side.cache, path=tmp_path / "decode.pt2")
    runner = build_cpp_runner(tmp_path)
    best = side.start().argmax(-1)
    found = [best.tolist()]
    batch, _ = side.arguments(best)
    inputs = list(hf.decode_inputs(batch, side.cache))
    while len(found) <= STEPS:
        write_tensors(tmp_path / "inputs", inputs)
        subprocess.run([runner, package, tmp_path / "inputs", tmp_path / "outputs"], check=True)
        logits, *inputs = read_tensors(tmp_path / "outputs")
        inputs[0] = logits.argmax(-1)
        inputs[2] = inputs[2] + 1
        found.append(inputs[0].tolist())
    assert [list(row) for row in zip(*found, strict=True)] == expected
