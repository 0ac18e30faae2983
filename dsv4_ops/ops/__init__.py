"""Public functions and passports, one file per stem. Importing this package registers every op."""

from dsv4_ops.ops import batch, chunking, slot_mapping, swa, topk_indices

__all__ = ["batch", "chunking", "slot_mapping", "swa", "topk_indices"]
