"""When imported in a process of pytest-xdist, or in one that a test starts there: compiles take
less and give the same results."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch._inductor import config, cpp_builder

_flags: Any = cpp_builder._get_optimization_cflags


@contextlib.contextmanager
def flags_of_users() -> Iterator[None]:
    """Have g++ make loops as for users, with -O3; cached code of other flags is not taken."""
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
    config.cpp.threads = 2  # generated loops stay parallel, as they are without workers
    # the flags of most packages are their own: headers that are precompiled serve none but them
    config.aot_inductor.precompile_headers = False

    # Loops have one form, not several with vectors: half of Inductor's and the compiler's work.
    # Tests of vectors have the fixture; test_contract.py has every kind of loop with them.
    if os.environ.get("DSV4_OPS_NIGHTLY") != "1":
        config.cpp.simdlen = 1

    # Of long functions g++ makes the same results with -O1, in a fraction of the time;
    # `make smoke` has six ops with -O3. All processes have the same flags: headers are
    # precompiled for each set of them.
    cpp_builder._get_optimization_cflags = _quicker
