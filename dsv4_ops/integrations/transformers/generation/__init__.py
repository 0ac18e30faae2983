"""Hooks into ``generate``, and steps that draft and verify tokens."""
