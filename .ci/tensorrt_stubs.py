"""Install torch-tensorrt without TensorRT, for tests that build no engine.

    python .ci/tensorrt_stubs.py FOLDER

PyPI has torch-tensorrt and TensorRT's Python bindings, but not TensorRT's libraries. FOLDER gets
the two wheels, at pinned versions and without dependencies, and libraries whose nine functions do
nothing, but no C++ code of torch-tensorrt, which is linked to CUDA. With FOLDER (see
``tests/tensorrt/stubs.py``), graphs are traced, lowered and partitioned, but no engine is built.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("torch_tensorrt==2.13.0", "tensorrt-cu13-bindings==11.0.0.114", "dllist==2.0.0")
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
TENSORRT = """import tensorrt_bindings
from tensorrt_bindings import *
from tensorrt_bindings import __version__

__path__ += tensorrt_bindings.__path__  # has tensorrt.plugin
"""
LIBS = """import ctypes
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("*.so.*")):
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
"""


def build(folder: Path) -> None:
    """Install everything into ``folder``, unless ``folder`` is complete."""
    done = folder / "complete"
    if done.exists() and done.read_text() == " ".join(PACKAGES):
        return
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *PACKAGES], check=True)
    for pattern in ("_C*.so", "lib/*.so"):
        for path in (folder / "torch_tensorrt").glob(pattern):
            path.unlink()
    for name, text in (("tensorrt", TENSORRT), ("tensorrt_libs", LIBS)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    with tempfile.NamedTemporaryFile("w", suffix=".c") as source:
        source.write("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
        source.flush()
        for name in LIBRARIES:
            soname = f"lib{name}.so.11"
            linker = ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
            target = str(folder / "tensorrt_libs" / soname)
            subprocess.run(["cc", *linker, "-o", target, source.name], check=True)
    done.write_text(" ".join(PACKAGES))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"torch-tensorrt without TensorRT in {sys.argv[1]}")
