"""When imported, make Inductor trust the processor's flags.

Otherwise each process compiles a program for each set of vector instructions and loads it in
another process. TORCHINDUCTOR_VEC_ISA_OK does not cover the sets BF16 and VNNI. If a compiler lacks
a set, kernels fail clearly without this test.
"""

from typing import Any

from torch._inductor.cpu_vec_isa import VecISA

_of_torch: Any = VecISA
_of_torch.check_build = lambda isa, code: True
