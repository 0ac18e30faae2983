"""When imported: Inductor believes the flags of the processor.

It else compiles a program for each set of vector instructions in each process and loads it in
another, BF16's and VNNI's too, which TORCHINDUCTOR_VEC_ISA_OK leaves out. Kernels made with what a
compiler lacks fail just as loudly.
"""

from typing import Any

from torch._inductor.cpu_vec_isa import VecISA


def _builds(isa: VecISA, code: str) -> bool:
    return True


_of_torch: Any = VecISA
_of_torch.check_build = _builds
