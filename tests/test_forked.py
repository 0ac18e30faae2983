"""Processes of tests that are forked end as those that Python starts."""

import os
import signal
import sys

import pytest

from tests.support import cpu_seconds, forked

ENDS = {
    "import sys; sys.exit(3)": (3, "", ""),
    "import sys; sys.exit('told why')": (1, "", "told why\n"),
    "print('said')": (0, "said\n", ""),
    "import os; os.kill(os.getpid(), 9)": (-signal.SIGKILL, "", ""),
}


@pytest.mark.parametrize("code", ENDS)
def test_a_process_ends_as_it_would_by_itself(code):
    ended = forked.python("-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == ENDS[code]


def test_an_error_is_a_status_and_a_traceback():
    ended = forked.python("-c", "1 / 0")
    assert ended.returncode == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_process_that_does_not_end_is_killed():
    assert forked.python("-c", "while True: pass", seconds=1).returncode == -signal.SIGALRM


def test_a_process_has_its_arguments_folder_variables_and_path(tmp_path):
    (tmp_path / "beside.py").write_text("WHAT = 'of this folder'\n")
    script = tmp_path / "script.py"
    script.write_text("import os, sys, beside; print(sys.argv[1:], os.environ['A'], beside.WHAT)")
    env = {**os.environ, "A": "b"}
    for arguments in ((script, "x"), ("-m", "script", "x")):
        ended = forked.python(*arguments, env=env, cwd=tmp_path)
        assert ended.stdout == "['x'] b of this folder\n", ended.stderr
    env["PYTHONPATH"] = str(tmp_path)
    ended = forked.python("-c", "import beside; print(beside.WHAT)", env=env)
    assert ended.stdout == "of this folder\n", ended.stderr


def test_a_process_begins_without_anything_of_ours():
    code = "import sys; print([name for name in sys.modules if name.split('.')[0] in sys.argv])"
    assert forked.python("-c", code, "dsv4_ops", "tests", "benchmarks").stdout == "[]\n"


def test_its_cpu_time_counts():
    before = cpu_seconds.until_now()
    forked.python("-c", "import time\nwhile time.process_time() < 0.3: pass")
    assert cpu_seconds.until_now() - before > 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
def test_kernels_are_interpreted_where_that_is_asked_for(tmp_path):
    pytest.importorskip("triton", reason="triton is published for Linux only")
    script = tmp_path / "kernel.py"
    script.write_text(
        "import triton\n@triton.jit\ndef kernel(x): pass\nprint(type(kernel).__name__)\n"
    )
    assert forked.interpreted(script) == ["InterpretedFunction"]
    assert forked.python(script).stdout == "JITFunction\n"
