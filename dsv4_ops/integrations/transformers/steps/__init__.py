"""Steps of a patched model: as functions of tensors, from padded batches, compiled, exported."""
