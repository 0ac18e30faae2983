"""Synthetic checkpoints in the released format, with its names, dtypes and scale layouts.

    from dsv4_ops.testing.checkpoint import write_checkpoint

    write_checkpoint("tiny-v4")  # 427 tensors, 13.7 MiB; or: python -m dsv4_ops checkpoint tiny-v4

Weights are random and sampled so that errors show: scales of neighbouring blocks differ by up to
2^7, a block is all zeros, blocks reach the largest code, and no two experts, norms or sinks are
alike.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.checkpoint.format import E8M0, FP4_PAIRS, released_tensors
from dsv4_ops.checkpoint.headers import CONFIG, INDEX, TensorInfo
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import FP4_BLOCK, FP8_MAX, WEIGHT_BLOCK

FAMILIES = ("instruct", "base")
FP4_MAX = 6.0
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbouring e2m1 values."""

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
"""A config with every kind of layer: sliding window, C4, C128, C4, and a draft layer. The first two
layers route by hash."""

FLASH: dict[str, Any] = {
    **TINY,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "vocab_size": 129280,
}
"""Sizes of DeepSeek-V4-Flash, except ``index_topk``."""

PRO: dict[str, Any] = {
    **FLASH,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
"""Sizes of DeepSeek-V4-Pro, except ``index_topk``."""

# Centre and half width of the distribution of non-matrix weights, by a part of the weight's name.
_RANGES = {
    "attn_sink": (5.0, 3.0),
    "ape": (0.0, 1.7),
    "gate.bias": (0.0, 0.4),
    "kv_norm": (2.5, 1.0),
    "compressor.norm": (4.0, 1.0),
    "norm.weight": (1.0, 0.5),
    "_base": (0.0, 2.0),
    "_scale": (1.0, 0.5),
}


def write_checkpoint(
    path: Path | str,
    config: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    shards: int = 3,
    family: str = "instruct",
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a checkpoint in the released format, with random or trained weights.

    Args:
        path: Folder to create; existing files of the same names are replaced.
        config: Content of ``config.json``; ``TINY`` if None. Without "expert_dtype", as in the file
            of Pro, experts are in FP4.
        seed: Seed of the weights. Each weight depends only on the seed and on its name.
        shards: Number of files over which the tensors, sorted by name, are split. At least 1.
        family: "instruct": FP4 experts, E8M0 scales. "base": FP8 experts, and float32 scales that
            are powers of two.
        weights: Weights in any floating dtype, for example of a trained model, by their names in
            the files. These weights are quantised, or rounded to the dtype in the files. All other
            weights are random.

    Returns:
        ``path``.

    Raises:
        ValueError: a size is not a multiple of a block, the family is unknown, ``shards`` is below
            1, or the files have no tensor with the name and shape of one of ``weights``.
        ImportError: safetensors is missing.
    """
    from safetensors.torch import save_file

    if family not in FAMILIES:
        raise argument_error(
            "write_checkpoint",
            "family",
            must=f"be one of {', '.join(FAMILIES)}",
            got=repr(family),
            do="Pass one of these",
        )
    if shards < 1:
        raise argument_error(
            "write_checkpoint", "shards", must="be at least 1", got=shards, do="Pass 1 or more"
        )
    base, path = family == "base", Path(path)
    written = dict(TINY if config is None else config)
    if base:
        written["expert_dtype"] = "fp8"
    expected = released_tensors(
        written, expert_dtype="fp8" if base else "fp4", scale_dtype="F32" if base else E8M0
    )
    named_weights = {} if weights is None else weights
    for name, weight in named_weights.items():
        stored = expected.get(name)
        do = "Rename it, or pass its config"
        if stored is None:
            raise argument_error(
                "write_checkpoint",
                "weights",
                must=f"have names of {CONFIG}'s tensors",
                got=name,
                do=do,
            )
        shape = _shape(stored)
        if tuple(weight.shape) != shape:
            raise argument_error(
                "write_checkpoint",
                "weights",
                must=f"have shape {shape} for {name}",
                got=tuple(weight.shape),
                do=do,
            )
    path.mkdir(parents=True, exist_ok=True)
    names, total = sorted(expected), 0
    weight_map: dict[str, str] = {}
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {
            name: _stored(name, expected, written, seed, quantized, named_weights) for name in part
        }
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    ids = {"bos_token_id": written["bos_token_id"], "eos_token_id": written["eos_token_id"]}
    files = {INDEX: index, CONFIG: written, "generation_config.json": ids}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")
    return path


def _stored(
    name: str,
    expected: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    seed: int,
    quantized: dict[str, tuple[Tensor, Tensor]],
    named_weights: Mapping[str, Tensor],
) -> Tensor:
    """Return the tensor ``name`` of the files.

    ``quantized`` keeps a matrix until its codes and its scales have both been returned."""
    layer, _, part = name.rpartition(".")
    if f"{layer}.scale" in expected:
        weight = f"{layer}.weight"
        if weight not in quantized:
            info = expected[weight]
            if weight in named_weights:
                quantized[weight] = _quantized(info, named_weights[weight])
            else:
                quantized[weight] = quantized_weight(weight, info, seed)
            codes, scale = quantized[weight]
        else:
            codes, scale = quantized.pop(weight)
        if part == "weight":
            return codes
        return scale.to(torch.float32) if expected[name].dtype == "F32" else scale
    dtype, shape = expected[name]
    if name in named_weights:
        return named_weights[name].detach().to("cpu", _DTYPES[dtype]).contiguous()
    sampled = random_weight(name, shape, seed, _RANGES, config["n_routed_experts"])
    return sampled.to(_DTYPES[dtype]).contiguous()


def random_weight(
    name: str,
    shape: Sequence[int],
    seed: int,
    ranges: Mapping[str, tuple[float, float]],
    num_experts: int,
) -> Tensor:
    """Sample a weight from a uniform distribution. The weight is bit-identical on all machines.

    ``ranges`` has centre and half width for non-matrix weights, by a part of the weight's name."""
    seeded = _generator(name, seed)
    if name.endswith("tid2eid"):
        keys = torch.rand(shape[0], num_experts, generator=seeded)
        return keys.argsort(dim=1, stable=True)[:, : shape[1]]
    is_embedding = "embed_tokens" in name or name == "embed.weight"
    deviation = 1.0 if is_embedding else 1.0 / math.sqrt(shape[-1])
    bounds = next((bounds for part, bounds in ranges.items() if part in name), None)
    centre, half = bounds or (0.0, math.sqrt(3.0) * deviation)
    return centre + half * _uniform(shape, seeded)


def quantized_weight(name: str, info: TensorInfo, seed: int) -> tuple[Tensor, Tensor]:
    """Sample the codes and E8M0 scales of a matrix, as in the files."""
    generator = _generator(name, seed)
    rows, columns = info.shape
    fp4 = info.dtype == FP4_PAIRS
    columns *= 2 if fp4 else 1
    height, width = (1, FP4_BLOCK) if fp4 else (WEIGHT_BLOCK, WEIGHT_BLOCK)
    blocks = rows // height, columns // width
    # blocks of large values are rare, so that sums over rows have a standard deviation near one
    exponents = torch.randint(0, 8, blocks, generator=generator)
    size = torch.exp2(-exponents.to(torch.float32)) * math.sqrt(3.0 * 6.0 / columns)
    size = size * (0.75 + 0.5 * torch.rand((), generator=generator))  # differs between experts
    size = size * (0.75 + 0.5 * torch.rand(blocks, generator=generator))  # every code occurs
    values = _blocks(_uniform((rows, columns), generator), height, width)
    values = values * size[:, None, :, None]
    values[0, :, 0] = 0.0
    limit = FP4_MAX if fp4 else FP8_MAX
    last = values[-1, :, -1]  # a block that reaches the largest code
    last[-1, -1] = math.ldexp(limit, int(_exponents(last.abs().max(), limit)))
    matrix = values.flatten(2).flatten(0, 1)
    return quantize_fp4(matrix) if fp4 else quantize_fp8(matrix)


def _shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of a weight before quantisation."""
    columns = info.shape[-1] * (2 if info.dtype == FP4_PAIRS else 1)
    return (*info.shape[:-1], columns)


def _quantized(info: TensorInfo, weight: Tensor) -> tuple[Tensor, Tensor]:
    quantize = quantize_fp4 if info.dtype == FP4_PAIRS else quantize_fp8
    return quantize(weight.detach().cpu())


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [n, k] to e4m3 with an E8M0 scale, float8_e8m0fnu, per block of 128 x 128."""
    blocks = _blocks(weight.to(torch.float32), WEIGHT_BLOCK, WEIGHT_BLOCK)
    exponent = _exponents(blocks.abs().amax((1, 3)), FP8_MAX)
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None])
    return scaled.flatten(2).flatten(0, 1).to(torch.float8_e4m3fn), _bytes(exponent)


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [n, k] to e2m1 with an E8M0 scale per 32 values of a row.

    Codes are int8 [n, k / 2] with the first of two codes in the low half; ties go to the even
    code."""
    blocks = weight.to(torch.float32).unflatten(1, (-1, FP4_BLOCK))
    exponent = _exponents(blocks.abs().amax(-1), FP4_MAX)
    scaled = torch.ldexp(blocks, -exponent[..., None]).flatten(1)
    midpoints = torch.tensor(_MIDPOINTS)
    code = torch.bucketize(scaled.abs(), midpoints)
    tie = scaled.abs() == midpoints[code.clamp(max=len(_MIDPOINTS) - 1)]
    code = code + (tie & (code % 2 == 1)) + 8 * scaled.signbit()
    low, high = code.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return (low | high << 4).view(torch.int8), _bytes(exponent)


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """View [n, k] as [n / height, height, k / width, width]."""
    rows: Tensor = matrix.unflatten(0, (-1, height))
    blocks: Tensor = rows.unflatten(2, (-1, width))
    return blocks


def _exponents(amax: Tensor, limit: float) -> Tensor:
    """Return the exponents of the smallest scales that avoid saturation; -127 for zeros."""
    significand, exponent = torch.frexp(amax)
    most, of_limit = math.frexp(limit)
    exponents = exponent - of_limit + (significand > most).to(torch.int32)
    return torch.where(amax == 0, -127, exponents).clamp(-127, 127)


def _bytes(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.rand(shape, generator=generator) - 1.0


def tensors(path: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Load every tensor of a checkpoint, shard by shard."""
    from safetensors.torch import load_file

    for file in sorted(Path(path).glob("*.safetensors")):
        yield from load_file(file).items()
