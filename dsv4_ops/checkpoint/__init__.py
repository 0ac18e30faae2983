"""Released checkpoints: the tensors that a config implies, and a check of the files."""
