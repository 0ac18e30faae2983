"""Released checkpoints: which tensors a config stands for, and a check of the files."""
