"""Inductor's caches become invalid if our sources change, and stay valid if they do not."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import dsv4_ops
from dsv4_ops.core.fingerprint import extend_cache_key, source_hash
from tests.support import forked

COMPILE = """
import torch, torch._dynamo.utils as utils
import dsv4_ops
def call(query_start_loc, seq_lens):
    return dsv4_ops.prefill_gather_lens(query_start_loc, seq_lens, window_size=4)
compiled = torch.compile(call, fullgraph=True)
print(compiled(torch.tensor([0, 2, 4]).int(), torch.tensor([9, 6]).int()).tolist())
counters = utils.counters
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print("hit" if hits else "miss", dsv4_ops.__file__)
"""


@pytest.fixture
def copied_package(tmp_path) -> Path:
    source = Path(dsv4_ops.__file__).parent
    shutil.copytree(source, tmp_path / "copy" / "dsv4_ops", ignore=lambda *_: ["__pycache__"])
    return tmp_path / "copy"


OTHER = """
from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import indices as reference

prefill_gather_lens = Decompose(
    lambda *args, **kwargs: reference.prefill_gather_lens(*args, **kwargs) * 100
)
"""
"""A lowering for an op that otherwise has the default of its kind."""


def compile_in_fresh_process(package: Path, cache: Path) -> tuple[str, str]:
    """Compile with this ``package`` first on the path; return the result, and "hit" or "miss"."""
    env = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = forked.python("-c", COMPILE, env=env, cwd=package)
    assert done.returncode == 0, done.stderr
    result, cached = done.stdout.strip().splitlines()
    word, path = cached.split()
    assert Path(path).is_relative_to(package)
    return result, word


@pytest.mark.nightly("test_providers_compiled.py finds cached code in other processes")
@pytest.mark.slow
def test_edited_lowering_is_a_miss_and_unedited_a_hit(copied_package, tmp_path):
    cache = tmp_path / "cache"
    assert compile_in_fresh_process(copied_package, cache) == ("[5, 5]", "miss")
    assert compile_in_fresh_process(copied_package, cache) == ("[5, 5]", "hit")
    lowering = copied_package / "dsv4_ops" / "lowering" / "indices.py"
    lowering.write_text(lowering.read_text() + OTHER)
    assert compile_in_fresh_process(copied_package, cache) == ("[500, 500]", "miss")


def test_tag_is_set_at_import_and_only_once():
    tag = f"dsv4_ops={dsv4_ops.__version__}:{source_hash()}"
    parts = torch.compiler.config.cache_key_tag.split(";")
    assert parts.count(tag) == 1
    extend_cache_key(dsv4_ops.__version__)
    assert torch.compiler.config.cache_key_tag.split(";").count(tag) == 1


def test_tag_keeps_what_the_user_put_there():
    with torch.compiler.config.patch(cache_key_tag="mine"):
        tag = extend_cache_key("1.2.3")
        assert torch.compiler.config.cache_key_tag == f"mine;{tag}"
