"""A valid call of every public function, which ``all_rows.py`` makes invalid."""

from typing import Any, NamedTuple

import torch

from dsv4_ops.core.layout import IndexerLayout, Layout, MainLayout, PlainLayout
from tests.helpers import i32, i64


class Valid(NamedTuple):
    """A valid argument, in most cases a tensor; the words of its errors for shape and dtypes, and
    the advice in its errors."""

    value: Any
    shape: str
    dtypes: str = ""
    layout: str = ""
    advice: str = ""
    any_rank: bool = False


TOPK = i32([[0, -1]] * 5)
# valid tensors in all functions, unless OWN has others
TENSORS = {
    "query_start_loc": Valid(i32([0, 2, 4, 5]), "[num_reqs + 1]"),
    "cu_seq_lens": Valid(i32([0, 2, 4, 5]), "[num_reqs + 1]"),
    "seq_lens": Valid(i32([9, 7, 4]), "[num_reqs]"),
    "gather_lens": Valid(i32([2, 0, 1]), "[num_reqs]"),
    "query_lens": Valid(i32([2, 2, 1]), "[num_reqs]"),
    "block_table": Valid(i32([[7, 3], [2, 5], [1, 4]]), "[num_reqs, max_blocks]"),
    "positions": Valid(i64([7, 8, 5, 6, 3]), "[num_tokens]"),
    "req_indices": Valid(i32([0, 0, 1, 1, 2]), "[num_tokens]"),
    "slot_mapping": Valid(i64([0, 1, 2, 3, 4]), "[num_tokens]"),
    "topk_indices": Valid(TOPK, "[num_tokens, topk]"),
    "chunk": Valid(i32([0, 3, 0, 5]), "[4]"),
    "out": Valid(torch.ones(3, 4, 512, dtype=torch.bfloat16), "[num_reqs, num_rows, 512]"),
    "decode_swa_indices": Valid(i32([[9] * 8] * 2), "[num_decode_tokens, swa_width]"),
    "decode_compressed_indices": Valid(i32([[3] * 3] * 2), "[num_decode_tokens, compressed_width]"),
    "decode_compressed_lens": Valid(i32([3, 1]), "[num_decode_tokens]"),
    "prefill_topk_indices": Valid(i32([[0, -1]] * 3), "[num_prefill_tokens, columns]"),
    "swa_block_table": Valid(i32([[7, 3], [2, 5], [1, 4]]), "[num_reqs, max_blocks]"),
    "compressed_block_table": Valid(i32([[1], [0], [2]]), "[num_reqs, max_compressed_blocks]"),
}


def keys(width: int, shape: str) -> Valid:
    return Valid(torch.ones(5, width, dtype=torch.bfloat16), shape)


def cache(layout: Layout, shape: str, dtypes: str = "torch.uint8") -> Valid:
    advice = f"Allocate it with {type(layout).__name__}(block_size).allocate(num_blocks)"
    return Valid(layout.allocate(4), shape, dtypes, layout.tag, advice)


MAIN = cache(MainLayout(64), "[num_blocks, page_bytes]")
INDEXER = cache(IndexerLayout(64), "[num_blocks, page_bytes]")
PLAIN = cache(PlainLayout(64), "[num_blocks, block_size, width]", "torch.bfloat16 or torch.float32")

INSERTS = ("quantize_and_insert_k_cache", "quantize_and_insert_indexer_k", "insert_k_cache")

# op -> tensors with another meaning than in other ops
OWN: dict[str, dict[str, Valid]] = {
    "quantize_and_insert_k_cache": {"k": keys(512, "[num_rows, 512]"), "k_cache": MAIN},
    "quantize_and_insert_indexer_k": {"k": keys(128, "[num_rows, 128]"), "k_cache": INDEXER},
    "insert_k_cache": {"k": keys(512, "[num_rows, width]"), "k_cache": PLAIN},
    "dequantize_and_gather_k_cache": {"k_cache": MAIN},
    "gather_k_cache": {"k_cache": MAIN},
    "gather_indexer_k": {"k_cache": INDEXER},
    "combine_topk_swa_indices": {"topk_indices": Valid(TOPK, "[num_tokens, columns]")},
}
NUMBERS = {
    **{"block_size": 64, "swa_block_size": 64, "compressed_block_size": 32, "workspace_size": 64},
    **{"swa_block_span": 73, "compressed_block_span": 32, "max_logits_bytes": 4096, "next_n": 2},
    **{"compress_ratio": 4, "cp_interleave": 4, "cp_world_size": 2, "decode_threshold": 1},
    **{"max_chunks": 3, "max_compressed": 2, "max_seq_len": 9, "num_reqs": 3, "num_rows": 4},
    **{"num_tokens": 5, "offset": 1, "request_offset": 0, "swa_offset": 8, "topk": 2},
    **{"window_size": 8, "workspace_rows": 20},
    **{"decode_compressed_indices_are_local": False, "require_uniform": False},
}
# minimum of a number; 1 for all other numbers
MINIMUM = {"compressed_block_span": 32, "max_logits_bytes": 4, "swa_block_span": 64}
MINIMUM |= dict.fromkeys(("max_seq_len", "num_reqs", "num_rows", "num_tokens", "offset"), 0)
MINIMUM |= dict.fromkeys(("request_offset", "swa_offset", "topk"), 0)
# ops that do not check their tensors in the order of their parameters
ORDER: dict[str, tuple[str, ...]] = dict.fromkeys(INSERTS, ("slot_mapping", "k_cache", "k"))
# op -> sizes that follow from other arguments, before a tensor with this size is checked
SUMS = {"mixed_sparse_indices": {"num_tokens": "decode_swa_indices and prefill_topk_indices"}}
# the meaning of sizes that several tensors share
COUNTS = {
    "num_reqs": "the requests of the batch, padding requests included",
    "num_tokens": "the tokens of the padded batch",
    "num_decode_tokens": "the decode tokens, which come first",
    "width": "the values of a row",
}


def valid_tensor(op: str, name: str) -> Valid:
    return OWN.get(op, {}).get(name) or TENSORS[name]


def valid_value(op: str, name: str, default: Any) -> Any:
    if name in NUMBERS:
        return NUMBERS[name]
    if name in TENSORS or name in OWN.get(op, {}):
        return valid_tensor(op, name).value
    return default
