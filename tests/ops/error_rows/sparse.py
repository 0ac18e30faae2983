"""Rows of ``error_rows.TABLE`` for the ops of index matrices."""

from tests.helpers import i32
from tests.ops.error_rows.cache import Entry


def flag_rows(name: str) -> list[Entry]:
    return [
        (
            f"{name} is {type(value).__name__}",
            {name: value},
            TypeError,
            f"{name} must be a bool, got {type(value).__name__}. Pass True or False.",
        )
        for value in (1, None)
    ]


def narrow(name: str, limit_name: str, limit: int, columns: int) -> str:
    text = f"{name} must have at least {limit_name} = {limit} columns, got {columns}. "
    return text + f"Widen it with columns of -1, or lower {limit_name}."


SPARSE_TABLE: dict[str, list[Entry]] = {
    "combine_topk_swa_indices": [
        (
            "topk wider than the columns",
            {"topk": 3},
            ValueError,
            narrow("topk_indices", "topk", 3, 2),
        ),
        (
            "no column",
            {"topk_indices": i32([[]] * 5)},
            ValueError,
            narrow("topk_indices", "topk", 2, 0),
        ),
    ],
    "mixed_sparse_indices": [
        (
            "topk wider than the columns",
            {"topk": 3},
            ValueError,
            narrow("prefill_topk_indices", "topk", 3, 2),
        ),
        (
            "a window wider than its columns",
            {"window_size": 9},
            ValueError,
            narrow("decode_swa_indices", "window_size", 9, 8),
        ),
        (
            "columns of no multiple of 4",
            {"decode_swa_indices": i32([[9] * 10] * 2)},
            ValueError,
            "decode_swa_indices must have a multiple of 4 columns, got 10. "
            "Widen it with columns of -1.",
        ),
        (
            "lens without indices",
            {"decode_compressed_indices": None},
            ValueError,
            "decode_compressed_lens must be None without decode_compressed_indices, got a tensor. "
            "Pass both or neither.",
        ),
        (
            "window pages closer than their rows",
            {"swa_block_size": 128, "swa_block_span": 127},
            ValueError,
            "swa_block_span must be at least 128, got 127. Pass 128 or more.",
        ),
        (
            "compressed pages closer than their rows",
            {"compressed_block_size": 64},
            ValueError,
            "compressed_block_span must be at least 64, got 32. Pass 64 or more.",
        ),
        (
            "a token of no kind",
            {"prefill_topk_indices": i32([[0, -1]] * 2)},
            ValueError,
            "positions must have shape [num_tokens] with num_tokens = 4 as in decode_swa_indices "
            "and prefill_topk_indices, got [5]. "
            "Make them agree: num_tokens counts the tokens of the padded batch.",
        ),
        *flag_rows("decode_compressed_indices_are_local"),
    ],
}
