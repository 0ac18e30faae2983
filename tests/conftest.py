"""Settings of the whole test run."""

import os

# A crashed compile leaves Inductor's worker pool waiting for minutes at exit; one thread has no
# pool.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
