"""Cases, configurations and strategy of every op. File names are those of ``dsv4_ops.ops``."""
