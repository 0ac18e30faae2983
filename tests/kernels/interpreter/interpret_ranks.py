"""A rank of ``test_mapped.py``: merges, then gathers."""

import sys
from pathlib import Path

from tests.kernels.interpreter import interpret_combine, interpret_gather

if __name__ == "__main__":
    folder, rank, world = sys.argv[1], *map(int, sys.argv[2:])
    interpret_combine.main(str(Path(folder, "combine")), rank, world)
    interpret_gather.main(str(Path(folder, "gather")), rank, world)
