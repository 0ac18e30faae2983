"""The one importer of Inductor internals. tests/test_compat.py imports each name on every supported
torch."""

from torch._inductor.ir import Pointwise
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

__all__ = ["FloorDiv", "ModularIndexing", "Pointwise", "lowerings", "ops", "register_lowering"]
