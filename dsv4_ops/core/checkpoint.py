"""The files of the released DeepSeek-V4 checkpoints: tensors of a config, and a check of headers.

Nothing here reads weights; scales are read, because what they must not hold decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import FP4_BLOCK, WEIGHT_BLOCK
from dsv4_ops.core.refusal import refusal

OP = "check_checkpoint"
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
E4M3, E8M0, FP4_PAIRS = "F8_E4M3", "F8_E8M0", "I8"
"""Names of dtypes in safetensors headers: FP8 codes, scales, and two FP4 codes in a byte."""
NAN_SCALE = 255
LEAST_SCALE = 1 << 22
"""float32 pattern of 2^-127, the scale of byte 0."""
DSPARK = ("main_proj", "main_norm", "markov_head", "confidence_head")
"""Parts of the names that a draft of DSpark has under ``mtp.``."""

_AGAIN = "Download the file again, or convert it from the released one"


class TensorInfo(NamedTuple):
    """dtype, as safetensors names it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredTensor(NamedTuple):
    """A tensor of a shard, and where its bytes are."""

    info: TensorInfo
    file: Path
    start: int
    stop: int


class CheckpointInfo(NamedTuple):
    """What ``check_checkpoint`` found.

    Attributes:
        num_tensors: Tensors of all shards.
        num_bytes: Their bytes.
        expert_dtype: "fp4" or "fp8", from the header.
        scale_dtype: "F8_E8M0" or "F32", from the header.
        draft: "mtp", "dspark" or "none": what is under ``mtp.``.
        names_experts: Whether the config says ``expert_dtype``; Hugging Face takes "fp8" without.
    """

    num_tensors: int
    num_bytes: int
    expert_dtype: str
    scale_dtype: str
    draft: str
    names_experts: bool


