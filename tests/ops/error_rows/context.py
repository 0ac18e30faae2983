"""Rows of chunked contexts and of sequences on several ranks."""

import torch

from tests.helpers import i32
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.rope import bf16
from tests.ops.error_rows.valid import COUNTS, MINIMUM, NUMBERS, OWN, Valid

FLOATS = "torch.bfloat16 or torch.float16 or torch.float32"
OUT = Valid(bf16(5, 4, 8), "[num_tokens, num_heads, width]", FLOATS)
LSE = Valid(torch.ones(5, 4), "[num_tokens, num_heads]")
# allowed dtypes of a tensor that must have the dtype of an earlier tensor
FOLLOWS = "torch.bfloat16"

OWN |= {
    **{op: {"context_lens": Valid(i32([9, 0, 4]), "[num_reqs]")}
     for op in ("context_chunks", "plan_context_chunks")},
    "merge_attn_states": {"prefix_out": OUT, "prefix_lse": LSE, "suffix_out": OUT,
     "suffix_lse": LSE},
    "merge_states": {"outs": Valid(bf16(3, 5, 4, 8), "[num_parts, num_tokens, num_heads, width]",
     FLOATS), "lses": Valid(torch.ones(3, 5, 4), "[num_parts, num_tokens, num_heads]")},
    "mla_prefill": {"q": Valid(bf16(5, 4, 12), "[num_tokens, num_heads, qk_head_dim]", FLOATS),
     "k_nope": Valid(bf16(7, 4, 8), "[num_k, num_heads, qk_nope_head_dim]", FOLLOWS),
     "k_pe": Valid(bf16(7, 4), "[num_k, qk_rope_head_dim]", FOLLOWS),
     "v": Valid(bf16(7, 4, 6), "[num_k, num_heads, v_head_dim]", FOLLOWS)},
    "cp_slot_mapping": {"cp_rank": Valid(i32([1]), "[1]")},
    "cp_row_indices": {"req_indices": Valid(i32([0, 0, 1, 1, 2]), "[num_rows]"),
     "positions": Valid(torch.arange(5), "[num_rows]"),
     "local_starts": Valid(i32([0, 2, 0]), "[num_reqs]"),
     "local_cu_seq_lens": Valid(i32([0, 1, 2, 3]), "[num_reqs + 1]")},
    "cp_topk": {"scores": Valid(torch.ones(2, 5, 3), "[cp_world_size, num_tokens, num_candidates]"),
     "rows": Valid(torch.ones(2, 5, 3).int(), "[cp_world_size, num_tokens, num_candidates]")},
    "cp_local_rows": {"rows": Valid(torch.ones(5, 3).int(), "[num_tokens, topk]"),
     "cp_rank": Valid(i32([1]), "[1]")},
    "cp_correct_out": {"out": OUT, "lse": LSE,
     "lses": Valid(torch.ones(2, 5, 4), "[cp_world_size, num_tokens, num_heads]")},
}  # fmt: skip
NUMBERS |= {"causal": True, "num_local_rows": 10}
NUMBERS |= {"max_context_tokens": 90, "max_model_len": 50, "max_num_seqs": 3}
MINIMUM |= {"max_context_tokens": 0}
COUNTS |= {
    "num_k": "the gathered keys",
    "num_parts": "the parts of the keys",
    "cp_world_size": "the ranks that share a sequence",
    "num_candidates": "the rows that a rank found",
    "num_rows": "the rows of the result",
}

BASES = [*says.word_rows("lse_base", "the log-sum-exps have", "e", "2")]
PLANS = [
    *says.word_rows("chunk_plan", "the chunks are read by", "packed", "equal"),
    says.wrong("workspace_rows", "be at least cp_world_size * cp_interleave = 8",
     7, "Raise it, or lower cp_interleave"),
]  # fmt: skip


def equal_row(num_reqs: int) -> says.Entry:
    must = f"be at least {64 * num_reqs} for an equal plan of {num_reqs} contexts"
    do = "Raise it, or pass chunk_plan='packed'"
    return says.wrong("workspace_rows", must, 20, do, chunk_plan="equal")


def host_rows(name: str) -> list[says.Entry]:
    """Return rows for invalid lengths on the host."""
    none, convert = "Give padding requests length 0", "Convert the lengths with int()"
    return [
        says.wrong(name, "be non-negative", "-1 at index 1", none, **{name: [3, -1]}),
        says.wrong(name, "be non-negative", "-1 at index 2", none, **{name: i32([3, 0, -1])}),
        *[says.wrong(name, "hold ints", f"{kind} at index 0", convert, TypeError, **{name: [value]})
         for kind, value in (("float", 2.0), ("bool", True))],
    ]  # fmt: skip


TABLE: dict[str, list[says.Entry]] = {
    "context_chunks": PLANS,
    "plan_context_chunks": [*PLANS, *host_rows("context_lens"), equal_row(2)],
    "max_context_chunks": [*PLANS, equal_row(3)],
    "merge_attn_states": BASES,
    "merge_states": [
        *BASES,
        says.at_least("num_parts", 1, 0, outs=bf16(0, 5, 4, 8), lses=torch.ones(0, 5, 4)),
    ],
    "mla_prefill": [
        *says.float_rows("softmax_scale", 0),
        *says.flag_rows("causal"),
        says.wrong("q", "have qk_nope_head_dim + qk_rope_head_dim = 12 columns",
         8, "Pass [nope | rope] of each head", q=bf16(5, 4, 8)),
        says.too_many(query_start_loc=i32([0] * 16385), cu_seq_lens=i32([0] * 16385)),
    ],
    "cp_slot_mapping": [says.exactly("cp_rank", "[1]", i32([0, 1, 0]), 0)],
    "cp_row_indices": [says.no_entry("local_cu_seq_lens")],
    "cp_topk": [
        says.at_least("cp_world_size", 1, 0, scores=torch.ones(0, 5, 3),
         rows=torch.ones(0, 5, 3).int()),
    ],
    "cp_local_rows": [says.exactly("cp_rank", "[1]", i32([0, 1, 0, 1, 0]), 0)],
    "cp_correct_out": [*BASES, says.at_least("cp_world_size", 1, 0, lses=torch.ones(0, 5, 4))],
}  # fmt: skip
