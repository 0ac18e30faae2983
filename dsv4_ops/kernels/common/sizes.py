"""Arguments that differ from call to call. Triton must not compile a kernel again for their values.

Triton compiles a kernel again if an integer argument is 1, or a multiple of 16. The new kernel
loads faster if the argument is a stride, or the bound of a mask along contiguous values. If the
argument is a number of rows, the new kernel loads no faster, but a user would wait seconds for it
when a batch size or a cache length is first 1 or a multiple of 16. Nor does an aligned address of a
few numbers help, such as ``cu_seq_lens``, which may be any row of a table.
"""

SIZES_BUT_TOKENS = (
    "capacity",
    "cu_seq_lens",
    "extra_blocks",
    "extra_max_blocks",
    "extra_rows",
    "extra_table_stride",
    "extra_width",
    "indexer_programs",
    "max_blocks",
    "max_extra_blocks",
    "max_parts",
    "max_swa_blocks",
    "num_blocks",
    "num_early",
    "num_indexer_blocks",
    "num_indexer_state_blocks",
    "num_k",
    "num_parts",
    "num_positions",
    "num_programs",
    "num_reqs",
    "num_rows",
    "num_slots",
    "num_state_blocks",
    "num_valid",
    "offset",
    "padded",
    "programs",
    "row_programs",
    "state_columns",
    "swa_blocks",
    "swa_max_blocks",
    "swa_rows",
    "swa_table_stride",
    "table_stride",
    "wave",
)
"""Names of arguments that no kernel specialises, for ``do_not_specialize``."""

SIZES = (*SIZES_BUT_TOKENS, "num_tokens")
"""Names for kernels that gain nothing if the number of tokens is a multiple of 16. Other kernels
gain: they load and store more values at once, because a mask of 16 tokens is all true or all
false."""
