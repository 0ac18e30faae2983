"""Arguments that differ from call to call, for which Triton must not compile a kernel again.

Triton compiles a kernel once more where an integer is 1, and where it is a multiple of 16. That
speeds up loads whose stride it knows so. It gains nothing from a count that only ends loops or
masks, and costs a user seconds at each new batch size and length of a cache.
"""

SIZES = (
    "capacity",
    "columns",
    "extra_blocks",
    "extra_max_blocks",
    "extra_rows",
    "extra_table_stride",
    "extra_width",
    "indexer_programs",
    "max_blocks",
    "max_extra_blocks",
    "max_len",
    "max_parts",
    "max_swa_blocks",
    "num_blocks",
    "num_columns",
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
    "num_tokens",
    "num_valid",
    "offset",
    "out_columns",
    "padded",
    "programs",
    "row_programs",
    "size",
    "state_columns",
    "swa_blocks",
    "swa_max_blocks",
    "swa_rows",
    "swa_table_stride",
    "swa_width",
    "table_stride",
    "topk",
    "wave",
)
"""Names of such arguments in all kernels, for ``do_not_specialize``."""
