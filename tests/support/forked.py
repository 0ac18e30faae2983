"""Start Python processes in which torch and transformers are already imported, because the imports
take longer than most tests that start a process. A server that has imported these packages, but
nothing of ours, forks the processes."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import cpu_seconds

INTERPRETED = ["torch", "triton.experimental.gluon", "tests.kernels.interpreter.masks"]
IMPORTED = [
    "tests.support.once", "tests.support.quick", "tests.support.unprobed", "torch._dynamo.testing",
    "torch._inductor.compile_fx", "torch.export",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
]  # fmt: skip

_servers: dict[bool, subprocess.Popen[str]] = {}


def python(
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    seconds: int = 1200,
    interpreter: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` (-c CODE, -m MODULE or a script, and options) to its end.

    Do not use this for tests of imports, or of variables that torch reads when it is imported. The
    process is killed after ``seconds``. With ``interpreter``, Triton's interpreter, with our fixes,
    runs kernels.
    """
    if interpreter not in _servers or _servers[interpreter].poll() is not None:
        _servers[interpreter] = _serve(interpreter)
    server = _servers[interpreter]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, name)) for name in ("out", "err")]
        asked = {
            "arguments": [str(each) for each in arguments],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "seconds": seconds,
            "paths": paths,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        ended = json.loads(server.stdout.readline())
        out, err = (Path(path).read_text() for path in paths)
    cpu_seconds.add(ended["pid"], ended["cpu_seconds"])
    cpu_seconds.add(server.pid, cpu_seconds.of_process(server.pid))
    return subprocess.CompletedProcess(arguments, ended["status"], out, err)


def interpreted(script: Path, *arguments: Any) -> list[str]:
    """Run our script with Triton's interpreter, and return the lines that it prints."""
    env = {**os.environ, **_INTERPRETER, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = python(script, *arguments, env=env, interpreter=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


_RUN_PACKAGE = """
import sys, torch, torch._inductor
run = torch._inductor.aoti_load_package(sys.argv[1])
for path in sys.argv[2:]:
    inputs = torch.load(path)
    torch.save([*run(*inputs), *inputs], path + ".out")
assert not any(name.startswith("dsv4_ops") for name in sys.modules)
"""


def run_package(package: Any, *paths: Path) -> None:
    """Call a package with the inputs in each file, and write results and inputs to ``FILE.out``.
    The process that calls the package never imports ``dsv4_ops``."""
    import torch

    arguments = ["-c", _RUN_PACKAGE, *map(str, (package, *paths))]
    if torch.cuda.is_available():  # the server may have asked for GPUs, which its forks then lack
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    else:
        done = python(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]


_INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def _serve(interpreter: bool) -> subprocess.Popen[str]:
    # leave the path to the child's PYTHONPATH, which may begin with another copy of ours
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if interpreter:
        env |= _INTERPRETER
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(Path(__file__).parents[2])],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_leave, server)
    return server


_SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support import forked
del sys.path[0]
forked.serve()
"""


def _leave(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def serve() -> None:
    """Fork a process for every line of standard input, one at a time."""
    base = sys.path[1:]
    for name in INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(asked, base)
        _, status, used = os.wait4(pid, 0)
        seconds, code = used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)
        ended = {"pid": pid, "status": code, "cpu_seconds": seconds}
        print(json.dumps(ended), flush=True)


def _become(asked: dict[str, Any], base: list[str]) -> None:
    """Run as the requested process, to its end."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(asked["seconds"])
    for number, path in zip((0, 1, 2), (os.devnull, *asked["paths"]), strict=True):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags), number)
    status: Any = 0
    try:
        _run(asked["arguments"], base)
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status or 0))


def _run(arguments: list[str], base: list[str]) -> None:
    kind, *rest = arguments
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).parent))
    sys.path[:] = [first, *filter(None, given), *base]
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if kind == "-c":
        code, *options = rest
        sys.argv = ["-c", *options]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")
