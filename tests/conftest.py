"""Settings of the whole test run, made before anything imports torch."""

import gc
import os

# A compile makes a million objects, few of them garbage: looking for it takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# A crashed compile leaves Inductor's worker pool waiting for minutes at exit; one thread has no
# pool.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Threads that spin between loops take the core from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores among them
    os.environ["OMP_NUM_THREADS"] = "1"  # also in what tests start

    import torch
    from torch._inductor import config

    torch.set_num_threads(1)
    config.cpp.threads = 2  # generated loops stay parallel, as they are without workers
