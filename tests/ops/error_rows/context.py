"""Rows of ``error_rows.TABLE`` for chunked contexts and for sequences on several ranks."""

from collections.abc import Iterator

import torch

from tests.helpers import i32
from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.rope import bf16, float_rows
from tests.ops.error_rows.sparse import flag_rows
from tests.ops.error_rows.valid import COUNTS, MINIMUM, NUMBERS, OWN, Valid

FLOATS = "torch.bfloat16 or torch.float16 or torch.float32"
OUT = Valid(bf16(5, 4, 8), "[num_tokens, num_heads, width]", FLOATS)
LSE = Valid(torch.ones(5, 4), "[num_tokens, num_heads]")
# of a tensor whose dtype is that of another one, before it
FOLLOWS = "torch.bfloat16"

OWN |= {
    "context_chunks": {"context_lens": Valid(i32([9, 0, 4]), "[num_reqs]")},
    "plan_context_chunks": {"context_lens": Valid(i32([9, 0, 4]), "[num_reqs]")},
    "merge_attn_states": {
        "prefix_out": OUT,
        "prefix_lse": LSE,
        "suffix_out": OUT,
        "suffix_lse": LSE,
    },
    "merge_states": {
        "outs": Valid(bf16(3, 5, 4, 8), "[num_parts, num_tokens, num_heads, width]", FLOATS),
        "lses": Valid(torch.ones(3, 5, 4), "[num_parts, num_tokens, num_heads]"),
    },
    "mla_prefill": {
        "q": Valid(bf16(5, 4, 12), "[num_tokens, num_heads, qk_head_dim]", FLOATS),
        "k_nope": Valid(bf16(7, 4, 8), "[num_k, num_heads, qk_nope_head_dim]", FOLLOWS),
        "k_pe": Valid(bf16(7, 4), "[num_k, qk_rope_head_dim]", FOLLOWS),
        "v": Valid(bf16(7, 4, 6), "[num_k, num_heads, v_head_dim]", FOLLOWS),
    },
    "cp_slot_mapping": {"cp_rank": Valid(i32([1]), "[1]")},
    "cp_row_indices": {
        "req_indices": Valid(i32([0, 0, 1, 1, 2]), "[num_rows]"),
        "positions": Valid(torch.arange(5), "[num_rows]"),
        "local_starts": Valid(i32([0, 2, 0]), "[num_reqs]"),
        "local_cu_seq_lens": Valid(i32([0, 1, 2, 3]), "[num_reqs + 1]"),
    },
    "cp_topk": {
        "scores": Valid(torch.ones(2, 5, 3), "[cp_world_size, num_tokens, num_candidates]"),
        "rows": Valid(torch.ones(2, 5, 3).int(), "[cp_world_size, num_tokens, num_candidates]"),
    },
    "cp_local_rows": {
        "rows": Valid(torch.ones(5, 3).int(), "[num_tokens, topk]"),
        "cp_rank": Valid(i32([1]), "[1]"),
    },
    "cp_correct_out": {
        "out": OUT,
        "lse": LSE,
        "lses": Valid(torch.ones(2, 5, 4), "[cp_world_size, num_tokens, num_heads]"),
    },
}
NUMBERS |= {
    "causal": True,
    "max_context_tokens": 90,
    "max_model_len": 50,
    "max_num_seqs": 3,
    "num_local_rows": 10,
}
MINIMUM |= {"max_context_tokens": 0}
COUNTS |= {
    "num_k": "the gathered keys",
    "num_parts": "the parts of the keys",
    "cp_world_size": "the ranks that share a sequence",
    "num_candidates": "the rows that a rank found",
    "num_rows": "the rows of the result",
}


def word_rows(name: str, belongs_to: str, *allowed: str) -> Iterator[Entry]:
    """A setting that is a word, but no str, or another word."""
    text = f"{name} must be a str, got int. Pass the {name} that {belongs_to}."
    yield f"{name} is an int", {name: 2}, TypeError, text
    words = " or ".join(repr(each) for each in allowed)
    text = f"{name} must be {words}, got 'ragged'. Pass the {name} that {belongs_to}."
    yield f"another {name}", {name: "ragged"}, ValueError, text


