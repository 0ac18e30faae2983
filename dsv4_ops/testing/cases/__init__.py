"""Cases, configurations and strategy of every op, one file per stem."""
