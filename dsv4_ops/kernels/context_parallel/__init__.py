"""Merges of attention that ranks of one host do in each other's memory."""
