"""Decode and prefill steps of a patched model: eager, from padded batches, compiled, exported."""
