"""The leaf layer: registry, argument checks, types and provider probes. Imports torch and the
standard library only."""
