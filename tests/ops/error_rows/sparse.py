"""Rows of the ops of index matrices."""

from tests.helpers import i32
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.valid import TENSORS

BOTH = "decode_swa_indices and prefill_topk_indices"
TABLE: dict[str, list[says.Entry]] = {
    "compressed_slot_mapping": [
        says.multiple("cp_interleave", "compress_ratio", 4, 6, 8),
        says.multiple("cp_interleave", "compress_ratio", 128, 1, 128, cp_interleave=1,
         compress_ratio=128),
    ],
    "combine_topk_swa_indices": [
        says.columns("topk_indices", "topk", 3, 2, topk=3),
        says.columns("topk_indices", "topk", 2, 0, topk_indices=i32([[]] * 5)),
    ],
    "mixed_sparse_indices": [
        says.columns("prefill_topk_indices", "topk", 3, 2, topk=3),
        says.columns("decode_swa_indices", "window_size", 9, 8, window_size=9),
        says.wrong("decode_swa_indices",
         "have a multiple of 4 columns", 10, "Widen it with columns of -1",
         decode_swa_indices=i32([[9] * 10] * 2)),
        says.alone("decode_compressed_lens", "decode_compressed_indices"),
        says.at_least("swa_block_span", 128, 127, swa_block_size=128, swa_block_span=127),
        says.at_least("compressed_block_span", 64, 32, compressed_block_size=64),
        says.agree("positions", "[num_tokens]", "num_tokens", 4, BOTH, i32([0] * 5),
         **{"positions": TENSORS["positions"].value, "prefill_topk_indices": i32([[0, -1]] * 2)}),
        *says.flag_rows("decode_compressed_indices_are_local"),
    ],
}  # fmt: skip
