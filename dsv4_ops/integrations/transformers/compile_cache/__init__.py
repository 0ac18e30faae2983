"""Compiled parts of steps, for the next process."""
