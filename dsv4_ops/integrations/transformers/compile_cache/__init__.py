"""Compiled parts of steps in a file, for the next process."""
