"""Hypothesis strategies over batch structure, and their building blocks."""
