"""Decode with an AOTInductor package, in a process that has torch and nothing of ours.

    python -I package_process.py PACKAGE INPUTS

``INPUTS`` is a file of ``torch.save`` with the package's inputs in order (tokens, query_start_loc,
seq_lens, then tables and caches, which the package writes to) and the number of steps. The demo
runs this file by its path, not as a module, so that the process imports no other file of ours.
"""

import json
import sys

UNWANTED = ("dsv4_ops", "transformers")


class Refuse:
    """An import hook that raises for unwanted packages."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Refuse ``name`` if it is unwanted."""
        if name.partition(".")[0] in UNWANTED:
            raise ImportError(f"{name} is not to be imported here")


def main(package: str, inputs: str) -> None:
    """Wait for a line on standard input, decode, and print tokens and unwanted modules as JSON."""
    sys.meta_path.insert(0, Refuse)
    import torch

    if not sys.stdin.readline():
        return  # end of input: no package was written
    saved = torch.load(inputs)
    tokens, starts, seq_lens, *rest = saved["inputs"]
    step = torch._inductor.aoti_load_package(package)
    decoded = []
    for _ in range(saved["steps"]):
        logits = step(tokens, starts, seq_lens, *rest)
        tokens = logits.argmax(-1)
        decoded.append(tokens)
        seq_lens = seq_lens + 1
    imported = [name for name in sys.modules if name.partition(".")[0] in UNWANTED]
    print(json.dumps({"tokens": torch.stack(decoded, 1).tolist(), "imported": imported}))


if __name__ == "__main__":
    main(*sys.argv[1:])
