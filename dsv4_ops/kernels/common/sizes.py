"""Arguments that differ from call to call, for which Triton must not compile a kernel again.

Triton compiles a kernel once more where an integer is 1, and where it is a multiple of 16. This
speeds up loads whose stride, or whose mask along contiguous values, is then known. For a count of
rows it gains nothing, and costs a user seconds at each new batch size and length of a cache.
"""

SIZES_BUT_TOKENS = (
    "capacity",
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
"""Arguments of all kernels for ``do_not_specialize``, by name."""

SIZES = (*SIZES_BUT_TOKENS, "num_tokens")
"""Names for kernels that gain nothing from a multiple of 16 tokens. Other kernels load and store
more values at once with such a multiple: a mask of 16 tokens is all true or all false."""
