"""The contract that every op is under, and how its results are compared."""
