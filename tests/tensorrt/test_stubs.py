"""torch-tensorrt with stubs of TensorRT's libraries: steps are traced, lowered, partitioned and run
eagerly.

A separate process runs these tests, because ``stubs.py`` replaces private names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tensorrt import stubs

CHECKS = Path(__file__).parent / "under_stubs"


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.skipif(bool(stubs.missing()), reason=stubs.missing())
def test_checks_under_stubs_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=check_*.py", "--tb=short", "--show-capture=no", str(CHECKS)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["DSV4_OPS_UNDER_STUBS"] = "1"
    done = subprocess.run(
        command, cwd=CHECKS.parents[2], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40
