"""Timing, rows and reports."""
