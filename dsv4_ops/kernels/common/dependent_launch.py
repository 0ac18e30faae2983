"""Programmatic dependent launch: a kernel may start before the previous kernel has ended.

With the option ``launch_pdl``, a GPU starts the programs of a kernel once all programs of the
previous kernel have called ``gdc_launch_dependents`` or ended. So each program must first wait for
the previous kernel. If the option is set, Triton compiles the wait into the binary, and Triton and
Inductor launch the binary early; otherwise they do neither. So no kernel starts early without the
wait. Other launches of the binary, such as launches by a package's C++ code, start after the
previous kernel has ended, and the wait does nothing.

If every kernel waits for its previous kernel, a kernel waits for all earlier kernels. A kernel
without the wait is launched without the option, so it starts after the previous kernel has ended.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _wait_if_launched_early():
    def wait(_semantic=None):  # Triton's interpreter passes no _semantic
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


def waits(kernel) -> bool:
    """Return whether a kernel begins with the wait, so that it may be launched early."""
    return wait_for_previous_kernel.fn.__name__ in kernel.fn.__code__.co_names
