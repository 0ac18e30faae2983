"""Adapters of FlashMLA and DeepGEMM; see ``kernels/opaque_op.py``."""
