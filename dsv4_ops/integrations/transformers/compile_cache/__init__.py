"""A file of compiled parts of steps, for the next process."""
