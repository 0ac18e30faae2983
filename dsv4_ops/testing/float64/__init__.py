"""float64 oracles of float ops, with the scales of their rounding errors."""
