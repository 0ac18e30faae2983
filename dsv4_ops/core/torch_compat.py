"""Names that torch does not document: with ``lowering/_compat.py`` the only importer of them.

Each is followed by the releases in which it was seen; ``tests/kernels/test_compat.py`` looks for
them in the installed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
from torch._functorch.utils import enable_single_level_autograd_function
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

__all__ = [
    "FunctionalTensorMode",  # 2.11, 2.13, 2.15
    "OpOverload",  # 2.11, 2.13, 2.15
    "SingleLevelFunction",  # 2.11, 2.13, 2.15
    "after_autograd",  # torch._C._after_autograd_keyset: 2.11, 2.13, 2.15
    "allows_aot_compile",  # torch._dynamo.config.enable_aot_compile: 2.11, 2.13
    "any_requires_grad",  # torch._C._any_requires_grad: 2.11, 2.13, 2.15
    "aot_settings",  # torch._functorch.config.save_config_portable: 2.13
    "auto_functionalized_v2",  # torch._higher_order_ops.auto_functionalize: 2.11, 2.13
    "decomposes_triton_ops",  # decompose_custom_triton_ops: 2.11, 2.13, 2.15
    "enable_single_level_autograd_function",  # 2.11, 2.13, 2.15
    "find_schema",  # torch._C._dispatch_find_schema_or_throw: 2.11, 2.13, 2.15
    "forward_mode",  # forward_ad._current_level: 2.11, 2.13, 2.15
    "group_members",
    "group_rank",  # and _dynamo_marked_constant: 2.11, 2.13
    "group_sends",  # ProcessGroup._get_backend: 2.11, 2.13
    "group_size",  # torch.distributed.distributed_c10d._get_group_size_by_name: 2.11, 2.13
    "guard_or_false",  # torch.fx.experimental.symbolic_shapes: 2.11, 2.13, 2.15
    "has_function_modes",  # torch._C._len_torch_function_stack: 2.13
    "one_graph_for_all_sizes",  # backed_size_oblivious, use_duck_shape: 2.11, 2.15
    "only_looks_ahead",  # torch.fx.experimental.proxy_tensor.get_proxy_mode: 2.13
    "process_group",  # torch.distributed.distributed_c10d._resolve_process_group: 2.11, 2.13
    "redispatch",  # OpOverload._handle.redispatch_boxed: 2.11, 2.13, 2.15
    "statically_known_true",  # torch.fx.experimental.symbolic_shapes: 2.11, 2.13, 2.15
    "sym_max",
    "sym_min",
    "symmetric_workspace",  # torch.distributed._symmetric_memory: 2.11, 2.13
    "timeout_of",  # ProcessGroup._get_backend(device).options._timeout: 2.11, 2.13
    "without_autocast",  # torch._C._ExcludeDispatchKeyGuard: 2.11, 2.13
    "without_kernel_table",  # torch._higher_order_ops.triton_kernel_wrap.kernel_side_table: 2.13
]

AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
"""Dispatch keys under which ``torch.autocast`` reaches an op."""

# torch 2.15 annotates them with int | SymInt; a SymInt is an int to our annotations
sym_max: Callable[[int, int], int] = cast(Any, torch.sym_max)
sym_min: Callable[[int, int], int] = cast(Any, torch.sym_min)

SingleLevelFunction = torch.autograd.function._SingleLevelFunction
after_autograd = torch._C._after_autograd_keyset


def any_requires_grad(args: Sequence[Any]) -> bool:
    """Whether a tensor among ``args`` requires a gradient."""
    return bool(torch._C._any_requires_grad(*args))


def allows_aot_compile() -> AbstractContextManager[Any]:
    """Functions that are given to ``torch.compile`` have its ``aot_compile``."""
    from torch._dynamo import config

    name = "enable_aot_compile"
    allowed: AbstractContextManager[Any] = (
        config.patch({name: True}) if hasattr(config, name) else nullcontext()
    )
    return allowed


def one_graph_for_all_sizes() -> AbstractContextManager[Any]:
    """What ``torch.compile(dynamic=True)`` traces holds for a size of 1, and for sizes that were
    equal by chance."""
    import torch.fx.experimental._config as config

    settings = {"backed_size_oblivious": True, "use_duck_shape": False}
    patched: AbstractContextManager[Any] = config.patch(settings)  # type: ignore[attr-defined]
    return patched


def aot_settings() -> dict[str, Any]:
    """Settings of AOTAutograd that change what it makes, on any machine."""
    return dict(functorch_config.save_config_portable())


def without_autocast() -> AbstractContextManager[Any]:
    """Ops of torch that are called inside cast nothing."""
    keys = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in AUTOCAST_KEYS]
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(keys[0] | keys[1])
    return guard


@contextmanager
def without_kernel_table() -> Iterator[None]:
    """Compiled functions are saved without the Triton kernels that this process has traced.

    Inductor's code has its kernels. A process that loads those of another, by their numbers, gives
    the next graph that it traces itself kernels of that process for its own.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    kernels, constants = table.id_to_kernel, table.constant_args
    table.id_to_kernel, table.constant_args = {}, {}
    try:
        yield
    finally:
        table.id_to_kernel, table.constant_args = kernels, constants


