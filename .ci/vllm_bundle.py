"""Pack vLLM 0.33's Python files, for a GPU machine without a package index or for a CPU.

    python .ci/vllm_bundle.py .probe/vllm.tar.xz

A machine with Python 3.12, PyTorch and transformers can import vLLM after ``tar -xf
.probe/vllm.tar.xz -C FOLDER`` and ``export PYTHONPATH=FOLDER:$PWD``: the engine, scheduler,
sampler, CUDA graphs and Triton kernels. Patched models need no other kernel of vLLM. ``KERNELS``
replaces vLLM's compiled library, so vLLM's own models do not run.

    python .ci/vllm_bundle.py build/vllm .venv-vllm

makes a folder with the CPU kernels from the environment of ``make test-vllm``. To test with it:
``VLLM_TARGET_DEVICE=cpu PYTHONPATH=build/vllm make test-vllm``.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
VLLM = f"vllm=={VERSION}"
LEFT_OUT = ("third_party/fmha_sm100", "third_party/deep_gemm", "third_party/tml_fa4", "vllm-rs")
"""Folders and files that need a compiler, or a larger machine than one GPU."""

NEEDS = """
aiohappyeyeballs aiohttp aiosignal annotated-types apache-tvm-ffi attrs blake3 cachetools cbor2
cloudpickle compressed-tensors==0.17.0 einops fastapi<0.137 frozenlist httpcore2 httpx2 jiter
llguidance>=1.7,<1.8 loguru msgspec multidict openai>=2.25 orjson oss-harmony partial-json-parser
prometheus_client propcache py-cpuinfo pybase64 pydantic==2.14.4 pydantic-core==2.50.5
pydantic-extra-types python-multipart pyzmq setproctitle sniffio starlette truststore
typing-extensions typing-inspection uvloop xgrammar==0.2.8 yarl
"""
"""Packages that ``from vllm import LLM`` imports, without those of PyTorch and transformers."""

KERNELS = """
import torch

_lib = torch.library.Library("_C", "FRAGMENT")


def _op(schema):
    def define(function):
        _lib.define(schema)
        _lib.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")

    return define


@_op("cutlass_scaled_mm_supports_fp8(int capability) -> bool")
def _(capability):
    return False


@_op("cutlass_scaled_mm_supports_block_fp8(int capability) -> bool")
def _(capability):
    return False


@_op("weak_ref_tensor(Tensor(a) input) -> Tensor(a)")
def _(input):
    return input.view_as(input)


class _Pinned:
    def __init__(self, tensor):
        kind = tensor.numpy().__array_interface__["typestr"]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": kind,
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


@_op("get_cuda_view_from_cpu_tensor(Tensor input) -> Tensor")
def _(input):
    return torch.as_tensor(_Pinned(input), device="cuda") if input.numel() else input.cuda()
"""
"""PyTorch code for the functions that vLLM's engine calls in its library of CUDA kernels."""

ENTRY_POINT = "[vllm.general_plugins]\ndsv4_ops = dsv4_ops.integrations.vllm:register\n"


def main(target: Path, environment: Path | None = None) -> None:
    """Write the archive, or a folder with the kernels of ``environment``."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder, "wheels")
        site = Path(folder, "site") if environment is None else target
        _pip("download", "--dest", wheels, VLLM)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as source:
            left_out = tuple(f"vllm/{name}" for name in LEFT_OUT)
            names = (name for name in source.namelist() if not name.endswith((".so", ".cuh", ".h")))
            source.extractall(site, (name for name in names if not name.startswith(left_out)))
        if environment is not None:
            for library in environment.glob("lib/*/site-packages/vllm/*.so"):
                shutil.copy(library, site / "vllm")
            (metadata,) = site.glob("vllm-*/METADATA")
            metadata.write_text(metadata.read_text().replace(VERSION, f"{VERSION}+cpu", 1))
            return
        _pip("install", "--no-compile", "--target", site, *NEEDS.split())
        Path(site, "vllm/_C_stable_libtorch.py").write_text(KERNELS)
        Path(site, "vllm/vllm_flash_attn/_vllm_fa2_C.py").write_text("")
        plugin = Path(site, "dsv4_ops-0.dist-info")
        plugin.mkdir()
        Path(plugin, "METADATA").write_text("Metadata-Version: 2.1\nName: dsv4_ops\nVersion: 0\n")
        Path(plugin, "entry_points.txt").write_text(ENTRY_POINT)
        for unused in (*site.rglob("__pycache__"), site / "bin"):
            shutil.rmtree(unused, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(target, "w:xz") as packed:
            packed.add(site, ".")
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")


def _pip(*arguments: object) -> None:
    """Run pip for the GPU machine's Python."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)]
    python = ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3"]
    python += ["--abi=none", "--no-deps", "--only-binary=:all:", "--platform=manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", arguments[0], "-q", *python, *platforms]
    subprocess.run([*map(str, command), *map(str, arguments[1:])], check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
