"""Write a small checkpoint for ``from_pretrained``."""

import torch

from dsv4_ops.testing.models import small_model
from dsv4_ops.testing.tokenizer import write_tokenizer


def save(path):
    """Save a bfloat16 model with random weights, and a tokenizer of bytes."""
    small_model(dtype=torch.bfloat16).save_pretrained(path)
    write_tokenizer(path)
