"""The libraries of the baselines' bundle, under the names of ``impl=``, for GPU tests."""

import os
import tempfile

import pytest
import torch

from dsv4_ops.dispatch import choice, libraries
from tests.gpu.test_cache import BASELINES, anchor_lib

BUILD = BASELINES.resolve() / "_flashmla_C.abi3.so"


@pytest.fixture
def found(monkeypatch):
    """Return the bundle's libraries, found through the environment variables that users set."""
    monkeypatch.setenv("DSV4_OPS_FLASH_MLA", str(BUILD))
    monkeypatch.setenv("DSV4_OPS_DEEP_GEMM", str(BASELINES.resolve()))
    home = anchor_lib().find_cuda_home()
    if home:
        monkeypatch.setenv("CUDA_HOME", home)
    cache = os.path.join(tempfile.gettempdir(), f"dg_jit_{os.getuid()}")
    os.environ.setdefault("DG_JIT_CACHE_DIR", cache)
    for cached in (choice.unusable, libraries.load, libraries.find_name):
        cached.cache_clear()  # forget results from tests without these variables
    torch._dynamo.reset()
