"""What float ops compute, in float64, with the magnitudes that were rounded on the way."""
