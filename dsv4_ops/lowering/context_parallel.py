"""Lowerings of sequences on several ranks: pointwise aten, and a kernel that selects."""

from dsv4_ops.lowering.kinds import Decompose, TritonKernel
from dsv4_ops.reference import context_parallel as reference

cp_seq_lens = Decompose(reference.cp_seq_lens)
cp_slot_mapping = Decompose(reference.cp_slot_mapping)
cp_row_indices = Decompose(reference.cp_row_indices)
cp_topk = TritonKernel(reference.cp_topk)
cp_local_rows = Decompose(reference.cp_local_rows)
cp_correct_out = Decompose(reference.cp_correct_out)
