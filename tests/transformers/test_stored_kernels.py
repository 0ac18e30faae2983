"""Triton finds kernels that a file of parts brought to an empty folder."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.integrations.transformers.compile_cache import kernel_files
from tests.kernels.test_precompile import jobs_of_a_new_process
from tests.support.hopper import hopper  # noqa: F401  # a fixture


@pytest.mark.usefixtures("hopper")
def test_triton_finds_a_stored_kernel(tmp_path, monkeypatch):
    """Files of a kernel that launches do not read are not stored, and its group lacks them."""
    asked, stored = [], {}
    monkeypatch.setattr(kernel_files, "triton_folder", lambda: Path(os.environ["TRITON_CACHE_DIR"]))
    for folder in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        kernel_files.put(stored)
        asked.append(jobs_of_a_new_process())
        stored = dict(kernel_files._of_triton())
    assert asked == [1, 0]
