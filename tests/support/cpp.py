"""Run packages in a C++ program without Python: build the program, exchange tensors by files."""

import os
import struct
import subprocess
from pathlib import Path

import torch


def build_cpp_runner(folder: Path) -> Path:
    """Compile tests/cpp/run_package.cpp with g++ against the libtorch of the installed wheel."""
    root = Path(torch.__file__).parent
    standard = "c++20" if torch.__version__ >= "2.12" else "c++17"
    cuda = ["-ltorch_cuda", "-lc10_cuda"] if torch.version.cuda else []
    program = folder / "run_package"
    subprocess.run(
        [
            "g++",
            f"-std={standard}",
            "-O0",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{root}/include",
            f"-I{root}/include/torch/csrc/api/include",
            Path(__file__).parents[1] / "cpp" / "run_package.cpp",
            "-o",
            program,
            # without --no-as-needed the program lacks libtorch.so, which packages need
            "-Wl,--no-as-needed",
            *(f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", *cuda),
        ],
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": f"{root}/lib"},
    )
    return program


# in the same order as DTYPES in cpp/run_package.cpp
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float32)
DTYPES += (torch.float8_e4m3fn, torch.bool)


def write_tensors(path: Path, tensors) -> None:
    chunks = [struct.pack("<q", len(tensors))]
    for tensor in tensors:
        sizes = (DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape)
        values = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        chunks += [struct.pack(f"<{len(sizes)}q", *sizes), values]
    path.write_bytes(b"".join(chunks))


def read_tensors(path: Path) -> list[torch.Tensor]:
    data, tensors = bytearray(path.read_bytes()), []

    def ints(count: int) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{count}q", data)
        del data[: 8 * count]
        return values

    for _ in range(ints(1)[0]):
        dtype, rank = ints(2)
        sizes = ints(rank)
        numel = torch.Size(sizes).numel()
        values = torch.empty(0, dtype=DTYPES[dtype])
        if numel:
            values = torch.frombuffer(data, dtype=DTYPES[dtype], count=numel)
        tensors.append(values.reshape(sizes).clone())
        values = None
        del data[: numel * DTYPES[dtype].itemsize]
    return tensors
