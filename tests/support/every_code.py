"""Check the kernels' conversions: every bf16 value to an e4m3 code, every code to a value."""

import torch
import triton
import triton.language as tl

from dsv4_ops.kernels.common.fp8 import decode, decode_scaled, dequantize, encode, quantize
from dsv4_ops.reference import quantization as reference

BLOCK = 4096


@triton.jit
def _encode_kernel(values, codes, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + index, encode(tl.load(values + index), CONVERTS))


@triton.jit
def _quantize_kernel(values, codes, scales, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = 2 * index[:, None] + tl.arange(0, 2)[None, :]
    written, scale = quantize(tl.load(values + pair), CONVERTS)
    tl.store(codes + pair, written)
    tl.store(scales + index, scale)


@triton.jit
def _decode_kernel(codes, values, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + index, decode(tl.load(codes + index), CONVERTS))


@triton.jit
def _dequantize_kernel(codes, scales, words, CONVERTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scales + row + tl.arange(0, 1))
    tl.store(words + index, dequantize(tl.load(codes + index), scale, CONVERTS))


@triton.jit
def _scale_kernel(codes, scales, values, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scales + row + tl.arange(0, 1))[:, None]
    factor = (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    tl.store(values + index, decode_scaled(tl.load(codes + index), factor))


def every_bf16() -> torch.Tensor:
    """Return all 65,536 bf16 values as float32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()


def ties() -> torch.Tensor:
    """Return the middle of each two neighbouring codes, and the float32 values next to it."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.cat(((values[1:] + values[:-1]) / 2, torch.tensor([464.0])))
    beside = [torch.nextafter(middle, torch.full_like(middle, way)) for way in (0.0, 1e9)]
    return torch.cat((middle, *beside, -middle, *(-each for each in beside)))


def check(device: str, converts: bool, scale_bytes: range) -> int:
    """Compare bytes with torch's cast and with the reference; any NaN equals NaN. Return the number
    of compared values."""
    bits = every_bf16()
    extra = ties()
    values = torch.cat((bits, extra, extra.new_zeros(-len(extra) % BLOCK)))
    codes = torch.empty(len(values), dtype=torch.uint8, device=device)
    programs = len(values) // BLOCK
    _encode_kernel[programs,](values.to(device), codes, CONVERTS=converts, BLOCK=BLOCK)
    cast = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = torch.where(values.isnan(), 0x7F, cast)
    assert torch.equal(codes.cpu(), expected)

    pairs = torch.stack((bits, torch.zeros_like(bits)), 1)  # each value is its block's amax
    codes = torch.empty(pairs.shape, dtype=torch.uint8, device=device)
    scales = torch.empty(len(pairs), dtype=torch.int32, device=device)
    _quantize_kernel[len(pairs) // BLOCK,](
        pairs.to(device), codes, scales, CONVERTS=converts, BLOCK=BLOCK
    )
    want_codes, want_scales = reference.quantize(reference.bf16_bits(pairs.bfloat16()), 2)
    assert torch.equal(codes.cpu(), want_codes)
    assert torch.equal(scales.cpu(), want_scales.flatten())

    every = torch.arange(256, dtype=torch.uint8)
    decoded = torch.empty(256, device=device)
    _decode_kernel[1,](every.to(device), decoded, CONVERTS=converts, BLOCK=256)
    want = every.view(torch.float8_e4m3fn).float()
    assert same_bits(decoded.cpu(), want, torch.int32)

    table = torch.tensor(scale_bytes, dtype=torch.uint8)
    words = torch.empty((len(table), 256), dtype=torch.int16, device=device)
    _dequantize_kernel[len(table),](
        every.repeat(len(table)).to(device), table.to(device), words, CONVERTS=converts, BLOCK=256
    )
    want = reference.dequantize(every.expand(len(table), 256), table[:, None], 256).bfloat16()
    assert same_bits(words.cpu().view(torch.bfloat16), want, torch.int16)
    scaled = torch.empty(words.shape, dtype=torch.bfloat16, device=device)
    repeated = every.repeat(len(table)).to(device)
    _scale_kernel[len(table),](repeated, table.to(device), scaled, BLOCK=256)
    assert same_bits(scaled.cpu(), want, torch.int16)
    return len(bits) + len(extra) + 256 + words.numel()


def same_bits(found: torch.Tensor, want: torch.Tensor, integer: torch.dtype) -> bool:
    """Return whether all bits are equal, except that any NaN equals NaN."""
    nan = want.isnan()
    numbers = torch.equal(found.view(integer)[~nan], want.view(integer)[~nan])
    return numbers and torch.equal(found.isnan(), nan)
