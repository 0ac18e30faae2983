"""A simulated H100, which launchers and Triton ask for properties before a launch."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Hopper:
    """A driver without a GPU, which tells Triton the compile target."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Simulate one H100 for launchers and Triton, with an empty folder of compiled kernels."""

    class Properties:
        multi_processor_count = 132

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    monkeypatch.setattr(driver, "_active", Hopper())


class Workers:
    """A pool that runs a job when the caller waits for the job."""

    def __init__(self):
        self.asked, self.urgent, self.ran = [], [], 0

    def submit(self, function, content, urgent=True):
        self.asked.append(content)
        self.urgent.append(urgent)

        def wait():
            self.ran += 1
            function(content)

        return wait


def on_cuda(value):
    """Return a fake tensor like ``value`` on the GPU; call this under ``FakeTensorMode``."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
