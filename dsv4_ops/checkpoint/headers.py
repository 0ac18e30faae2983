"""Read the headers of safetensors files and the index of a checkpoint's shards, but no tensors.

The checks are as strict as safetensors itself, so that a broken header fails here and not in a
loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from dsv4_ops.core.errors import argument_error

CONFIG = "config.json"
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
"""The index of the shards, and the single file with all tensors. If both exist, loaders read the
single file."""
AGAIN = "Download the file again, or convert it from the released one"

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits per value, by dtype name."""
_ENTRY = {"dtype", "shape", "data_offsets"}
_MOST_HEADER_BYTES = 100_000_000
_MOST_VALUES = 1 << 56


class TensorInfo(NamedTuple):
    """The dtype (safetensors' name) and the shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class StoredTensor(NamedTuple):
    """A tensor and the position of its bytes in a shard."""

    info: TensorInfo
    file: Path
    start: int
    stop: int


def read_headers(
    path: Path, op: str, selects: Callable[[str], bool] = lambda _: True
) -> dict[str, StoredTensor]:
    """Read the headers of the files that a loader opens.

    Args:
        path: The folder.
        op: Public function that an error names.
        selects: Function of a tensor's name that says whether to return the tensor. Shards without
            a selected tensor are not opened.

    Returns:
        The selected tensors, by name.

    Raises:
        ValueError: a file is missing or broken, a tensor is not in the shard that the index names,
            or a tensor is in two shards.
    """
    if (path / WHOLE).is_file():
        whole = read_header(path / WHOLE, op)
        return {name: tensor for name, tensor in whole.items() if selects(name)}
    shards = {name: file for name, file in read_index(path, op).items() if selects(name)}
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shards.values())):
        for name, tensor in read_header(path / shard, op).items():
            if name in tensors:
                raise argument_error(
                    op,
                    name,
                    must="be in one shard",
                    got=f"{tensors[name].file.name} and {shard}",
                    do=AGAIN,
                )
            if selects(name):
                tensors[name] = tensor
    for name, shard in shards.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise argument_error(
                op,
                name,
                must=f"be in {shard}, as the index says",
                got=tensors[name].file.name if name in tensors else "none",
                do=AGAIN,
            )
    return tensors


def read_index(path: Path, op: str) -> dict[str, str]:
    """Return the shard of each tensor, from the index.

    Raises:
        ValueError: the index is missing or broken, or one of its shards is missing.
    """
    index = read_json(path / INDEX, op)
    shards = index.get("weight_map")
    if not isinstance(shards, dict):
        raise argument_error(op, INDEX, must="hold a weight_map", got="none", do=AGAIN)
    if not isinstance(index.get("metadata"), dict):  # Hugging Face requires metadata
        raise argument_error(op, INDEX, must="hold metadata", got="none", do=AGAIN)
    files = {each.name for each in path.iterdir() if each.is_file()}
    for name, shard in shards.items():
        if not isinstance(shard, str):
            raise argument_error(
                op, INDEX, must=f"name the file of {name}", got=type(shard).__name__, do=AGAIN
            )
        if shard not in files:
            raise argument_error(
                op,
                "path",
                must="hold every shard of its index",
                got=f"no {shard}",
                do="Download the shard",
            )
    return shards


def read_json(file: Path, op: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: the file is missing or broken.
    """
    if not file.is_file():
        raise argument_error(
            op,
            "path",
            must=f"hold {file.name}",
            got=file.parent,
            do="Pass the folder of a checkpoint",
        )
    return _object(op, file.name, file.read_bytes())


def read_header(file: Path, op: str) -> dict[str, StoredTensor]:
    """Read the header of a file; return its tensors in the order of their bytes.

    Raises:
        ValueError: the header is broken, or contradicts itself or the file's length.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        file_size = file.stat().st_size
        if not 0 < size <= min(file_size - 8, _MOST_HEADER_BYTES):
            raise argument_error(
                op,
                file.name,
                must="begin with the size of its header",
                got=f"{size} in {file_size} bytes",
                do=AGAIN,
            )
        entries = _object(op, file.name, stream.read(size))
    _check_metadata(op, file.name, entries.pop("__metadata__", {}))
    first = stop = 8 + size
    tensors = [_stored(op, file, first, name, entry) for name, entry in entries.items()]
    in_order: dict[str, StoredTensor] = {}
    for name, tensor in sorted(tensors, key=lambda each: (each[1].start, each[1].stop)):
        if tensor.start != stop:
            raise argument_error(
                op,
                name,
                must=f"begin at byte {stop - first}, where the tensor before it ends",
                got=tensor.start - first,
                do=AGAIN,
            )
        in_order[name], stop = tensor, tensor.stop
    if file_size != stop:
        raise argument_error(
            op, file.name, must="be as long as its header says", got=f"{file_size} bytes", do=AGAIN
        )
    return in_order


def _stored(op: str, file: Path, first: int, name: str, entry: Any) -> tuple[str, StoredTensor]:
    """Return the name and position of a tensor from its header entry; the file's data begin at byte
    ``first``."""
    fields = entry if isinstance(entry, dict) and entry.keys() == _ENTRY else {}
    dtype, shape, offsets = (fields.get(part) for part in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets, 2):
        raise argument_error(
            op,
            name,
            must="have a dtype, a shape and two data_offsets in its header",
            got=_short(entry),
            do=AGAIN,
        )
    if dtype not in _BITS:
        raise argument_error(
            op, name, must="be of a dtype that safetensors has", got=_short(dtype), do=AGAIN
        )
    if prod(max(size, 1) for size in shape) >= _MOST_VALUES:  # libraries use 64-bit counts
        raise argument_error(
            op, name, must=f"have fewer than {_MOST_VALUES} values", got=_short(shape), do=AGAIN
        )
    info, (start, stop) = TensorInfo(dtype, tuple(shape)), offsets
    bits = prod(shape) * _BITS[dtype]
    if bits != 8 * (stop - start):
        raise argument_error(
            op,
            name,
            must=f"have data_offsets of {bits / 8:g} bytes, as {info} takes",
            got=stop - start,
            do=AGAIN,
        )
    return name, StoredTensor(info, file, first + start, first + stop)


def _are_sizes(values: Any, count: int | None = None) -> TypeGuard[list[int]]:
    """Whether ``values`` is a list of sizes, and has ``count`` entries if ``count`` is not None."""
    if not isinstance(values, list) or count not in (None, len(values)):
        return False
    return all(type(each) is int and each >= 0 for each in values)


def _check_metadata(op: str, name: str, metadata: Any) -> None:
    if not isinstance(metadata, Mapping) or not all(
        isinstance(each, str) for each in metadata.values()
    ):
        raise argument_error(
            op, name, must="have __metadata__ of texts", got=_short(metadata), do=AGAIN
        )


def _object(op: str, name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode(), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise argument_error(op, name, must="be JSON", got=_short(str(error)), do=AGAIN) from error
    if not isinstance(value, dict):
        raise argument_error(
            op, name, must="hold names and values", got=type(value).__name__, do=AGAIN
        )
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs; refuse duplicate names, which parsers treat differently."""
    for text in (each for pair in pairs for each in pair if isinstance(each, str)):
        text.encode()  # raises for half of a surrogate pair
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name that is there twice")
    return result


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
