"""Store compiled parts of steps, which later processes load."""
