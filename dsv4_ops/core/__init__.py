"""The leaf layer: registry, argument checks, errors, cache layouts and result types. Imports torch
and the standard library only."""
