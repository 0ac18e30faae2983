"""Hypothesis strategies over batch structure, and what they are made of."""
