"""Rows of ``error_rows.TABLE`` for the schedules of libraries and for lengths on ranks."""

from collections.abc import Iterator

import torch

from tests.helpers import i32
from tests.ops.error_rows.cache import Entry
from tests.ops.error_rows.mla import LENS
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid

OWN |= {
    "cp_seq_lens": {
        "seq_lens": Valid(i32([9, 7, 4]), "[num_seqs]"),
        "cp_rank": Valid(i32([1]), "[1]"),
    },
    "flash_mla_metadata": {"swa_lens": LENS, "extra_lens": LENS},
    "paged_mqa_logits_metadata": {
        "seq_lens": Valid(i32([9, 7, 4]), "[num_reqs]", any_rank=True),
    },
}
NUMBERS |= {"num_sms": 132, "num_sm_parts": 66, "swa_width": 128, "extra_width": 512}


def divisor_rows() -> Iterator[Entry]:
    for size in (48, 512):
        text = f"block_size must divide the keys of a split = 256, got {size}. "
        yield (
            f"pages of {size}",
            {"block_size": size},
            ValueError,
            f"{text}Use a power of two up to 256.",
        )


SCHEDULE_TABLE: dict[str, list[Entry]] = {
    "flash_mla_metadata": [
        (
            "a width of no list",
            {"extra_lens": None},
            ValueError,
            "extra_width must be 0 without extra_lens, got 512. Pass both or neither.",
        ),
    ],
    "cp_seq_lens": [
        (
            "a rank for every sequence",
            {"cp_rank": i32([0, 1, 0])},
            ValueError,
            "cp_rank must have shape [1], got [3]. Pass exactly 1 entries in dimension 0.",
        ),
    ],
    "paged_mqa_logits_metadata": [
        *divisor_rows(),
        (
            "lengths of rank 3",
            {"seq_lens": torch.zeros(2, 2, 2, dtype=torch.int32)},
            ValueError,
            "seq_lens must have shape [num_reqs], got [2, 2, 2]. Pass a tensor of 1 dimension.",
        ),
        (
            "one length",
            {"seq_lens": torch.zeros((), dtype=torch.int32)},
            ValueError,
            "seq_lens must have shape [num_reqs], got []. Pass a tensor of 1 dimension.",
        ),
        (
            "too many rows of lengths",
            {"seq_lens": torch.zeros(16384, 2, dtype=torch.int32)},
            ValueError,
            "num_reqs must be at most 16383, got 16384. Split the batch.",
        ),
        (
            "too many rows",
            {"seq_lens": torch.zeros(16384, dtype=torch.int32)},
            ValueError,
            "num_reqs must be at most 16383, got 16384. Split the batch.",
        ),
    ],
}
