"""Runs every compiled op on hostile inputs; tests/test_gpu.py starts it under compute-sanitizer."""

import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.testing import contract

EXAMPLES = 10


def main() -> None:
    for spec in OPS.values():
        compiled = contract.CompiledOp(spec, "cuda")
        compiled.check_cases()
        compiled.fuzz(EXAMPLES)
    torch.cuda.synchronize()
    print(f"{len(OPS)} ops, {EXAMPLES} drawn batches each")


if __name__ == "__main__":
    main()
