"""Load released checkpoints: quantised models, and their draft layers."""
