"""GPUs other than Hopper's, without such GPUs: what launchers choose and Triton compiles for them,
and what tests/gpu/test_ampere.py runs on a Hopper card."""

import struct

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.cli import kernels
from dsv4_ops.kernels.aot import compile
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.common.dequant_gemm import byte_rows
from dsv4_ops.reference import quantization
from tests.support import every_code
from tests.support.ampere import as_an_a100
from tests.support.hopper import hopper  # noqa: F401  # a fixture


@pytest.mark.parametrize(("streams", "steps"), [(4, (8, 8)), (5, (1, 8)), (8, (1, 1))])
def test_programs_of_streams_take_several_steps_if_two_fit(streams, steps):
    """Two steps take 78 KB (4 streams) or 106 KB (5) of sm_86's 101; 8 streams exceed sm_90's."""
    args, settings = kernels._streams(True, 1024, streams)
    for where, expected in zip(((8, 6), (9, 0)), steps, strict=True):
        launch = kernels.recorded("hyper_connection", args, settings, where)[0]
        assert launch.kwargs["STEPS"] == expected
    assert streams != 5 or kernels._usage(kernels.compiled(launch, 90), 90)[0] == 0


def test_codes_are_copied_as_bytes():
    """Inductor's copies are Triton kernels, which have no pointers to e4m3 values before 8.9."""
    codes = torch.empty(256, 128, dtype=torch.float8_e4m3fn).T
    nodes = make_fx(byte_rows, tracing_mode="fake")(codes).graph.nodes
    copied = [node.args[0].meta["val"].dtype for node in nodes if "clone" in node.name]
    assert copied == [torch.uint8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codes"), [("sparse_mla_decode", 64 * 448), ("mla_decode, fp8", 32 * 576)]
)
def test_a_key_is_converted_once_for_both_products(name, codes):
    """256 threads convert pairs with two instructions; Triton would convert for each product."""
    args, settings = kernels.examples()[name]
    launch = kernels.recorded(name.partition(",")[0], args, settings, (8, 0))[0]
    assert kernels.compiled(launch, 80).asm["ptx"].count("fma.rn.bf16x2") == codes // 256


def constants(capability):
    """Return CONVERTS of every launch, by kernel, and the names of all kernels."""
    found, names = {}, set()
    for name, (args, settings) in kernels.examples().items():
        for launch in kernels.recorded(name.partition(",")[0], args, settings, capability):
            kernel = launch.kernel.__name__
            names.add(kernel)
            told = [launch.kwargs["CONVERTS"]] if "CONVERTS" in launch.kwargs else []
            formats = [each for word, each in launch.kwargs.items() if word.endswith("FORMAT")]
            told += [each[-1] for each in formats if isinstance(each, tuple)]
            if told:
                found.setdefault(kernel, set()).update(told)
    return found, names


def test_every_kernel_of_codes_is_told_whether_the_gpu_converts_them():
    """Rows of plain caches hold no codes, so their launches have False on all GPUs. Only Hopper has
    kernels in Gluon, and stores the scores of a selection."""
    (ampere, names), (ada, _) = constants((8, 0)), constants((8, 9))
    assert set(ampere) == set(ada)
    assert all(each == {False} for each in ampere.values())
    assert all(True in each for each in ada.values())
    assert not {name for name in names if name.startswith(("hopper_", "score_keys_"))}


def binary_of(values):
    """Return PTX and binary of a kernel, for the current GPU."""
    arguments = [Argument.tensor(values), Argument.tensor(torch.uint8)]
    settings = {"CONVERTS": False, "BLOCK": every_code.BLOCK, "num_warps": 4}
    return compile.compiled(every_code._encode_kernel, arguments, settings, 90).asm


@pytest.mark.usefixtures("hopper")
def test_a_hopper_card_runs_the_ptx_of_an_a100(tmp_path):
    """PTX for sm_80 is in a binary for sm_90: the flags of the ELF have 90 in one of two bytes."""
    with as_an_a100(tmp_path):
        found = binary_of(torch.float32)
        assert torch.cuda.get_device_capability() == (8, 0)
    assert ".target sm_80" in found["ptx"]
    (flags,) = struct.unpack_from("<I", found["cubin"], 48)
    assert 90 in (flags & 0xFF, flags >> 8 & 0xFF)
    assert torch.cuda.get_device_capability() == (9, 0)
    assert ".target sm_90" in binary_of(torch.float32)["ptx"]


def test_references_code_by_integers_where_compiled_code_cannot_convert(monkeypatch):
    values = torch.cat((every_code.every_bf16(), every_code.ties()))
    values = values[~values.isnan()]
    e4m3 = (codes := torch.arange(256, dtype=torch.uint8)).view(torch.float8_e4m3fn)
    want = quantization.saturated_codes(values), quantization.e4m3_values(codes)
    monkeypatch.setattr(quantization, "converts_codes", lambda device: False)
    monkeypatch.setattr(quantization, "runs_on_cpu", lambda codes: False)
    assert torch.equal(quantization.saturated_codes(values), want[0])
    for found in (quantization.e4m3_values(codes), quantization.float_values(e4m3)):
        assert every_code.same_bits(found, want[1], torch.int32)
    assert torch.equal(quantization.as_e4m3(codes).view(torch.uint8), codes)
