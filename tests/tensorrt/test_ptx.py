"""PTX of plugins: its parameters, its requirements, and on a GPU its results."""

import ctypes
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch

from dsv4_ops.integrations.tensorrt import ptx
from tests.support import forked

pytest.importorskip("triton", reason="published for Linux only")

HAND = """.version 8.0
.visible .entry copy(
	.param .u64 copy_param_0,
	.param .u32 copy_param_1,
	.param .u64 copy_param_2,
	.param .u64 copy_param_3
)
{
	ld.param.u64 	%rd1, [copy_param_0];
	ld.param.u32 	%r1, [copy_param_1];
}
"""

INTERPRETED = """
import torch
from dsv4_ops.integrations.tensorrt.kernels import apply_rope_kernel
from dsv4_ops.reference.rope import apply_rope

torch.manual_seed(0)
positions, table = torch.tensor([0, 7, -1, 16, 15]), torch.randn(16, 64)
for dtype in (torch.float32, torch.bfloat16):
    for inverse in (False, True):
        x = torch.randn(5, 3, 128).to(dtype)
        out = torch.empty_like(x)
        settings = {"DIM": 128, "ROPE": 64, "INVERSE": inverse}
        apply_rope_kernel[15,](x, positions, table, 3, 16, out, **settings)
        assert torch.equal(out, apply_rope(x, positions, table, inverse=inverse)), (dtype, inverse)
print("equal")
"""

COMBINED = """
import torch
from dsv4_ops.integrations.tensorrt.plugins import combine_options
from dsv4_ops.integrations.tensorrt.kernels import combine_topk_swa_kernel
from dsv4_ops.reference.indices import combine_topk_swa_indices

positions = torch.tensor([7, 0, -1, 300, 2**31 - 2, 2**31 - 1, 40, 41])
requests = torch.tensor([0, 1, 0, 2, 1, 0, -1, 3]).int()
lens, gathered = torch.tensor([9, 1, 301]).int(), torch.tensor([5, 1, 130]).int()
topk = torch.randint(-3, 30, (8, 5), generator=torch.Generator().manual_seed(0)).int()
for rows, offset in ((20, 8), (300, 100), (2**30, 8)):
    settings = {"window_size": 128, "compress_ratio": 4, "topk": 3}
    settings |= {"workspace_rows": rows, "swa_offset": offset}
    options = combine_options(**settings)
    found = torch.empty(8, options["WIDTH"]).int(), torch.empty(8).int()
    inputs = (topk, positions, requests, lens, gathered)
    combine_topk_swa_kernel[8,](*inputs, 5, 3, *found, **options)
    wanted = combine_topk_swa_indices(*inputs, **settings)
    assert all(map(torch.equal, found, wanted)), (rows, offset)
print("equal")
"""

SCORED = """
import torch
from dsv4_ops.integrations.tensorrt.plugins import logits_options
from dsv4_ops.integrations.tensorrt.kernels import indexer_logits_kernel
from dsv4_ops.reference.indexer import indexer_logits
from tests.tensorrt.test_ptx import plain_scores

for dtype, heads, rows in ((torch.bfloat16, 3, 70), (torch.float32, 16, 33), (torch.float32, 1, 1)):
    inputs, settings = plain_scores(dtype, heads), {"num_rows": rows, "block_size": 4}
    out = torch.full((6, rows), 7.0)
    options = logits_options(dtype, heads, 128, **settings)
    grid = 6 * -(-rows // options["ROWS"])
    indexer_logits_kernel[grid,](*inputs, 3, 20, 50, out, **options)
    wanted = indexer_logits(*inputs, **settings, layout="plain")
    assert torch.equal(out.nan_to_num(5.0), wanted.nan_to_num(5.0)), (dtype, heads)
    assert rows == 1 or (out.isfinite().any() and out.isnan().any() and out.isneginf().any())
print("equal")
"""


