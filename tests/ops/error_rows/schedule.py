"""Rows of the schedules of libraries and of lengths on ranks."""

from tests.helpers import i32
from tests.ops.error_rows.mla import LENS
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid
from tests.ops.error_rows.wording import Entry, exactly, rank, too_many, wrong

OWN |= {
    "cp_seq_lens": {"seq_lens": Valid(i32([9, 7, 4]), "[num_seqs]"),
     "cp_rank": Valid(i32([1]), "[1]")},
    "flash_mla_metadata": {"swa_lens": LENS, "extra_lens": LENS},
    "paged_mqa_logits_metadata": {"seq_lens": Valid(i32([9, 7, 4]), "[num_reqs]", any_rank=True)},
}  # fmt: skip
NUMBERS |= {"num_sms": 132, "num_sm_parts": 66, "swa_width": 128, "extra_width": 512}
MANY = i32([0] * 16384)

TABLE: dict[str, list[Entry]] = {
    "flash_mla_metadata": [
        wrong("extra_width", "be 0 without extra_lens", 512, "Pass both or neither",
         extra_lens=None),
    ],
    "cp_seq_lens": [exactly("cp_rank", "[1]", i32([0, 1, 0]), 0)],
    "paged_mqa_logits_metadata": [
        *[wrong("block_size", "divide the keys of a split = 256", size,
         "Use a power of two up to 256") for size in (48, 512)],
        *[rank("seq_lens", "[num_reqs]", lens) for lens in (MANY[:8].view(2, 2, 2), MANY[0])],
        *[too_many(seq_lens=lens) for lens in (MANY, MANY[:, None].expand(-1, 2))],
    ],
}  # fmt: skip
