"""When imported in a process of pytest-xdist, or in a process that a test starts there: make
compilations faster, with the same results."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch._inductor import config, cpp_builder

_flags: Any = cpp_builder._get_optimization_cflags


@contextlib.contextmanager
def flags_of_users() -> Iterator[None]:
    """Let g++ compile loops with -O3, as for users; code with other flags is not reused."""
    ours = cpp_builder._get_optimization_cflags
    cpp_builder._get_optimization_cflags = _flags
    try:
        yield
    finally:
        cpp_builder._get_optimization_cflags = ours


def _quicker(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
    compiler, linker = _flags(*args, **kwargs)
    return ["O1" if flag == "O3" else flag for flag in compiler], linker


if "PYTEST_XDIST_WORKER" in os.environ:
    config.cpp.threads = 2  # generated loops stay parallel, as without workers
    # most packages have flags of their own, so no other package could use precompiled headers
    config.aot_inductor.precompile_headers = False

    # Without SIMD each loop has one form, which halves the work of Inductor and the compiler.
    # Tests of SIMD set it again.
    if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
        config.cpp.simdlen = 1

    # For long functions, g++ takes a fraction of the time with -O1, and results are the same;
    # `make smoke` tests six ops with -O3. All processes use the same flags, because headers are
    # precompiled for each set of flags.
    cpp_builder._get_optimization_cflags = _quicker
