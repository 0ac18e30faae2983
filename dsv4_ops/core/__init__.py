"""The leaf layer: registry, argument checks, errors, cache layouts and result types. It imports
only torch and the standard library."""
