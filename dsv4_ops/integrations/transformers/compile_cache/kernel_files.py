"""Compiled kernels that torch's cache artifacts leave out.

Without these files, a process that loads parts of a step would compile or tune their kernels again:

- shared libraries of C++ kernels, and the results of Inductor's test of vector instructions;
- the fastest configurations of Triton kernels. Inductor's workers name these files without the
  cache tag of the process that reads the files (torch 2.11 to 2.13);
- our kernels that Triton compiled without Inductor, and the launchers of all kernels, which a C
  compiler built.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config as compiler_config

_log = logging.getLogger(__name__)

_OURS = "dsv4_ops.kernels."
_CODE, _TRITON = "code/", "triton/"
_HERE = b"[FOLDER]"
"""Placeholder for the path of a kernel's folder. Triton's files contain this path."""

_KEPT = (".json", ".cubin", ".hsaco", ".so")
"""Suffixes of the files that Triton loads. Triton's other files are stages of the compilation."""

_GROUP = "__grp__"
"""Begins the name of the file that lists a kernel's files."""


def collect() -> dict[str, bytes]:
    """Return the contents of this process's kernel files, by name."""
    folder = code_folder()
    loaded = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    found = {
        path: path.read_bytes()
        for path in folder.glob("*/*.so")
        if str(path) in loaded or "." not in path.stem
    }
    found |= dict(_tuned(folder))
    places = {f"{_CODE}{path.relative_to(folder).as_posix()}": each for path, each in found.items()}
    return places | dict(_of_triton())


def put(files: Mapping[str, bytes]) -> None:
    """Write the files of ``collect`` to the folders where this process looks for them."""
    folders = {_CODE: code_folder(), _TRITON: triton_folder()}
    # groups last: a process that shares the folder must not see a group without its files
    for place, content in sorted(files.items(), key=lambda file: _GROUP in file[0]):
        for prefix, folder in folders.items():
            if place.startswith(prefix) and folder is not None:
                path = folder / place.removeprefix(prefix)
                if prefix == _TRITON:
                    content = content.replace(_HERE, str(path.parent).encode())
                if not path.exists():
                    with replacing(path, logging.INFO) as partial:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        partial.write_bytes(content)


def agree_with_workers() -> None:
    """Let this process compile, name and store its kernels as Inductor's workers do.

    Inductor's workers use torch's ptxas, but Triton has a ptxas of another version. Triton reads
    the version only once, so no file of a worker would match if a kernel ran before this call.
    """
    if triton_folder() is None or torch.version.hip is not None:
        return
    from dsv4_ops.kernels.common import triton_compat
    from dsv4_ops.lowering import _compat

    before = os.environ.get("TRITON_PTXAS_PATH")
    _compat.set_ptxas_path()
    if os.environ.get("TRITON_PTXAS_PATH") != before:
        triton_compat.forget_ptxas()


@functools.cache
def processor() -> str:
    """Return a digest of the processor and the C library, for which C++ kernels are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.platform(), platform.processor()]
    told = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256(repr((sorted(told), platform.libc_ver())).encode()).hexdigest()[:16]


def code_folder() -> Path:
    """Return Inductor's cache folder."""
    from dsv4_ops.lowering._compat import cache_dir

    return Path(cache_dir())


def triton_folder() -> Path | None:
    """Return Triton's cache folder, which Inductor's kernels share, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from dsv4_ops.lowering.workers import set_triton_folder

    set_triton_folder()
    return Path(os.environ["TRITON_CACHE_DIR"])


def _tuned(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the fastest configurations, under the workers' names and under this process's names."""
    from dsv4_ops.lowering._compat import AutotuneCache

    found = list(folder.glob("*/*.best_config"))
    for path in found:
        yield path, path.read_bytes()
    config: Any = compiler_config
    sources = [each for parent in {path.parent for path in found} for each in parent.glob("*.py")]
    for source in sources:
        paths = []
        for tag in ("", config.cache_key_tag):
            with config.patch(cache_key_tag=tag):
                cache = AutotuneCache.create({}, str(source), "")
            if cache is not None and cache.local_cache is not None:
                paths.append(Path(cache.local_cache[1]))
        if len(paths) == 2 and paths[0].is_file() and not paths[1].is_file():
            yield paths[1], paths[0].read_bytes()


def _of_triton() -> Iterator[tuple[str, bytes]]:
    if triton_folder() is None:
        return
    from dsv4_ops.kernels.common import triton_compat

    modules = [each for name, each in sys.modules.items() if name.startswith(_OURS)]
    functions = [each for module in modules for each in list(vars(module).values())]
    for folder in triton_compat.compiled_folders(functions):
        for path in folder.iterdir():
            if path.suffix in _KEPT:
                content = path.read_bytes()
                if path.name.startswith(_GROUP):
                    content = _kept(content)
                if path.suffix == ".json":
                    content = content.replace(str(folder).encode(), _HERE)
                yield f"{_TRITON}{folder.name}/{path.name}", content


def _kept(group: bytes) -> bytes:
    """Leave files that are not stored out of a group. Triton 3.9 does not find a kernel if a file
    of its group is absent."""
    try:
        paths = json.loads(group)["child_paths"]
    except (ValueError, KeyError, TypeError):  # damaged, so Triton will not find the kernel
        return group
    kept = {name: path for name, path in paths.items() if name.endswith(_KEPT)}
    return json.dumps({"child_paths": kept}).encode()


@contextmanager
def replacing(path: Path, level: int) -> Iterator[Path]:
    """Yield a path for a new file that then replaces ``path`` as a whole. If the disk is full or
    read-only, log the error and go on: this process does without the file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        _log.log(level, "%s is not written: %s", path, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
