"""The paged cache of a patched model: tensors, blocks, and tokens that the cache cannot store."""