def plain_scores(dtype, heads):
    """Make inputs of indexer_logits with exact scores: integers, and weights of powers of two. Some
    blocks and requests are absent, lengths are 0, the maximum or larger, and one key is NaN."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (6, heads, 128), generator=generator).to(dtype)
    weights = 2.0 ** torch.randint(-3, 3, (6, heads), generator=generator)
    k_cache = torch.randint(-4, 5, (50, 4, 128), generator=generator).to(dtype)
    k_cache[7, 2, 5] = float("nan")
    lens = torch.tensor([9, 0, 80, 10**6, 5, 5]).int()
    requests = torch.tensor([0, 1, 2, 1, -1, 3]).int()
    table = torch.randint(0, 50, (3, 20), generator=generator).int()
    table[1, 3], table[2, :3] = 7, torch.tensor([-1, 50, 2**30]).int()
    return q, weights, k_cache, lens, requests, table


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_last_two_parameters_go():
    stripped = ptx.strip_scratch("copy", HAND)
    assert "copy_param_1\n)" in stripped
    assert "copy_param_2" not in stripped
    assert stripped.count("copy_param_0") == 2


def test_a_parameter_that_is_read_stays():
    read = HAND.replace("[copy_param_1]", "[copy_param_3]")
    with pytest.raises(NotImplementedError, match="must leave its last two parameters unread"):
        ptx.strip_scratch("copy", read)


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_scratch_is_refused(size):
    metadata = types.SimpleNamespace(**{size: 128})
    with pytest.raises(NotImplementedError, match=r"must need no scratch, got 128 bytes of \w+"):
        ptx.kernel_of("copy", types.SimpleNamespace(metadata=metadata, asm={"ptx": HAND}))


def rope(dtype, inverse, capability=90):
    from dsv4_ops.integrations.tensorrt.plugins import apply_rope_kernel

    return apply_rope_kernel(dtype, 128, 64, inverse, capability)


def test_the_stripped_kernel_assembles(tmp_path):
    """Arguments are in TensorRT's order: inputs, numbers, output. ptxas accepts the text."""
    from dsv4_ops.kernels.common.triton_compat import ptxas

    kernel = rope(torch.bfloat16, inverse=False)
    parameters = [
        line.split() for line in kernel.ptx.splitlines() if line.strip().startswith(".param")
    ]
    assert [words[1] for words in parameters] == [".u64"] * 3 + [".u32"] * 2 + [".u64"]
    assert (kernel.name, kernel.threads) == ("apply_rope_kernel", 32)
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.ptx)
    command = [ptxas(90), "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    subprocess.run(command, check=True)


@pytest.mark.parametrize(
    "code", [INTERPRETED, COMBINED, SCORED], ids=["apply_rope", "combine", "indexer_logits"]
)
def test_the_kernel_equals_the_reference_in_the_interpreter(code):
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = forked.python("-c", code, env=env, interpreter=True)
    assert done.stdout == "equal\n", done.stderr[-3000:]


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_driver_launches_it_with_the_arguments_of_a_plugin(dtype, inverse):
    """As in TensorRT, PTX is loaded from text; arguments are inputs, numbers, then the output."""
    from dsv4_ops.reference.rope import apply_rope

    major, minor = torch.cuda.get_device_capability()
    kernel = rope(dtype, inverse, 10 * major + minor)
    generator = torch.Generator("cuda").manual_seed(0)
    positions = torch.tensor([0, 7, -1, 16, 15], device="cuda")
    table = torch.randn(16, 64, generator=generator, device="cuda")
    x = torch.randn(5, 3, 128, generator=generator, device="cuda").to(dtype)
    out = torch.full_like(x, float("nan"))
    launch(kernel, 15, (x, positions, table), (3, 16), (out,))
    assert torch.equal(out, apply_rope(x, positions, table, inverse=inverse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_fit_the_shared_memory_of_any_launch(dtype):
    from dsv4_ops.integrations.tensorrt.plugins import logits_kernel

    kernel = logits_kernel(dtype, 64, 128, {"num_rows": 75, "block_size": 4}, 90)
    assert kernel.shared <= 48 * 1024


def launch(kernel, blocks, inputs, numbers, outputs):
    """Launch by the driver API alone, on the current stream."""
    driver = ctypes.CDLL("libcuda.so.1")

    def checked(code):
        assert code == 0, f"CUDA driver: {code}"

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    checked(driver.cuModuleLoadData(ctypes.byref(module), kernel.ptx.encode()))
    name = kernel.name.encode()
    checked(driver.cuModuleGetFunction(ctypes.byref(function), module, name))
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs]
    values += [ctypes.c_int32(number) for number in numbers]
    values += [ctypes.c_void_p(tensor.data_ptr()) for tensor in outputs]
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = (blocks, 1, 1, kernel.threads, 1, 1, kernel.shared)
    checked(driver.cuLaunchKernel(function, *sizes, stream, pointers, None))
    torch.cuda.synchronize()
    checked(driver.cuModuleUnload(module))
