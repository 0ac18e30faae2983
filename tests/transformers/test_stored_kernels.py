"""Triton finds kernels that a file of parts brought to an empty folder."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.dispatch.kernel_requests import kernel_requests
from dsv4_ops.integrations.transformers.compile_cache import kernel_files
from dsv4_ops.kernels import precompile
from dsv4_ops.kernels.kv_cache import plain
from tests.kernels.test_precompile import first
from tests.support.hopper import Workers, hopper  # noqa: F401  # a fixture


@pytest.mark.usefixtures("hopper")
def test_triton_finds_a_stored_kernel(tmp_path, monkeypatch):
    """Files of a kernel that launches do not read are not stored, and its group lacks them."""
    kernel, asked, stored = plain.insert_rows_kernel, [], {}
    monkeypatch.setattr(kernel_files, "triton_folder", lambda: Path(os.environ["TRITON_CACHE_DIR"]))
    for folder in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        vars(kernel).pop("_do_compile", None)  # like a new process
        kernel.device_caches.clear()
        kernel_files.put(stored)
        workers = Workers()
        with precompile.requests(workers.submit):
            first()
        asked.append(len(workers.asked))
        with kernel_requests(precompile.REQUESTED):
            first()
        stored = dict(kernel_files._of_triton())
    assert asked == [1, 0]
