"""Inputs of every benchmark, and the checks of their results."""
