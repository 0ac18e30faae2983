"""Fake implementations: they derive the shape, strides, dtype and device of an op's results from
the op's arguments."""
