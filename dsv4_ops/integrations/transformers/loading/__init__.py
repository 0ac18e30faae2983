"""Released checkpoints as models: quantised ones, and their draft layers."""
