"""Fake implementations: shape, stride, dtype and device of every op's results, from the arguments'
alone."""
