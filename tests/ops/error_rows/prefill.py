"""Rows of ``error_rows.TABLE`` for sparse MLA's prefill and plan, and valid calls of both."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.helpers import i32
from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.mla import CACHES, LENS, SINK, Q, column_rows, pages
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid

MANY = torch.zeros(16384, dtype=torch.int32)

OWN |= {
    "sparse_mla_prefill": {
        "q": Q,
        "swa_cache": pages("swa"),
        "swa_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_swa_blocks]"),
        "extra_cache": pages("extra"),
        "extra_block_table": Valid(i32([[3], [0], [-1]]), "[num_reqs, max_extra_blocks]"),
        "attn_sink": SINK,
    },
    "sparse_mla_plan": {"swa_lens": LENS, "extra_lens": LENS},
}
NUMBERS |= {"num_heads": 64, "num_programs": 132}


def missing_rows() -> Iterator[Entry]:
    """A cache without its table and the reverse; a selection of the rows of no cache."""
    names = ("extra_cache", "extra_block_table", "topk_indices")
    for what, given, partner in (
        ("extra_cache without its table", (0,), 1),
        ("extra_cache and topk_indices, but no table", (0, 2), 1),
        ("extra_block_table without its cache", (1,), 0),
        ("extra_block_table and topk_indices, but no cache", (1, 2), 0),
        ("topk_indices alone", (2,), 0),
    ):
        nothing = {name: None for place, name in enumerate(names) if place not in given}
        text = f"{names[given[0]]} must be None without {names[partner]}, got a tensor. "
        yield what, nothing, ValueError, f"{text}Pass both or neither."


def unused_number_rows() -> Iterator[Entry]:
    """Numbers about a cache that is not there."""
    names = ("extra_cache", "extra_block_table", "topk_indices")
    nothing: dict[str, Any] = dict.fromkeys(names)
    for name in ("extra_block_size", "compress_ratio"):
        text = f"{name} must be at least 1, got 0. Pass 1 or more."
        yield f"no extra cache, and {name} 0", {**nothing, name: 0}, ValueError, text
        text = f"{name} must be an int, got str. "
        text += "Pass a Python int that is known on the host, never a tensor."
        yield f"no extra cache, and {name} a str", {**nothing, name: "2"}, TypeError, text


def batch_rows() -> Iterator[Entry]:
    """Tokens and tables that an int64 position per token and an int32 entry each are not."""
    text = "Make them agree: num_tokens counts the tokens of the padded batch."
    for name, value in (
        ("positions", torch.zeros(4, dtype=torch.int64)),
        ("req_indices", i32([0] * 4)),
        ("topk_indices", i32([[0, 1]] * 4)),
    ):
        shape = "[num_tokens, topk]" if name == "topk_indices" else "[num_tokens]"
        rule = f"{name} must have shape {shape} with num_tokens = 5 as in q, "
        got = f"got {list(value.shape)}. {text}"
        yield f"{name} of fewer tokens", {name: value}, ValueError, rule + got
    yield (
        "a table of fewer requests",
        {"extra_block_table": i32([[3], [0]])},
        ValueError,
        "extra_block_table must have shape [num_reqs, max_extra_blocks] with num_reqs = 3 as in "
        "swa_block_table, got [2, 1]. "
        "Make them agree: num_reqs counts the requests of the batch, padding requests included.",
    )


def plan_rows() -> Iterator[Entry]:
    text = "num_tokens must be at most 16383, got 16384. Split the batch."
    yield "too many tokens", {"swa_lens": MANY, "extra_lens": MANY}, ValueError, text
    alone = {"swa_lens": MANY, "extra_lens": None}
    yield "too many tokens with only a window", alone, ValueError, text
    text = "extra_lens must have shape [num_tokens] with num_tokens = 5 as in swa_lens, got [4]. "
    text += "Make them agree: num_tokens counts the tokens of the padded batch."
    yield "extra_lens of fewer tokens", {"extra_lens": LENS.value[:4]}, ValueError, text


PREFILL_TABLE: dict[str, list[Entry]] = {
    "sparse_mla_prefill": [
        *CACHES,
        *column_rows("topk_indices", "topk"),
        *missing_rows(),
        *unused_number_rows(),
        *batch_rows(),
    ],
    "sparse_mla_plan": [*plan_rows()],
}