def has_function_modes() -> bool:
    """Whether calls of torch are redirected, as under a default device."""
    return bool(torch._C._len_torch_function_stack())


def decomposes_triton_ops() -> bool:
    """Whether what is traced is for a compiler: the switch of ``torch.library.triton_op``."""
    return bool(functorch_config.decompose_custom_triton_ops)


def find_schema(qualified: str) -> bool:
    """Whether an op of this name is registered."""
    try:
        torch._C._dispatch_find_schema_or_throw(qualified, "")
    except RuntimeError:
        return False
    return True


def forward_mode() -> bool:
    """Whether forward-mode autograd is on."""
    return forward_ad._current_level >= 0


def group_members(name: str) -> list[int]:
    """Ranks of the processes in the process group of this name, in its order."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d.get_process_group_ranks(process_group(name)))


def group_rank(name: str) -> int:
    """Rank of this process in the process group of this name; a constant of what Dynamo traces."""
    return int(process_group(name).rank())


# what torch.compiler.assume_constant_result sets, without its import of Dynamo
vars(group_rank)["_dynamo_marked_constant"] = True


def group_sends(name: str, device: str) -> bool:
    """Whether the process group of this name has a backend for tensors on ``device``."""
    try:
        process_group(name)._get_backend(torch.device(device))
    except RuntimeError:
        return False
    return True


def group_size(name: str) -> int:
    """Ranks of the process group of this name; RuntimeError if there is none."""
    from torch.distributed import distributed_c10d

    size: Any = distributed_c10d._get_group_size_by_name
    return int(size(name))


def guard_or_false(condition: Any) -> bool:
    """``condition``, guarded; False where it cannot be."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # brings sympy

    return guard_or_false(condition)


def only_looks_ahead() -> bool:
    """Whether a compiler runs a function on fake tensors without a trace of it, as AOTAutograd does
    first for what a graph returns and writes to."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # brings sympy

    return get_proxy_mode() is None and detect_fake_mode() is not None


def process_group(name: str) -> Any:
    """The process group of this name; RuntimeError if there is none."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def redispatch(op: OpOverload, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what ``op`` has below autograd."""
    return op._handle.redispatch_boxed(keyset & after_autograd, *args, **kwargs)


def statically_known_true(condition: Any) -> bool:
    """Whether ``condition`` holds of all values that its symbols may have; no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy

    return statically_known_true(condition)


def symmetric_workspace(group: str, nbytes: int, device: torch.device) -> Any:
    """Zeros that all ranks of a group map, with ``rank``, ``world_size`` and ``buffer_ptrs``.

    All ranks have to ask; when one has it, all have written their zeros.
    """
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    held = memory.empty(nbytes, dtype=torch.uint8, device=device)
    held.zero_()
    torch.cuda.synchronize(device)
    return held, memory.rendezvous(held, group)


def timeout_of(group: str, device: torch.device) -> timedelta:
    """How long a process group waits for a rank."""
    timeout: timedelta = process_group(group)._get_backend(device).options._timeout
    return timeout
