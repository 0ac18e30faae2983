"""Check released checkpoints of all families, and list the tensors that a DeepSeek-V4 config
implies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsv4_ops.checkpoint import mla_format
from dsv4_ops.checkpoint.config import (
    check_ratios,
    check_size,
    check_sizes,
    scale_format,
    skipped_modules,
)
from dsv4_ops.checkpoint.headers import (
    AGAIN,
    CONFIG,
    StoredTensor,
    TensorInfo,
    read_headers,
    read_json,
)
from dsv4_ops.checkpoint.values import check_values
from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import FP4_BLOCK, WEIGHT_BLOCK

OP = "check_checkpoint"
V4 = "deepseek_v4"
E4M3, E8M0, FP4_PAIRS = "F8_E4M3", "F8_E8M0", "I8"
"""Dtype names in safetensors headers: FP8 codes, UE8M0 scales, and two FP4 codes per byte."""
DSPARK = ("main_proj", "main_norm", "markov_head", "confidence_head")
"""Parts of tensor names that only a DSpark draft has. The names of the tensors of all drafts begin
with ``mtp.``."""

_DTYPES = {
    E4M3: torch.float8_e4m3fn,
    E8M0: torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Dtypes that can represent NaN."""
_CHUNK = 1 << 24
"""Bytes per read."""


class CheckpointInfo(NamedTuple):
    """Result of ``check_checkpoint``.

    Attributes:
        num_tensors: Number of tensors in all shards.
        num_bytes: Size of these tensors in bytes.
        expert_dtype: "fp4" or "fp8": for V4 from the header, for other families always "fp8".
        scale_dtype: "F8_E8M0" or "F32", from the header; "none" if there are no scales.
        draft: Kind of the draft layers: "mtp", "dspark" or "none". In V4 the names of their tensors
            begin with ``mtp.``; other families number draft layers after the last layer.
        names_experts: Whether the config has ``expert_dtype``; if not, Hugging Face assumes "fp8".
        model_type: "deepseek_v4", "deepseek_v32", "deepseek_v3" (also for R1), "deepseek_v2" or
            "glm_moe_dsa".
    """

    num_tensors: int
    num_bytes: int
    expert_dtype: str
    scale_dtype: str
    draft: str
    names_experts: bool
    model_type: str


def released_tensors(
    config: Mapping[str, Any], *, expert_dtype: str = "fp4", scale_dtype: str = E8M0
) -> dict[str, TensorInfo]:
    """List the name, dtype and shape of every tensor of a checkpoint.

    Args:
        config: The content of ``config.json``.
        expert_dtype: "fp4" or "fp8".
        scale_dtype: "F8_E8M0", or "F32" as in the base models.

    Raises:
        ValueError: a size is missing or not a multiple of a block.
    """
    _check_sizes("released_tensors", config)
    return dict(_tensors("released_tensors", config, expert_dtype, scale_dtype))