def base_rows() -> Iterator[Entry]:
    return word_rows("lse_base", "the log-sum-exps have", "e", "2")


def plan_rows() -> Iterator[Entry]:
    yield from word_rows("chunk_plan", "the chunks are read by", "packed", "equal")
    yield (
        "less than a round of the ranks",
        {"workspace_rows": 7},
        ValueError,
        "workspace_rows must be at least cp_world_size * cp_interleave = 8, got 7. Raise it, or "
        "lower cp_interleave.",
    )


def equal_row(num_reqs: int) -> Entry:
    least = 64 * num_reqs
    return (
        "less than a block for every request",
        {"chunk_plan": "equal"},
        ValueError,
        f"workspace_rows must be at least {least} for an equal plan of {num_reqs} contexts, got "
        "20. Raise it, or pass chunk_plan='packed'.",
    )


def host_rows() -> Iterator[Entry]:
    """Lengths on the host that are none."""
    advice = "Give padding requests length 0."
    text = f"context_lens must be non-negative, got -1 at index 1. {advice}"
    yield "a length below 0", {"context_lens": [3, -1]}, ValueError, text
    for value in (2.0, True):
        text = f"context_lens must hold ints, got {type(value).__name__} at index 0. "
        text += "Convert the lengths with int()."
        yield f"a length of {value}", {"context_lens": [value]}, TypeError, text


CONTEXT_TABLE: dict[str, list[Entry]] = {
    "context_chunks": [*plan_rows()],
    "plan_context_chunks": [*plan_rows(), *host_rows(), equal_row(2)],
    "max_context_chunks": [*plan_rows(), equal_row(3)],
    "mla_workspace_rows": [
        (
            "no sequence",
            {"max_num_seqs": 0},
            ValueError,
            "max_num_seqs must be at least 1, got 0. Pass 1 or more.",
        )
    ],
    "merge_attn_states": [*base_rows()],
    "merge_states": [
        *base_rows(),
        (
            "no part",
            {"outs": bf16(0, 5, 4, 8), "lses": torch.ones(0, 5, 4)},
            ValueError,
            "num_parts must be at least 1, got 0. Pass 1 or more.",
        ),
    ],
    "mla_prefill": [
        *float_rows("softmax_scale", 0),
        *flag_rows("causal"),
        (
            "keys without RoPE only",
            {"q": bf16(5, 4, 8)},
            ValueError,
            "q must have qk_nope_head_dim + qk_rope_head_dim = 12 columns, got 8. "
            "Pass [nope | rope] of each head.",
        ),
        (
            "too many requests",
            {"query_start_loc": torch.zeros(16385).int(), "cu_seq_lens": torch.zeros(16385).int()},
            ValueError,
            "num_reqs must be at most 16383, got 16384. Split the batch.",
        ),
    ],
    "cp_slot_mapping": [
        (
            "a rank for every token",
            {"cp_rank": i32([0, 1, 0])},
            ValueError,
            "cp_rank must have shape [1], got [3]. Pass exactly 1 entries in dimension 0.",
        ),
    ],
    "cp_row_indices": [
        (
            "no start",
            {"local_cu_seq_lens": i32([])},
            ValueError,
            "local_cu_seq_lens must have shape [num_reqs + 1], got [0]. "
            "Pass at least 1 entry, even for an empty batch.",
        ),
    ],
    "cp_topk": [
        (
            "no rank",
            {"scores": torch.ones(0, 5, 3), "rows": torch.ones(0, 5, 3).int()},
            ValueError,
            "cp_world_size must be at least 1, got 0. Pass 1 or more.",
        ),
    ],
    "cp_local_rows": [
        (
            "a rank for every token",
            {"cp_rank": i32([0, 1, 0, 1, 0])},
            ValueError,
            "cp_rank must have shape [1], got [5]. Pass exactly 1 entries in dimension 0.",
        ),
    ],
    "cp_correct_out": [
        *base_rows(),
        (
            "no rank",
            {"lses": torch.ones(0, 5, 4)},
            ValueError,
            "cp_world_size must be at least 1, got 0. Pass 1 or more.",
        ),
    ],
}
