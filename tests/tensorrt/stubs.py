"""Import torch-tensorrt, as ``.ci/tensorrt_stubs.py`` built it, in a process of its own.

This file replaces private names of torch and torch-tensorrt, so that one pinned version runs on a
machine without a GPU. Tests with it show tracing, lowering, partitioning and the checks of plugins.
No engine is built; the segments for engines run eagerly.
"""

import logging
import os
import sys
import types
from pathlib import Path

import torch

FOLDER = Path(
    os.environ.get("DSV4_OPS_TENSORRT_STUBS")
    or Path(__file__).resolve().parents[2] / "build" / "tensorrt_stubs"
)


def missing() -> str:
    """Return why the stubs cannot be used, or nothing."""
    if not (FOLDER / "complete").exists():
        return f"no stubs of TensorRT in {FOLDER}: `make tensorrt-stubs` builds them"
    pinned = (FOLDER / "complete").read_text().partition("==")[2][:4]
    if not torch.__version__.startswith(pinned):
        return f"the stubs are for torch {pinned}, this is {torch.__version__}"
    return ""


def install() -> None:
    """Import torch-tensorrt, once."""
    if "torch_tensorrt" not in sys.modules:
        sys.path.insert(0, str(FOLDER))
        torch.cuda.get_device_capability = lambda *device: (9, 0)
        torch.cuda.current_device = lambda: 0
        torch.cuda.mem_get_info = lambda *device: (2**36, 2**36)
        device = types.SimpleNamespace(name="stub", major=9, minor=0, total_memory=2**36)
        torch.cuda.get_device_properties = lambda *device_: device
        if not hasattr(torch._C, "_CudaDeviceProperties"):
            torch._C._CudaDeviceProperties = types.SimpleNamespace
    import tensorrt.plugin._lib
    import torch_tensorrt.dynamo._compiler as compiler

    logging.getLogger("torch_tensorrt").setLevel(logging.ERROR)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch_tensorrt") and hasattr(module, "to_torch_device"):
            module.to_torch_device = lambda device: torch.device("cpu")
    compiler.dryrun_stats_display = lambda *call: None
    tensorrt.plugin._lib._register_plugin_creator = lambda *call: None
