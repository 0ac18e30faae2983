"""Adapters of FlashMLA, DeepGEMM and torch's ``_scaled_mm_v2``; see ``kernels/opaque_op.py``."""
