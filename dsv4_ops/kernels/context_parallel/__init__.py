"""Merges and gathers that ranks of one host do in each other's memory."""
