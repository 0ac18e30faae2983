"""Undocumented names of Inductor, and of parts of torch that Inductor uses. Only this file imports
such names.

Each name was seen in torch 2.11, 2.13 and 2.15; ``tests/kernels/test_compat.py`` looks for each
name in the installed release. Names of other private parts of torch are in
``core/torch_compat.py``.
"""

from torch._higher_order_ops.while_loop import while_loop_op
from torch._inductor import aoti_compile_and_package, aoti_load_package, config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.ir import ExternKernel, MutationOutput, NoneLayout, Pointwise
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path as set_ptxas_path
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

__all__ = [
    "AsyncCompile",
    "AutotuneCache",
    "CppWrapperCpu",
    "ExternKernel",
    "FloorDiv",
    "ModularIndexing",
    "MutationOutput",
    "NoneLayout",
    "OrderedSet",
    "Pointwise",
    "SchedulerNode",
    "StarDep",
    "V",
    "WeakDep",
    "aoti_compile_and_package",
    "aoti_load_package",
    "cache_dir",
    "config",
    "fallback_handler",
    "get_compile_threads",
    "get_cpp_compiler",
    "lowerings",
    "ops",
    "register_lowering",
    "run_and_get_code",
    "set_ptxas_path",
    "triton_cache_dir",
    "while_loop_op",
]
