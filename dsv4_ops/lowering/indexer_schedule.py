"""Lowering of DeepGEMM's schedule: a prefix sum and a reduction, which Inductor fuses."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import indexer_schedule as reference

paged_mqa_logits_metadata = Decompose(reference.paged_mqa_logits_metadata)