def released_tensors(
    config: Mapping[str, Any], *, expert_dtype: str = "fp4", scale_dtype: str = E8M0
) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor of a checkpoint.

    Args:
        config: The content of ``config.json``.
        expert_dtype: "fp4" or "fp8".
        scale_dtype: "F8_E8M0", or "F32" as in the base models.

    Raises:
        ValueError: a size that is missing, or no multiple of a block.
    """
    _check_sizes("released_tensors", config)
    found: dict[str, TensorInfo] = {}
    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    ratios = config["compress_ratios"]
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    for name in ("embed", "head"):
        found[f"{name}.weight"] = TensorInfo("BF16", (vocabulary, width))
    found["norm.weight"] = TensorInfo("BF16", (width,))
    found |= _head(config, "")
    for layer in range(layers):
        hashed = layer < config["num_hash_layers"]
        each = _block(config, ratios[layer], hashed, expert_dtype, scale_dtype)
        found |= {f"layers.{layer}.{name}": info for name, info in each}
    for draft in range(drafts):
        prefix = f"mtp.{draft}."
        each = _block(config, 0, False, expert_dtype, scale_dtype)
        found |= {f"{prefix}{name}": info for name, info in each}
        for name in ("e_proj", "h_proj"):
            found |= dict(_fp8(f"{prefix}{name}", width, width, scale_dtype))
        for name in ("enorm", "hnorm", "norm"):
            found[f"{prefix}{name}.weight"] = TensorInfo("BF16", (width,))
        found |= _head(config, prefix)
    return found


_SIZES = (
    *("num_hidden_layers", "compress_ratios", "num_hash_layers", "vocab_size", "hidden_size"),
    *("hc_mult", "q_lora_rank", "o_groups", "num_attention_heads", "head_dim", "o_lora_rank"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
)
"""What every config must have."""

_INDEXER_SIZES = ("index_n_heads", "index_head_dim")
"""What a config with layers of ratio 4 must have too."""


def _check_sizes(op: str, config: Mapping[str, Any]) -> None:
    ratios = config.get("compress_ratios", ())
    wanted = (*_SIZES, *(_INDEXER_SIZES if 4 in ratios else ()))
    missing = [name for name in wanted if config.get(name) is None]
    advice = "Take the config.json that belongs to the weights"
    if missing:
        rule = f"have {', '.join(missing)}"
        raise refusal(ValueError, op, "config", rule, f"{len(missing)} missing", advice)
    if len(ratios) < config["num_hidden_layers"]:
        rule = f"have a ratio for each of {config['num_hidden_layers']} layers"
        raise refusal(ValueError, op, "config.compress_ratios", rule, len(ratios), advice)


def _head(config: Mapping[str, Any], prefix: str) -> dict[str, TensorInfo]:
    streams, width = config["hc_mult"], config["hidden_size"]
    shapes = {"fn": (streams, streams * width), "base": (streams,), "scale": (1,)}
    return {f"{prefix}hc_head_{part}": TensorInfo("F32", shape) for part, shape in shapes.items()}


def _block(
    config: Mapping[str, Any], ratio: int, hashed: bool, expert_dtype: str, scale_dtype: str
) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors of a layer with a compressor of ``ratio``, 0 for none."""
    width, rank, groups = config["hidden_size"], config["q_lora_rank"], config["o_groups"]
    heads, dim = config["num_attention_heads"], config["head_dim"]
    o_rank, size = config["o_lora_rank"], config["moe_intermediate_size"]
    experts, streams = config["n_routed_experts"], config["hc_mult"]

    def bf16(name: str, *shape: int) -> tuple[str, TensorInfo]:
        return name, TensorInfo("BF16", shape)

    def f32(name: str, *shape: int) -> tuple[str, TensorInfo]:
        return name, TensorInfo("F32", shape)

    def fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorInfo]]:
        return _fp8(name, rows, columns, scale_dtype)

    for name in ("attn_norm", "ffn_norm"):
        yield bf16(f"{name}.weight", width)
    yield from fp8("attn.wq_a", rank, width)
    yield bf16("attn.q_norm.weight", rank)
    yield from fp8("attn.wq_b", heads * dim, rank)
    yield from fp8("attn.wkv", dim, width)
    yield bf16("attn.kv_norm.weight", dim)
    yield f32("attn.attn_sink", heads)
    yield from fp8("attn.wo_a", groups * o_rank, heads * dim // groups)
    yield from fp8("attn.wo_b", width, groups * o_rank)
    mixes = streams * (streams + 2)
    for part in ("attn", "ffn"):
        yield f32(f"hc_{part}_fn", mixes, streams * width)
        yield f32(f"hc_{part}_base", mixes)
        yield f32(f"hc_{part}_scale", 3)
    yield bf16("ffn.gate.weight", experts, width)
    if hashed:
        shape = config["vocab_size"], config["num_experts_per_tok"]
        yield "ffn.gate.tid2eid", TensorInfo("I64", shape)
    else:
        yield f32("ffn.gate.bias", experts)
    sizes = {"w1": (size, width), "w3": (size, width), "w2": (width, size)}
    expert: Callable[[str, int, int], Iterator[tuple[str, TensorInfo]]]
    expert = _fp4 if expert_dtype == "fp4" else fp8
    for index in range(experts):
        for name, shape in sizes.items():
            yield from expert(f"ffn.experts.{index}.{name}", *shape)
    shared = size * config.get("n_shared_experts", 1)
    sizes = {"w1": (shared, width), "w3": (shared, width), "w2": (width, shared)}
    for name, shape in sizes.items():
        yield from fp8(f"ffn.shared_experts.{name}", *shape)
    if ratio:
        yield from _compressor("attn.compressor.", ratio, dim, width)
    if ratio == 4:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        yield from fp8("attn.indexer.wq_b", index_heads * index_dim, rank)
        yield bf16("attn.indexer.weights_proj.weight", index_heads, width)
        yield from _compressor("attn.indexer.compressor.", ratio, index_dim, width)


def _compressor(prefix: str, ratio: int, dim: int, width: int) -> Iterator[tuple[str, TensorInfo]]:
    columns = 2 * dim if ratio == 4 else dim  # windows of ratio 4 overlap
    yield f"{prefix}ape", TensorInfo("F32", (ratio, columns))
    for name in ("wkv", "wgate"):
        yield f"{prefix}{name}.weight", TensorInfo("BF16", (columns, width))
    yield f"{prefix}norm.weight", TensorInfo("BF16", (dim,))


def _fp8(name: str, rows: int, columns: int, scale_dtype: str) -> Iterator[tuple[str, TensorInfo]]:
    _check_blocks(name, rows, WEIGHT_BLOCK)
    _check_blocks(name, columns, WEIGHT_BLOCK)
    yield f"{name}.weight", TensorInfo(E4M3, (rows, columns))
    yield f"{name}.scale", TensorInfo(scale_dtype, (rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK))


def _fp4(name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorInfo]]:
    _check_blocks(name, columns, FP4_BLOCK)
    yield f"{name}.weight", TensorInfo(FP4_PAIRS, (rows, columns // 2))
    yield f"{name}.scale", TensorInfo(E8M0, (rows, columns // FP4_BLOCK))


_BYTES = {"BF16": 2, "F32": 4, "I64": 8, FP4_PAIRS: 1, E4M3: 1, E8M0: 1}
_SPLIT_HEADS = ("attn.wq_b.", "attn.wo_a.", "attn.wo_b.", "attn.attn_sink", "ffn.shared_experts.")
"""Parts of a layer that attention heads and the shared expert are split by."""


def weight_bytes(
    config: Mapping[str, Any], *, num_gpus: int = 1, split_heads: bool = False
) -> dict[str, int]:
    """Bytes of a loaded model's weights on each GPU, by part; without its draft layer.

    Args:
        config: The content of ``config.json``, as released.
        num_gpus: GPUs that the routed experts, whole ones, and the rows of the head are split over.
            Divides both.
        split_heads: Whether attention heads, their projections and the shared expert are split as
            well; they are on every GPU otherwise, as Hugging Face's plans have it.

    Returns:
        "experts", "attention" (projections, compressors and indexers), "shared experts" and "other"
        (embedding, head, routers, norms, hyper-connections). Norms are float32, as loaded.

    Raises:
        ValueError: a size that is missing; ``num_gpus`` does not divide the experts, the vocabulary
            or, with ``split_heads``, the groups of the output projection.
    """
    _check_sizes("weight_bytes", config)
    divided = {"n_routed_experts": config["n_routed_experts"], "vocab_size": config["vocab_size"]}
    if split_heads:
        divided["o_groups"] = config["o_groups"]
    for name, size in divided.items():
        if num_gpus < 1 or size % num_gpus:
            rule, advice = f"divide {name}, {size}", "Pass a divisor of it"
            raise refusal(ValueError, "weight_bytes", "num_gpus", rule, num_gpus, advice)
    found = dict.fromkeys(("experts", "attention", "shared experts", "other"), 0)
    expert_dtype = config.get("expert_dtype", "fp4")
    one = {**config, "n_routed_experts": 1}  # all are alike, and names of all would take seconds
    for name, info in released_tensors(one, expert_dtype=expert_dtype).items():
        if name.startswith("mtp."):
            continue
        size = prod(info.shape) * _BYTES["F32" if "norm.weight" in name else info.dtype]
        if any(part in name for part in (".experts.", ".gate.weight", ".gate.bias")):
            size *= config["n_routed_experts"]
        split = split_heads and any(part in name for part in _SPLIT_HEADS)
        if ".experts." in name or name == "head.weight" or split:
            size //= num_gpus
        found[_part(name)] += size
    return found


def _part(name: str) -> str:
    if ".shared_experts." in name:
        return "shared experts"
    if ".experts." in name:
        return "experts"
    return "attention" if ".attn." in name else "other"


def _check_blocks(name: str, size: int, block: int) -> None:
    if size % block != 0:
        rule, advice = f"have sizes that are multiples of {block}", "Correct the config"
        raise refusal(ValueError, "released_tensors", name, rule, size, advice)


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Headers of all shards of a checkpoint; reads no tensor.

    Raises:
        ValueError: a file is missing or broken, or a tensor is in another shard than the index
            says.
    """
    path = Path(path)
    index = _json(path / INDEX)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        found |= _header(path / shard)
    for name, shard in index["weight_map"].items():
        if name not in found or found[name].file.name != shard:
            actual = found[name].file.name if name in found else "none"
            raise refusal(ValueError, OP, name, f"be in {shard}, as the index says", actual, _AGAIN)
    return found


def _json(file: Path, op: str = OP) -> dict[str, Any]:
    if not file.is_file():
        rule, advice = f"hold {file.name}", "Pass the folder of a checkpoint"
        raise refusal(ValueError, op, "path", rule, file.parent, advice)
    held = _object(op, file.name, file.read_bytes())
    if file.name == INDEX and not isinstance(held.get("weight_map"), dict):
        raise refusal(ValueError, op, file.name, "hold a weight_map", "none", _AGAIN)
    return held


def _object(op: str, name: str, content: bytes) -> dict[str, Any]:
    try:
        held = json.loads(content)
    except ValueError as error:  # no JSON, or no text
        raise refusal(ValueError, op, name, "be JSON", error, _AGAIN) from error
    if not isinstance(held, dict):
        rule = "hold names and values"
        raise refusal(ValueError, op, name, rule, type(held).__name__, _AGAIN)
    return held


def _header(file: Path, op: str = OP) -> dict[str, StoredTensor]:
    if not file.is_file():
        rule = "hold every shard of its index"
        raise refusal(ValueError, op, "path", rule, f"no {file.name}", "Download the shard")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        held = file.stat().st_size
        if not 0 < size <= held - 8:
            rule, actual = "begin with the size of its header", f"{size} in {held} bytes"
            raise refusal(ValueError, op, file.name, rule, actual, _AGAIN)
        entries = _object(op, file.name, stream.read(size))
    entries.pop("__metadata__", None)
    first, found = 8 + size, {}
    for name, entry in entries.items():
        start, stop = (first + offset for offset in entry["data_offsets"])
        info = TensorInfo(entry["dtype"], tuple(entry["shape"]))
        found[name] = StoredTensor(info, file, start, stop)
    if file.stat().st_size != max((each.stop for each in found.values()), default=first):
        rule = "be as long as its header says"
        raise refusal(ValueError, op, file.name, rule, f"{file.stat().st_size} bytes", _AGAIN)
    return found


def check_checkpoint(path: Path | str, *, scales: bool = True) -> CheckpointInfo:
    """Check names, dtypes, shapes and scales of a released checkpoint.

    A scale that is missing, transposed or of another block size changes weights without any error
    later; a scale byte of 255 is NaN; float32 scales that are no powers of two would be rounded by
    Hugging Face's loader.

    Args:
        path: The folder with ``config.json`` and the index of the shards.
        scales: Whether to read the scales, a twentieth of the bytes. Headers are always read.

    Returns:
        What the checkpoint is.

    Raises:
        ValueError: what is not as released, by name.
    """
    path = Checks(OP).path("path", path)
    config, stored = _json(path / CONFIG), read_headers(path)
    first = _require(stored, "layers.0.ffn.experts.0.w1.weight").info.dtype
    expert_dtype = "fp4" if first == FP4_PAIRS else "fp8"
    said = config.get("expert_dtype")
    if said not in (None, expert_dtype):
        rule = f"be {expert_dtype!r} for experts of {first}"
        raise refusal(ValueError, OP, "expert_dtype", rule, repr(said), "Correct config.json")
    scale_dtype = _require(stored, "layers.0.attn.wq_a.scale").info.dtype
    if scale_dtype not in (E8M0, "F32"):
        rule = f"be {E8M0} or F32"
        raise refusal(ValueError, OP, "layers.0.attn.wq_a.scale", rule, scale_dtype, _AGAIN)
    draft = _draft(stored)
    expected = released_tensors(config, expert_dtype=expert_dtype, scale_dtype=scale_dtype)
    for name, info in expected.items():
        if draft == "mtp" or not name.startswith("mtp."):
            _check_tensor(name, info, _require(stored, name, info).info)
    unknown = [name for name in stored if name not in expected and not name.startswith("mtp.")]
    if unknown:
        rule = "hold no tensor that the config has no place for"
        raise refusal(ValueError, OP, "path", rule, min(unknown), "Correct config.json")
    if scales:
        _check_scales(stored)
    size = sum(each.stop - each.start for each in stored.values())
    named = said is not None or "expert_dtype" in config.get("quantization_config", {})
    return CheckpointInfo(len(stored), size, expert_dtype, scale_dtype, draft, named)


def _require(
    stored: Mapping[str, StoredTensor],
    name: str,
    info: TensorInfo | None = None,
    *,
    op: str = OP,
) -> StoredTensor:
    if name not in stored:
        what = name if info is None else f"{name}, {info}"
        raise refusal(ValueError, op, "path", f"hold {what}", "no such tensor", _AGAIN)
    return stored[name]


def _check_tensor(name: str, wanted: TensorInfo, actual: TensorInfo, *, op: str = OP) -> None:
    if actual == wanted:
        return
    transposed = actual == TensorInfo(wanted.dtype, wanted.shape[::-1])
    advice = "It is transposed" if transposed else _AGAIN
    raise refusal(ValueError, op, name, f"be {wanted}", actual, advice)


def draft_tensors(path: Path | str, *, op: str = OP) -> dict[str, StoredTensor]:
    """Headers of the one draft layer (MTP) of a released checkpoint, checked; reads no tensor.

    Args:
        path: The folder with ``config.json`` and the index of the shards.
        op: Public function that an error names.

    Returns:
        The tensors under ``mtp.0.``, by name without that prefix.

    Raises:
        ValueError: the files hold no draft layer or several, or a tensor of it is missing, unknown,
            transposed or of another dtype or shape; by name.
        NotImplementedError: a draft of DSpark, or the checkpoint of another architecture.
    """
    path = Checks(op).path("path", path)
    config, index = _json(path / CONFIG, op), _json(path / INDEX, op)
    kind = config.get("model_type")
    if kind != "deepseek_v4":
        rule, advice = "be 'deepseek_v4'", "Draft layers of other architectures are unknown"
        raise refusal(NotImplementedError, op, "model_type", rule, repr(kind), advice)
    shards = {name: file for name, file in index["weight_map"].items() if name.startswith("mtp.")}
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(shards.values())):
        stored |= _header(path / file, op)
    stored = {name: tensor for name, tensor in stored.items() if name in shards}
    dspark = [name for name in stored if any(part in name for part in DSPARK)]
    if dspark:
        rule, advice = "be of an MTP layer", "DSpark's drafts are not implemented"
        raise refusal(NotImplementedError, op, "path", rule, f"{min(dspark)} of DSpark", advice)
    if not shards:
        rule, advice = "hold a draft layer, mtp.0", "Pass a checkpoint that has one"
        raise refusal(ValueError, op, "path", rule, "no tensor of it", advice)
    others = [name for name in shards if not name.startswith("mtp.0.")]
    if others:
        rule, advice = "hold one draft layer, mtp.0", "Drafts of several layers are unknown"
        raise refusal(NotImplementedError, op, "path", rule, min(others), advice)
    expert = _require(stored, "mtp.0.ffn.experts.0.w1.weight", op=op).info.dtype
    scale = _require(stored, "mtp.0.attn.wq_a.scale", op=op).info.dtype
    settings = {**config, "num_hidden_layers": 0, "num_nextn_predict_layers": 1}
    expert_dtype = "fp4" if expert == FP4_PAIRS else "fp8"
    expected = released_tensors(settings, expert_dtype=expert_dtype, scale_dtype=scale)
    wanted = {name: info for name, info in expected.items() if name.startswith("mtp.")}
    for name, info in wanted.items():
        _check_tensor(name, info, _require(stored, name, info, op=op).info, op=op)
    unknown = [name for name in stored if name not in wanted]
    if unknown:
        rule = "hold no tensor that a draft layer has no place for"
        raise refusal(ValueError, op, "path", rule, min(unknown), "It is of another model")
    return {name.removeprefix("mtp.0."): stored[name] for name in wanted}


def _draft(stored: Mapping[str, StoredTensor]) -> str:
    names = [name for name in stored if name.startswith("mtp.")]
    if any(part in name for name in names for part in DSPARK):
        return "dspark"
    return "mtp" if names else "none"


def _check_scales(stored: Mapping[str, StoredTensor]) -> None:
    ordered = sorted(stored.items(), key=lambda item: (item[1].file, item[1].start))
    for name, tensor in ordered:
        if not name.endswith(".scale"):
            continue
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            held = bytearray(stream.read(tensor.stop - tensor.start))
        if tensor.info.dtype == E8M0:
            wrong = held.count(NAN_SCALE)
            rule = "hold bytes of 0 to 254, as 255 is NaN"
        else:
            bits = torch.frombuffer(held, dtype=torch.int32)
            normal = (bits >= 1 << 23) & (bits < 255 << 23) & (bits & 0x7FFFFF == 0)
            wrong = int((~normal & (bits != LEAST_SCALE)).sum())
            rule = "hold powers of two only, as loaders make bytes of them"
        if wrong:
            raise refusal(ValueError, OP, name, rule, f"{wrong} other values", _AGAIN)
