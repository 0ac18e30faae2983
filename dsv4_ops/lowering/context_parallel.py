"""Lowering of the lengths of a sequence on its ranks: pointwise aten."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import context_parallel as reference

cp_seq_lens = Decompose(reference.cp_seq_lens)
