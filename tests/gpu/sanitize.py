"""Run a compiled op on adversarial inputs; test_contract.py starts this in compute-sanitizer."""

import sys

import torch

from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.contract import checks
from tests.support.inductor_bugs import mended

EXAMPLES = 10


def main(name: str) -> None:
    with mended(name):
        compiled = checks.CompiledOps([OPS[name]], "cuda")
        compiled.check_cases()
        compiled.fuzz(EXAMPLES)
    torch.cuda.synchronize()
    print(f"{name}: all cases, {EXAMPLES} sampled batches")


if __name__ == "__main__":
    main(sys.argv[1])
