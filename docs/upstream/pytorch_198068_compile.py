"""pytorch issue 198068 under torch.compile: a mutated view is written at offset 0.

    python pytorch_198068_compile.py        # no GPU needed

The issue reports AOTInductor and says that torch.compile is not affected. With dynamic=True it is:
sym_storage_offset has no lowering in Inductor and becomes 0, so the op writes layer 0, not layer 1.
"""

import torch


@torch.library.custom_op("repro::fill", mutates_args=("out",))
def fill(out: torch.Tensor, value: float) -> None:
    out.fill_(value)


@fill.register_fake
def _(out: torch.Tensor, value: float) -> None:
    return None


def write(layers: torch.Tensor) -> None:
    fill(layers[1], 1.0)


layers = torch.zeros(3, 8, 6)
torch.compile(write, dynamic=True)(layers)
written = [layer for layer in range(3) if layers[layer].any()]
print(f"torch {torch.__version__}: layers written: {written}, expected [1]")
