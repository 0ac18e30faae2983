"""Every error of every public function: its type and its exact text.

A message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import i32, i64
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.metadata import AttentionSpec

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(ops, name)
    for name in ops.__all__
    if callable(getattr(ops, name)) and not inspect.isclass(getattr(ops, name))
}
CALLABLES = {**FUNCTIONS, "AttentionSpec": AttentionSpec}

REQUESTS, TOKENS = 3, 5
TENSORS = {
    "query_start_loc": i32([0, 2, 4, 5]),
    "seq_lens": i32([9, 7, 4]),
    "query_lens": i32([2, 2, 1]),
    "block_table": i32([[7, 3], [2, 5], [1, 4]]),
    "positions": i64([7, 8, 5, 6, 3]),
    "req_indices": i32([0, 0, 1, 1, 2]),
    "slot_mapping": i64([0, 1, 2, 3, 4]),
    "topk_indices": i32([[0, -1]] * 5),
    "chunk": i32([0, 3, 0, 5]),
}
SHAPES = {
    "query_start_loc": "[num_reqs + 1]",
    "seq_lens": "[num_reqs]",
    "query_lens": "[num_reqs]",
    "block_table": "[num_reqs, max_blocks]",
    "positions": "[num_tokens]",
    "req_indices": "[num_tokens]",
    "slot_mapping": "[num_tokens]",
    "topk_indices": "[num_tokens, topk]",
    "chunk": "[4]",
}
NUMBERS = {
    "decode_threshold": 1,
    "num_tokens": TOKENS,
    "compress_ratio": 4,
    "next_n": 2,
    "block_size": 64,
    "window_size": 8,
    "cp_world_size": 2,
    "cp_interleave": 4,
    "max_compressed": 2,
    "workspace_size": 64,
    "max_logits_bytes": 4096,
    "max_chunks": 3,
    "request_offset": 0,
    "num_reqs": REQUESTS,
    "max_seq_len": 9,
    "require_uniform": False,
}


def valid_arguments(name: str) -> dict[str, Any]:
    """Arguments that the function takes, to spoil one of."""
    if name == "AttentionSpec":
        return {}
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    return {key: TENSORS[key].clone() if key in TENSORS else NUMBERS[key] for key in parameters}


def error_of(name: str, **spoiled: Any) -> Exception:
    """The error of the function; makes sure that it came before anything was written."""
    arguments = {**valid_arguments(name), **spoiled}
    before = {
        key: (value, value.clone(), value._version)
        for key, value in arguments.items()
        if isinstance(value, Tensor)
    }
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller compares type and text
        CALLABLES[name](**arguments)
    for key, (value, copy, version) in before.items():
        assert arguments[key] is value
        assert value._version == version, f"{key} was written to"
        assert value.is_meta or torch.equal(value, copy), f"{key} was written to"
    return caught.value


INT32_NOT_INT64 = "must be torch.int32, got torch.int64. Cast it with .to(torch.int32)."
INT64_NOT_INT32 = "must be torch.int64, got torch.int32. Cast it with .to(torch.int64)."
NEED_TENSOR = "Pass a torch.int32 tensor."
ONE = "Pass a tensor of 1 dimension."
TWO = "Pass a tensor of 2 dimensions."
HOST = "Pass a Python int that is known on the host, never a tensor."
AGREE_REQS = (
    "Make them agree: num_reqs counts the requests of the batch, padding requests included."
)
AGREE_TOKENS = "Make them agree: num_tokens counts the tokens of the padded batch."
MOVE = "Move all tensors of a call to one device."
NO_START = "must have shape [num_reqs + 1], got [0]. Pass at least 1 entry, even for an empty batch."
LIMIT = "num_reqs must be at most 16383, got 16384. Split the batch."
AT_LEAST_0 = "must be at least 0, got -1. Pass 0 or more."
AT_LEAST_1 = "must be at least 1, got 0. Pass 1 or more."
AT_LEAST_4 = "must be at least 4, got 3. Pass 4 or more."

LONG = i64([0, 2, 4])
INT = i32([0, 2, 4, 5, 6])
COLUMN = i32([[0], [2], [4]])
ONLY_TWO = i32([4, 4])
NOTHING = i32([])
TOO_MANY = torch.zeros(16384, dtype=torch.int32)
TOO_MANY_STARTS = torch.zeros(16385, dtype=torch.int32)


def meta(name: str) -> Tensor:
    return TENSORS[name].to("meta")


Row = tuple[str, dict[str, Any], type[Exception], str]

START_AND_LENS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query_start_loc": [0, 2]}, TypeError, "query_start_loc must be a tensor, got list."),
]


def rows_of_batch(name: str) -> list[Row]:
    """Errors that every function of query_start_loc and seq_lens has."""
    start, lens = "query_start_loc", "seq_lens"
    agree = f"must have shape [num_reqs] with num_reqs = 3 as in {start}"
    return [
        (name, {start: [0, 2]}, TypeError, f"{start} must be a tensor, got list. {NEED_TENSOR}"),
    ]
