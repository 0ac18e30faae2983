"""Kernels in a file of parts get the file names that this process looks for."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.compiler.config as compiler_config

from dsv4_ops.integrations.transformers.compile_cache import kernel_files
from dsv4_ops.integrations.transformers.compile_cache.precompiled import PartsFile
from dsv4_ops.lowering import _compat, workers

SETTINGS = {"fullgraph": True, "dynamic": False}


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """Write a file of parts for one folder of compiled code, and read it for another folder."""

    def move(name):
        monkeypatch.setattr(kernel_files, "code_folder", lambda: tmp_path / "first")
        PartsFile(tmp_path / "step.cache", SETTINGS).write(None)
        monkeypatch.setattr(kernel_files, "code_folder", lambda: tmp_path / name)
        PartsFile(tmp_path / "step.cache", SETTINGS)
        return tmp_path / name

    return move


def tuned_path(source, tag):
    with compiler_config.patch(cache_key_tag=tag):
        return _compat.AutotuneCache.create({}, str(source), "").local_cache[1]


def test_what_workers_tuned_has_the_name_that_other_processes_look_for(tmp_path, moved):
    """Workers store results without the cache tag; a file whose name has the tag has priority."""
    source = tmp_path / "first" / "ab" / "abc.py"
    source.parent.mkdir(parents=True)
    source.write_text("kernel")
    plain, tagged = tuned_path(source, ""), tuned_path(source, compiler_config.cache_key_tag)
    assert plain != tagged
    Path(plain).write_text("by a worker")
    assert not Path(tagged).exists()
    for tag in ("", compiler_config.cache_key_tag):
        there = tuned_path(moved("second") / "ab" / "abc.py", tag)
        assert Path(there).read_text() == "by a worker"
    Path(tagged).write_text("by this process")
    (tmp_path / "step.cache").unlink()
    there = tuned_path(moved("third") / "ab" / "abc.py", compiler_config.cache_key_tag)
    assert Path(there).read_text() == "by this process"


def test_kernels_of_triton_and_launchers_move_with_their_paths(tmp_path, monkeypatch, moved):
    pytest.importorskip("triton", reason="published for Linux only")
    from triton.runtime.cache import _base32

    from dsv4_ops.kernels.experts import plan

    folders = {name: tmp_path / f"triton {name}" for name in ("first", "second")}
    held = folders["first"] / _base32(bytes(range(32)).hex())
    other = folders["first"] / "LAUNCHER"
    for folder in (held, other, folders["first"] / "OF_ANOTHER_PACKAGE"):
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(b"code")
        (folder / "kernel.ptx").write_text("text")
    (held / "__grp__kernel.json").write_text(f'{{"kernel.cubin": "{held}/kernel.cubin"}}')
    (other / "launcher.so").write_bytes(b"a library")
    made = SimpleNamespace(hash=bytes(range(32)).hex())
    caches = {0: ({"a call": made}, {}, None, None, None)}
    monkeypatch.setattr(plan.expert_plan_kernel, "device_caches", caches)
    monkeypatch.setattr(kernel_files, "triton_folder", lambda: current[0])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders["first"]))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    current = [folders["first"]]
    PartsFile(tmp_path / "step.cache", SETTINGS).write(None)
    current[0] = folders["second"]
    PartsFile(tmp_path / "step.cache", SETTINGS)
    found = {path.relative_to(folders["second"]).as_posix() for path in current[0].rglob("*.*")}
    names = ("kernel.cubin", "__grp__kernel.json")
    launcher = {"LAUNCHER/kernel.cubin", "LAUNCHER/launcher.so"}
    assert found == {f"{held.name}/{name}" for name in names} | launcher
    text = (folders["second"] / held.name / "__grp__kernel.json").read_text()
    assert text == f'{{"kernel.cubin": "{folders["second"] / held.name}/kernel.cubin"}}'


def test_triton_names_and_stores_its_files_as_inductors_workers_do(tmp_path, monkeypatch):
    """With other names or folders, processes would compile the workers' kernels again."""
    pytest.importorskip("triton", reason="published for Linux only")
    from triton.backends.nvidia.compiler import get_ptxas_version

    from dsv4_ops.kernels.common.triton_compat import cache_folder

    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.9, V13.9.1\n")
    tool.chmod(0o755)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    before = get_ptxas_version(80)

    def set_path():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(tool))

    monkeypatch.setattr(_compat, "set_ptxas_path", set_path)
    kernel_files.agree_with_workers()
    assert get_ptxas_version(80) == before  # without a GPU there are no kernels
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    del os.environ["TRITON_CACHE_DIR"]
    try:
        workers.compile_workers()
        assert cache_folder() == f"{kernel_files.code_folder()}/triton/0"  # for all GPUs
        kernel_files.agree_with_workers()
        assert "V13.9.1" in get_ptxas_version(80)
    finally:
        os.environ.pop("TRITON_PTXAS_PATH", None)
        get_ptxas_version.cache_clear()