def _tensors(
    op: str, config: Mapping[str, Any], expert_dtype: str, scale_dtype: str
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors one at a time, because a config with wrong sizes may imply very many
    tensors."""
    drafts = config.get("num_nextn_predict_layers") or 0
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    for name in ("embed", "head"):
        yield f"{name}.weight", TensorInfo("BF16", (vocabulary, width))
    yield "norm.weight", TensorInfo("BF16", (width,))
    yield from _head(config, "")
    for layer in range(config["num_hidden_layers"]):
        hashed, ratio = layer < config["num_hash_layers"], config["compress_ratios"][layer]
        for name, info in _block(op, config, ratio, hashed, expert_dtype, scale_dtype):
            yield f"layers.{layer}.{name}", info
    for draft in range(drafts):
        prefix = f"mtp.{draft}."
        for name, info in _block(op, config, 0, False, expert_dtype, scale_dtype):
            yield f"{prefix}{name}", info
        for name in ("e_proj", "h_proj"):
            yield from _fp8(op, f"{prefix}{name}", width, width, scale_dtype)
        for name in ("enorm", "hnorm", "norm"):
            yield f"{prefix}{name}.weight", TensorInfo("BF16", (width,))
        yield from _head(config, prefix)


_SIZES = (
    *("num_hidden_layers", "num_hash_layers", "vocab_size", "hidden_size"),
    *("hc_mult", "q_lora_rank", "o_groups", "num_attention_heads", "head_dim", "o_lora_rank"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
)
"""Sizes that every config must have."""

_INDEXER_SIZES = ("index_n_heads", "index_head_dim")
"""Sizes that a config with layers of ratio 4 must have as well."""


def _check_sizes(op: str, config: Mapping[str, Any]) -> None:
    check_sizes(op, config, _SIZES, zero=("num_hidden_layers", "num_hash_layers"))
    check_ratios(op, config)
    if 4 in config["compress_ratios"]:
        check_sizes(op, config, _INDEXER_SIZES)
    for name, least in (("num_nextn_predict_layers", 0), ("n_shared_experts", 1)):
        if config.get(name) is not None:
            check_size(op, name, config[name], least)


def _head(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, TensorInfo]]:
    streams, width = config["hc_mult"], config["hidden_size"]
    shapes = {"fn": (streams, streams * width), "base": (streams,), "scale": (1,)}
    for part, shape in shapes.items():
        yield f"{prefix}hc_head_{part}", TensorInfo("F32", shape)


def _block(
    op: str,
    config: Mapping[str, Any],
    ratio: int,
    hashed: bool,
    expert_dtype: str,
    scale_dtype: str,
) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors of a layer; ``ratio`` is the ratio of the layer's compressor, or 0 if it
    has none."""
    width, rank, groups = config["hidden_size"], config["q_lora_rank"], config["o_groups"]
    heads, dim = config["num_attention_heads"], config["head_dim"]
    o_rank, size = config["o_lora_rank"], config["moe_intermediate_size"]
    experts, streams = config["n_routed_experts"], config["hc_mult"]

    def bf16(name: str, *shape: int) -> tuple[str, TensorInfo]:
        return name, TensorInfo("BF16", shape)

    def f32(name: str, *shape: int) -> tuple[str, TensorInfo]:
        return name, TensorInfo("F32", shape)

    def fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorInfo]]:
        return _fp8(op, name, rows, columns, scale_dtype)

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
    expert = partial(_fp4, op) if expert_dtype == "fp4" else fp8
    for index in range(experts):
        for name, shape in sizes.items():
            yield from expert(f"ffn.experts.{index}.{name}", *shape)
    shared = size * (config.get("n_shared_experts") or 1)
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


def _fp8(
    op: str, name: str, rows: int, columns: int, scale_dtype: str
) -> Iterator[tuple[str, TensorInfo]]:
    _check_blocks(op, name, rows, WEIGHT_BLOCK)
    _check_blocks(op, name, columns, WEIGHT_BLOCK)
    yield f"{name}.weight", TensorInfo(E4M3, (rows, columns))
    yield f"{name}.scale", TensorInfo(scale_dtype, (rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK))


