"""Programmatic dependent launch: a kernel begins while the one before it ends.

With the option ``launch_pdl`` a GPU starts a kernel's programs once all programs of the kernel
before it have called ``gdc_launch_dependents``, or ended. So each program must first wait for that
kernel. Where the option is set, Triton's compiler writes the wait into the binary, and Triton and
Inductor launch that binary early: no launch has the option without the wait. Elsewhere, such as
from the C++ of a package, the binary is launched late, and the wait does nothing.

A kernel waits for the one before it, and so for all earlier ones if that kernel waited too. All of
our kernels wait. FlashMLA's combine starts early, and its programs for a text that was not split
end without a wait while the decode still stores. So the kernel after FlashMLA's starts late.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _wait_if_launched_early():
    def wait(_semantic=None):  # none in Triton's interpreter
        if _semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False):
            tl.extra.cuda.gdc_wait(_semantic=_semantic)
            tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)

    wait.__triton_builtin__ = True
    return wait


@triton.jit
def wait_for_previous_kernel():
    """Wait until all memory operations of earlier kernels are done, then let the next kernel
    start."""
    _wait_if_launched_early()()


@triton.constexpr_function
def _fetch_if_launched_early():
    def fetch(starts, BYTES, _semantic=None):
        if _semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False):
            size = tl.core._unwrap_if_constexpr(BYTES)
            aligned = "{ .reg .b64 a; and.b64 a, $1, -16;"
            tl.inline_asm_elementwise(
                f"{aligned} cp.async.bulk.prefetch.L2.global [a], {size}; mov.b32 $0, 0; }}",
                "=r,l",
                [starts],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
                _semantic=_semantic,
            )

    fetch.__triton_builtin__ = True
    return fetch


@triton.jit
def fetch_to_l2(starts, BYTES: tl.constexpr):
    """Fetch BYTES, a multiple of 16, at each address to the L2 cache, if the kernel is launched
    early. This may precede the wait: what an earlier kernel still writes goes to that cache, too.
    """
    _fetch_if_launched_early()(starts, BYTES)


def waits(kernel) -> bool:
    """Return whether a kernel begins with the wait, so that it may be launched early."""
    return wait_for_previous_kernel.fn.__name__ in kernel.fn.__code__.co_names
