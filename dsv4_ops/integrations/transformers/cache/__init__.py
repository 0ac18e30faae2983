"""The paged cache of a patched model, its blocks, and tokens that it cannot store."""
