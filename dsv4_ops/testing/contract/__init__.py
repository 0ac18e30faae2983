"""The contract that every op must meet."""
