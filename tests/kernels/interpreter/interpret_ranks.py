"""The ranks of ``test_mapped.py`` run merges, then gathers. If a rank fails, the others end."""

import sys
from pathlib import Path

from torch.multiprocessing import start_processes

from tests.kernels.interpreter import interpret_combine, interpret_gather


def run(rank: int, folder: str, world: int) -> None:
    interpret_combine.main(str(Path(folder, "combine")), rank, world)
    interpret_gather.main(str(Path(folder, "gather")), rank, world)


if __name__ == "__main__":
    world = int(sys.argv[2])
    start_processes(run, (sys.argv[1], world), nprocs=world, start_method="fork")
