"""Launchers of the compressor."""

from dsv4_ops.kernels.compressor.launch import (
    compress_and_insert as compress_and_insert,
    save_and_compress as save_and_compress,
)
from dsv4_ops.kernels.compressor.save_states import (
    save_compressor_states as save_compressor_states,
)