def _fp4(op: str, name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorInfo]]:
    _check_blocks(op, name, columns, FP4_BLOCK)
    yield f"{name}.weight", TensorInfo(FP4_PAIRS, (rows, columns // 2))
    yield f"{name}.scale", TensorInfo(E8M0, (rows, columns // FP4_BLOCK))


_BYTES = {"BF16": 2, "F32": 4, "I64": 8, FP4_PAIRS: 1, E4M3: 1, E8M0: 1}
_SPLIT_HEADS = ("attn.wq_b.", "attn.wo_a.", "attn.wo_b.", "attn.attn_sink", "ffn.shared_experts.")
"""Tensors of a layer that ``split_heads`` splits: those with a dimension of attention heads, and
the shared expert."""


def weight_bytes(
    config: Mapping[str, Any], *, num_gpus: int = 1, split_heads: bool = False
) -> dict[str, int]:
    """Compute the bytes of a loaded model's weights on each GPU, without the draft layer.

    Args:
        config: The content of ``config.json``, as released.
        num_gpus: Number of GPUs that share the routed experts and the rows of the output head. It
            must divide the number of experts and the vocabulary.
        split_heads: Whether the attention projections and the shared expert are split as well.
            Otherwise every GPU has all attention projections and the whole shared expert, as in
            Hugging Face's plans.

    Returns:
        Bytes by part: "experts", "attention" (projections, compressors and indexers), "shared
        experts" and "other" (embedding, head, routers, norms, hyper-connections). Norms count as
        float32, their dtype after loading.

    Raises:
        ValueError: a size is missing, or ``num_gpus`` does not divide the experts, the vocabulary
            or, with ``split_heads``, the groups of the output projection.
    """
    _check_sizes("weight_bytes", config)
    divided = {"n_routed_experts": config["n_routed_experts"], "vocab_size": config["vocab_size"]}
    if split_heads:
        divided["o_groups"] = config["o_groups"]
    for name, size in divided.items():
        if num_gpus < 1 or size % num_gpus:
            raise argument_error(
                "weight_bytes",
                "num_gpus",
                must=f"divide {name}, {size}",
                got=num_gpus,
                do="Pass a divisor of it",
            )
    sizes = dict.fromkeys(("experts", "attention", "shared experts", "other"), 0)
    expert_dtype = config.get("expert_dtype", "fp4")
    one = {**config, "n_routed_experts": 1}  # all experts are alike, and listing each takes seconds
    for name, info in released_tensors(one, expert_dtype=expert_dtype).items():
        if name.startswith("mtp."):
            continue
        size = prod(info.shape) * _BYTES["F32" if "norm.weight" in name else info.dtype]
        if any(part in name for part in (".experts.", ".gate.weight", ".gate.bias")):
            size *= config["n_routed_experts"]
        split = split_heads and any(part in name for part in _SPLIT_HEADS)
        if ".experts." in name or name == "head.weight" or split:
            size //= num_gpus
        sizes[_part(name)] += size
    return sizes


def _part(name: str) -> str:
    if ".shared_experts." in name:
        return "shared experts"
    if ".experts." in name:
        return "experts"
    return "attention" if ".attn." in name else "other"


def _check_blocks(op: str, name: str, size: int, block: int) -> None:
    if size % block != 0:
        raise argument_error(
            op,
            name,
            must=f"have sizes that are multiples of {block}",
            got=size,
            do="Correct the config",
        )


def check_checkpoint(
    path: Path | str, *, scales: bool = True, codes: bool = False
) -> CheckpointInfo:
    """Check the names, dtypes, shapes and scales of a released checkpoint.

    The check accepts DeepSeek-V4, V3.2, V3, R1, V2 and GLM-5 in FP8. Loaders check little: if a
    norm is missing, or a scale is missing, transposed or of another block size, they load wrong
    weights with at most a warning. A NaN in a scale or code makes every result NaN. Hugging Face's
    loader stores the scales of V4, and of other models whose config has ``scale_fmt="ue8m0"``, as
    bytes. The loader rounds float32 scales to powers of two, so for these models the check refuses
    scales that are not powers of two. For all other models, a scale may be 0 (for a block of
    zeros), but not negative.

    Args:
        path: The folder with ``config.json`` and either the shards and their index, or one file.
            The headers are always read.
        scales: Whether to read the scales, which are 1/20 of V4's bytes and 1/4000 of V3's bytes.
        codes: Whether to read FP8 codes and unquantised weights too, and refuse NaN and infinity.
            Every byte is then read once, 16 MiB at a time, except FP4 codes, which are always
            numbers. ``patch`` checks the codes of the modules that it patches, on the model's
            device.

    Returns:
        ``CheckpointInfo``.

    Raises:
        ValueError: a tensor or setting is not as released; the message names it.
        NotImplementedError: the checkpoint is of another architecture.
    """
    checks = Checks(OP)
    path = checks.path("path", path)
    checks.flag("scales", scales)
    checks.flag("codes", codes)
    config = read_json(path / CONFIG, OP)
    kind = config.get("model_type")
    if kind != V4 and kind not in mla_format.MODEL_TYPES:
        raise argument_error(
            OP,
            "config.model_type",
            must=f"be one of {V4}, {', '.join(mla_format.MODEL_TYPES)}",
            got=repr(kind),
            do="Checkpoints of other architectures are unknown",
            kind=NotImplementedError,
        )
    of_bytes = scale_format(OP, config) == "ue8m0"
    stored = read_headers(path, OP)
    check = _check_v4 if kind == V4 else _check_mla
    expert_dtype, scale_dtype, draft = check(config, stored, of_bytes)
    _check_values(stored, scales, codes, power_of_two=of_bytes or kind == V4)
    size = sum(each.stop - each.start for each in stored.values())
    names_experts = "expert_dtype" in config or "expert_dtype" in config["quantization_config"]
    return CheckpointInfo(
        len(stored), size, expert_dtype, scale_dtype, draft, names_experts, str(kind)
    )


def _check_v4(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], of_bytes: bool
) -> tuple[str, str, str]:
    """Check the headers of a V4 checkpoint; return the dtypes of experts and scales, and the kind
    of draft."""
    first = _require(stored, "layers.0.ffn.experts.0.w1.weight").info.dtype
    expert_dtype = "fp4" if first == FP4_PAIRS else "fp8"
    declared = config.get("expert_dtype")
    if declared not in (None, expert_dtype):
        raise argument_error(
            OP,
            "expert_dtype",
            must=f"be {expert_dtype!r} for experts of {first}",
            got=repr(declared),
            do="Correct config.json",
        )
    if expert_dtype == "fp4" and not of_bytes:
        raise argument_error(
            OP,
            "quantization_config.scale_fmt",
            must="be 'ue8m0' for experts in FP4",
            got=repr(scale_format(OP, config)),
            do="Correct config.json",
        )
    scale_dtype = _scale_dtype(OP, stored, "layers.0.attn.wq_a.scale")
    draft = _draft(stored)
    skipped_modules(OP, config)
    _check_sizes(OP, config)
    released = _tensors(OP, config, expert_dtype, scale_dtype)
    expected = (each for each in released if draft == "mtp" or not each[0].startswith("mtp."))
    _check_tensors(stored, expected, lambda name: draft == "dspark" and name.startswith("mtp."))
    return expert_dtype, scale_dtype, draft


def _check_mla(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], _: bool
) -> tuple[str, str, str]:
    """Check the headers of a checkpoint of another family; return the same values as
    ``_check_v4``."""
    expected = mla_format.mla_tensors(OP, config)
    _check_tensors(stored, expected, lambda name: mla_format.is_other(config, name))
    scales = (tensor.info.dtype for name, tensor in stored.items() if _is_scale(name))
    has_draft = any(mla_format.is_draft(config, name) for name in stored)
    return "fp8", next(scales, "none"), "mtp" if has_draft else "none"


def _check_tensors(
    stored: Mapping[str, StoredTensor],
    expected: Iterable[tuple[str, TensorInfo]],
    is_other: Callable[[str], bool],
) -> None:
    """Raise unless the files have exactly the expected tensors. Tensors for which ``is_other`` is
    True may be there too."""
    names = set()
    for name, info in expected:
        _check_tensor(name, info, _require(stored, name, info).info)
        names.add(name)
    unknown = [name for name in stored if name not in names and not is_other(name)]
    if unknown:
        raise argument_error(
            OP,
            "path",
            must="hold no tensor that the config has no place for",
            got=min(unknown),
            do="Correct config.json",
        )


def _require(
    stored: Mapping[str, StoredTensor],
    name: str,
    info: TensorInfo | None = None,
    *,
    op: str = OP,
) -> StoredTensor:
    if name not in stored:
        what = name if info is None else f"{name}, {info}"
        raise argument_error(op, "path", must=f"hold {what}", got="no such tensor", do=AGAIN)
    return stored[name]


def _check_tensor(name: str, expected: TensorInfo, actual: TensorInfo, *, op: str = OP) -> None:
    dtypes = expected.dtype.split(" or ")
    if actual.dtype in dtypes and actual.shape == expected.shape:
        return
    transposed = actual.dtype in dtypes and actual.shape == expected.shape[::-1]
    raise argument_error(
        op, name, must=f"be {expected}", got=actual, do="It is transposed" if transposed else AGAIN
    )


def draft_tensors(
    path: Path | str, *, kind: str = V4, op: str = OP
) -> tuple[str, dict[str, StoredTensor]]:
    """Check the headers of a released checkpoint's draft layer (MTP); read no tensor.

    Args:
        path: The folder with ``config.json`` and the index of the shards.
        kind: The ``model_type`` that the config must have.
        op: Public function that an error names.

    Returns:
        The prefix of the names of the draft layer's tensors, and these tensors by their names
        without the prefix. The prefix is "mtp.0." for V4; other families number the draft layer
        after the last layer.

    Raises:
        ValueError: the files hold no draft layer or several, or a tensor of the layer is missing,
            unknown, transposed or of another dtype or shape; the message names it.
        NotImplementedError: the draft is a DSpark draft, or the checkpoint is of another
            architecture.
    """
    path = Checks(op).path("path", path)
    config = read_json(path / CONFIG, op)
    if config.get("model_type") != kind:
        raise argument_error(
            op,
            "model_type",
            must=f"be {kind!r}",
            got=repr(config.get("model_type")),
            do="Pass the model's own checkpoint",
            kind=NotImplementedError,
        )
    if kind != V4:
        return _mla_draft_tensors(path, config, op)
    stored = read_headers(path, op, lambda name: name.startswith("mtp."))
    dspark = [name for name in stored if any(part in name for part in DSPARK)]
    if dspark:
        raise argument_error(
            op,
            "path",
            must="be of an MTP layer",
            got=f"{min(dspark)} of DSpark",
            do="DSpark's drafts are not implemented",
            kind=NotImplementedError,
        )
    prefix = "mtp.0."
    _check_one_draft(op, prefix, stored)
    expert = _require(stored, "mtp.0.ffn.experts.0.w1.weight", op=op).info.dtype
    scale = _scale_dtype(op, stored, "mtp.0.attn.wq_a.scale")
    settings = {**config, "num_hidden_layers": 0, "num_nextn_predict_layers": 1}
    _check_sizes(op, settings)
    dtypes = ("fp4" if expert == FP4_PAIRS else "fp8", scale)
    listed = _tensors(op, settings, *dtypes)
    expected = (each for each in listed if each[0].startswith(prefix))
    return prefix, _draft_tensors(op, prefix, stored, expected)


def _mla_draft_tensors(
    path: Path, config: Mapping[str, Any], op: str
) -> tuple[str, dict[str, StoredTensor]]:
    expected = list(mla_format.mla_draft_tensors(op, config))
    stored = read_headers(path, op, lambda name: mla_format.is_draft(config, name))
    prefix = mla_format.draft_prefix(config)
    _check_one_draft(op, prefix, stored)
    for name in (*stored,):
        if mla_format.is_skipped_draft(name.removeprefix(prefix)):
            del stored[name]
    return prefix, _draft_tensors(op, prefix, stored, expected)


def _check_one_draft(op: str, prefix: str, stored: Mapping[str, StoredTensor]) -> None:
    layer = prefix.rstrip(".")
    if not stored:
        raise argument_error(
            op,
            "path",
            must=f"hold a draft layer, {layer}",
            got="no tensor of it",
            do="Pass a checkpoint that has one",
        )
    others = [name for name in stored if not name.startswith(prefix)]
    if others:
        raise argument_error(
            op,
            "path",
            must=f"hold one draft layer, {layer}",
            got=min(others),
            do="Drafts of several layers are unknown",
            kind=NotImplementedError,
        )


def _draft_tensors(
    op: str,
    prefix: str,
    stored: Mapping[str, StoredTensor],
    expected: Iterable[tuple[str, TensorInfo]],
) -> dict[str, StoredTensor]:
    """Return the expected tensors by their names without the prefix; raise unless the files have
    exactly these tensors."""
    tensors = {}
    for name, info in expected:
        tensor = tensors[name.removeprefix(prefix)] = _require(stored, name, info, op=op)
        _check_tensor(name, info, tensor.info, op=op)
    unknown = [name for name in stored if name.removeprefix(prefix) not in tensors]
    if unknown:
        raise argument_error(
            op,
            "path",
            must="hold no tensor that a draft layer has no place for",
            got=min(unknown),
            do="It is of another model",
        )
    return tensors


def _scale_dtype(op: str, stored: Mapping[str, StoredTensor], name: str) -> str:
    dtype = _require(stored, name, op=op).info.dtype
    if dtype not in (E8M0, "F32"):
        raise argument_error(op, name, must=f"be {E8M0} or F32", got=dtype, do=AGAIN)
    return dtype


def _draft(stored: Mapping[str, StoredTensor]) -> str:
    names = [name for name in stored if name.startswith("mtp.")]
    if any(part in name for name in names for part in DSPARK):
        return "dspark"
    return "mtp" if names else "none"


def _is_scale(name: str) -> bool:
    return name.endswith((".scale", "_scale_inv"))


def _check_values(
    stored: Mapping[str, StoredTensor], scales: bool, codes: bool, *, power_of_two: bool
) -> None:
    """Check the values of scales, codes or both; read tensors in the order of their bytes."""
    buffer = bytearray(_CHUNK)
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].file, item[1].start)):
        dtype, scale = _DTYPES.get(tensor.info.dtype), _is_scale(name)
        if dtype is None or not (scales if scale else codes):
            continue
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            for start in range(tensor.start, tensor.stop, _CHUNK):
                part = memoryview(buffer)[: tensor.stop - start]
                stream.readinto(part)
                values = torch.frombuffer(part, dtype=dtype)
                check_values(OP, name, values, AGAIN, scale=scale, power_of_two=power_of_two)
