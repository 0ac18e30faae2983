"""Rows of sparse MLA's prefill op and plan op, and valid calls of these ops."""

from collections.abc import Iterator

from tests.helpers import i32
from tests.ops.error_rows.mla import CACHES, LENS, SINK, Q, pages
from tests.ops.error_rows.valid import NUMBERS, OWN, Valid
from tests.ops.error_rows.wording import Entry, alone, at_least, no_int, too_many

OWN |= {
    "sparse_mla_prefill": {"q": Q, "swa_cache": pages("swa"),
     "swa_block_table": Valid(i32([[0, 3], [2, 1], [1, -1]]), "[num_reqs, max_swa_blocks]"),
     "extra_cache": pages("extra"),
     "extra_block_table": Valid(i32([[3], [0], [-1]]), "[num_reqs, max_extra_blocks]"),
     "attn_sink": SINK},
    "sparse_mla_plan": {"swa_lens": LENS, "extra_lens": LENS},
}  # fmt: skip
NUMBERS |= {"num_heads": 64, "num_programs": 132}
EXTRA = ("extra_cache", "extra_block_table", "topk_indices")
MANY = i32([0] * 16384)


def missing_rows() -> Iterator[Entry]:
    """Yield a cache without its table, a table and a selection without a cache."""
    for given, partner in (((0,), 1), ((0, 2), 1), ((1,), 0), ((1, 2), 0), ((2,), 0)):
        nothing = [name for place, name in enumerate(EXTRA) if place not in given]
        yield alone(EXTRA[given[0]], EXTRA[partner], *nothing)


def unused_number_rows() -> Iterator[Entry]:
    """Yield numbers about a cache that is not passed."""
    nothing = dict.fromkeys(EXTRA)
    for name in ("extra_block_size", "compress_ratio"):
        yield at_least(name, 1, 0, **nothing, **{name: 0})
        yield no_int(name, "2", **nothing)


TABLE: dict[str, list[Entry]] = {
    "sparse_mla_prefill": [*CACHES, at_least("topk", 1, 0, topk_indices=i32([[]] * 5)),
     *missing_rows(), *unused_number_rows()],
    "sparse_mla_plan": [*[too_many("num_tokens", swa_lens=MANY, extra_lens=lens)
     for lens in (MANY, None)]],
}  # fmt: skip
