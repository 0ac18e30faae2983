"""Rows of the ops that describe a batch and plan its prefills."""

from tests.helpers import i32
from tests.ops.error_rows import wording as says
from tests.ops.error_rows.context import host_rows
from tests.ops.error_rows.valid import TENSORS

NONE, MANY, MANY_STARTS = i32([]), i32([0] * 16384), i32([0] * 16385)
SPLIT_MANY = says.too_many(query_start_loc=MANY_STARTS, seq_lens=MANY)
PAIRED = "Pass one length per request in both"

TABLE: dict[str, list[says.Entry]] = {
    "split_decodes_and_prefills": [
        says.no_entry("query_start_loc"),
        says.too_many(query_start_loc=MANY_STARTS),
        *says.flag_rows("require_uniform"),
    ],
    "token_map": [
        says.no_entry("query_start_loc", seq_lens=NONE),
        SPLIT_MANY,
        says.elsewhere("seq_lens", "meta", "query_start_loc", "cpu",
         query_start_loc=TENSORS["query_start_loc"].value.to("meta")),
    ],
    "flatten_decode": [says.no_entry("query_start_loc"), SPLIT_MANY],
    "mtp_seq_lens": [says.no_entry("query_start_loc")],
    "split_prefill_chunks": [says.too_many(seq_lens=MANY, query_lens=MANY)],
    "plan_prefill_chunks": [
        *host_rows("seq_lens"),
        *host_rows("query_lens"),
        *[says.wrong("query_lens", f"have as many entries as seq_lens ({lens})", got, PAIRED, **new)
         for lens, got, new in ((1, 0, {"seq_lens": [7], "query_lens": []}),
         (3, 4, {"query_lens": (1, 2, 3, 4)}))],
    ],
    "prefill_chunk_row_bounds": [says.no_entry("query_start_loc", seq_lens=NONE)],
    "prefill_gather_lens": [says.no_entry("query_start_loc")],
}  # fmt: skip
