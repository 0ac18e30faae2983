"""Prefill and decode as AOTInductor packages, and a C++ program that generates with them.

``export_prefill`` and ``export_decode`` each compile a patched Hugging Face model into a file.
The C++ program ``aoti_runner/`` links libtorch only. It reads the list of tensors from the files,
makes the caches, runs the prompts in chunks with the prefill package, generates with the decode
package, and prints greedy tokens, which this script compares with Hugging Face's unpatched model.

    python examples/04_aoti_export.py                        # two minutes or three
    python examples/04_aoti_export.py --package decode.pt2 --prefill prefill.pt2
                                               # uses these files, or writes them
    build/aoti_runner --prefill prefill.pt2 decode.pt2 16 "Beautiful is"   # needs no Python
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from dsv4_ops.cli.options import bounded_int
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.text import ByteTokenizer

SOURCE = Path(__file__).parent / "aoti_runner"
PROMPTS = ("Beautiful is better than ugly.", "In the face of ambiguity,")
REQUESTS, MAX_LEN = 2, 512  # sizes of the packages
MAX_TOKENS = 32  # maximum tokens of a prefill step: the prompts take two steps


def export(step: str, path: Path, device: str) -> None:
    """Compile the package of a step, unless it exists."""
    if path.exists():
        print(f"{path} is there: used as it is", flush=True)
        return
    print(f"exporting and compiling the {step} step: a minute or two", flush=True)
    begun = time.perf_counter()
    model = v4.patch(small_model(device=device), kv="fp32", precision="reference")
    cache = v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=MAX_LEN)
    if step == "prefill":
        v4.export_prefill(model, cache, path=path, max_tokens=MAX_TOKENS)
    else:
        v4.export_decode(model, cache, path=path)
    size, seconds = path.stat().st_size / 1e6, time.perf_counter() - begun
    print(f"{path}: {size:.1f} MB, the weights among them, after {seconds:.0f} s", flush=True)


def build(folder: Path) -> Path:
    """Build the C++ program with CMake, or directly with the compiler."""
    print("building aoti_runner", flush=True)
    return (shutil.which("cmake") and build_with_cmake(folder)) or build_directly(folder)


def build_with_cmake(folder: Path) -> Path | None:
    """Build with CMake; return None if that fails, as with a CUDA build of torch but no nvcc."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", SOURCE, "-B", folder, prefix], ["cmake", "--build", folder]):
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            print("CMake fails, the compiler is called directly:", *ended.stderr.splitlines()[:3])
            return None
    return folder / "aoti_runner"


def build_directly(folder: Path) -> Path:
    """Build with the compiler and the installed torch's headers and libraries."""
    root, program = Path(torch.__file__).parent, folder / "aoti_runner"
    libraries = ["torch", "torch_cpu", "c10"]
    libraries += ["torch_cuda", "c10_cuda"] if torch.version.cuda else []
    command = [
        os.environ.get("CXX", "c++"), "-std=c++20", "-O1", SOURCE / "main.cpp", "-o", program,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include",
        # without --no-as-needed the program lacks libtorch.so, which the package needs
        "-Wl,--no-as-needed", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib",
        *(f"-l{name}" for name in libraries),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "LD_LIBRARY_PATH": f"{root}/lib"})
    return program


def generate(program: Path, prefill: Path, package: Path, count: int) -> list[list[int]]:
    """Return the greedy tokens of every prompt from the C++ program."""
    command = [program, "--prefill", prefill, package, str(count), *PROMPTS]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    print("aoti_runner:", ended.stderr.strip().replace("\n", ", "), flush=True)
    return [[int(token) for token in line.split()] for line in ended.stdout.splitlines()]


@torch.no_grad()
def differing(found: list[list[int]]) -> int:
    """Count the tokens that differ from Hugging Face's model, which computes each text in one
    call."""
    model, wrong = small_model(), 0
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = ByteTokenizer().encode(prompt, bos=True) + tokens
        best = model(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
        pairs = zip(best[-len(tokens) - 1 : -1], tokens, strict=True)
        wrong += sum(hf != ours for hf, ours in pairs)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, help="where the decode is, or is to be")
    parser.add_argument("--prefill", type=Path, help="where the prefill is, or is to be")
    parser.add_argument("--build", type=Path, help="where to build the C++ program")
    parser.add_argument(
        "--tokens",
        type=bounded_int(1, MAX_LEN - max(map(len, PROMPTS)) - 1),
        default=16,
        help="to generate per prompt",
    )
    parser.add_argument("--direct", action="store_true", help="call the compiler, without CMake")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        package = args.package or Path(temporary) / "decode.pt2"
        prefill = args.prefill or Path(temporary) / "prefill.pt2"
        folder = args.build or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        export("prefill", prefill, args.device)
        export("decode", package, args.device)
        program = build_directly(folder) if args.direct else build(folder)
        linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        found = generate(program, prefill.resolve(), package.resolve(), args.tokens)
    wrong = differing(found)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        print(f"{prompt!r} goes on with {tokens}")
    if wrong or [len(tokens) for tokens in found] != [args.tokens] * len(PROMPTS):
        print(f"FAILED: {wrong} tokens are not those of Hugging Face")
        return 1
    if "libtorch_cpu" not in linked or "libpython" in linked or "torch_python" in linked:
        print(f"FAILED: the program is linked to\n{linked}")
        return 1
    print(
        f"shown: a C++ program linked to libtorch, not to Python, generates the {args.tokens} "
        f"tokens that Hugging Face does, for each of {len(PROMPTS)} prompts in one ragged batch, "
        "after a prefill of both in chunks"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
