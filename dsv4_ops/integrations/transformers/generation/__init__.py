"""Hooks into ``generate``, and steps that draft tokens and verify them."""
