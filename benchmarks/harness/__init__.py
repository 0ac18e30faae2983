"""Timing, rows, reports and plots."""
