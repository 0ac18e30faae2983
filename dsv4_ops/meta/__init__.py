"""Fake implementations: derive shape, stride, dtype and device of every op's results from those of
its arguments."""
