"""Report the capabilities of this machine and installation.

``collect`` makes a report, ``section_lines`` and ``verdict`` format it, and ``healthy`` tests it.
If a probe raises, the report shows the error and lists a problem, and the other probes still run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

Section = dict[str, Any]
Problems = list[str]

_CHILD_SECONDS = 300
_LIBSTDCXX = "libstdc++.so"
FAMILIES = ("DeepSeek-V4", "DeepSeek-V3")
"""Model families whose decode step ``dsv4_ops.cli.steps`` compiles."""
_PROBE_SOURCE = """#include <stdexcept>
extern "C" void dsv4_ops_probe(int fail) { if (fail) throw std::runtime_error("probe"); }
"""


def collect(
    *,
    steps: bool = True,
    selftest: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    on_begin: Callable[[str], None] = lambda _name: None,
    on_section: Callable[[Section], None] = lambda _section: None,
) -> dict[str, Any]:
    """Probe this machine.

    Args:
        steps: Whether to compile a decode step of one tiny model per family, in one process per
            family. This takes half a minute.
        selftest: Whether to compile an op in a fresh process and import the optional libraries.
            This takes seconds.
        progress: Called with a line before each probe that takes seconds.
        on_begin: Called with the name of each section before the section's probe runs.
        on_section: Called with each section when the section is complete.

    Returns:
        One entry per section; ``warnings`` about untested releases; and ``problems``, each with
        its remedy.
    """
    problems: Problems = []
    warnings: list[str] = []
    probes: dict[str, Callable[[Problems], Section]] = {
        "system": _system,
        "torch": _torch,
        "versions": lambda problems: _versions(problems, warnings),
        "gpu": _gpu,
        "providers": lambda problems: _providers(problems, selftest),
        "serve": _serve,
        "torch-tensorrt": _tensorrt,
        "lowerings": lambda problems: _lowerings(problems, selftest, progress),
        "cache": _cache,
        "aot_inductor": _aot_inductor,
        "steps": lambda problems: _steps(problems, steps, progress),  # slowest, so last
    }
    report: dict[str, Any] = {}
    for name, probe in probes.items():
        on_begin(name)
        report[name] = _guarded(name, probe, problems)
        on_section(report[name])
    report["warnings"] = warnings
    report["problems"] = problems
    return report


def _guarded(name: str, probe: Callable[[Problems], Section], problems: Problems) -> Section:
    try:
        return probe(problems)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        problems.append(
            f"the {name} probe failed with {message}. "
            "Report it with the output of `python -m dsv4_ops doctor --json`."
        )
        return {"error": message}


def healthy(report: dict[str, Any]) -> bool:
    """Whether ``report`` has no problems."""
    return not report["problems"]


def section_lines(section: Section) -> str:
    """Render a section of a report as text, without its name."""
    width = max((len(key) for key in section), default=0)
    return "\n".join(f"  {key:<{width}}  {_text(value)}" for key, value in section.items())


def verdict(report: dict[str, Any]) -> str:
    """Render the warnings and the problems of a report as text."""
    lines = [f"warning: {text}" for text in report["warnings"]]
    lines.append("problems" if report["problems"] else "no problems found")
    lines += [f"  {number}. {text}" for number, text in enumerate(report["problems"], 1)]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        usable = "usable" if value["usable"] else "not usable"
        return f"{usable:<10}  {value['version'] or '-':<12}  {value['reason']}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


def _system(problems: Problems) -> Section:
    from dsv4_ops._version import __version__

    return {
        "dsv4_ops": f"{__version__} in {Path(__file__).resolve().parents[1]}",
        "os": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def _torch(problems: Problems) -> Section:
    import torch

    from dsv4_ops.dispatch.probes import probe

    return {
        "version": str(torch.__version__),
        "cuda build": torch.version.cuda,
        "triton": probe("triton").version,
    }


def _versions(problems: Problems, warnings: list[str]) -> Section:
    """Report whether the installed torch and transformers were tested together, and which pairs
    were tested."""
    import torch

    from dsv4_ops.core import versions
    from dsv4_ops.dispatch.probes import distribution_version

    torch_version, beside = str(torch.__version__), distribution_version("transformers")
    installed = {"torch": torch_version, "transformers": beside}
    for package, version in installed.items():
        oldest = versions.supported(package)[0]
        if version and versions.release(version) < versions.release(oldest):
            problems.append(
                f"{package} {version} is older than {oldest}, the oldest that is supported. "
                f'Run `pip install "{package}>={oldest}"`.'
            )
    warning = versions.untested(torch_version, beside)
    if warning:
        warnings.append(warning)
    releases = sorted({lane.torch for lane in versions.LANES.values()}, key=versions.release)
    return {
        "transformers": beside,
        "tested together": not warning,
        **{
            f"tested with torch {torch}": f"transformers {', '.join(versions.partners(torch))}"
            for torch in releases
        },
    }


def _steps(problems: Problems, run: bool, progress: Callable[[str], None]) -> Section:
    """Compile a decode step of a tiny model of each family, without Inductor. The families run at
    the same time, each in its own process."""
    import torch

    from dsv4_ops.dispatch.probes import distribution_version

    if not run:
        return {"compiled": "not run, left out by --quick"}
    installed = distribution_version("transformers")
    if installed is None:
        return {"compiled": "not run, transformers is not installed"}
    progress(
        f"compiling a decode step of {' and of '.join(FAMILIES)}, in about half a minute "
        "(--quick leaves it out)"
    )
    commands = {family: ["-m", "dsv4_ops.cli.steps", family] for family in FAMILIES}
    with ThreadPoolExecutor(len(commands)) as pool:
        ended = list(pool.map(_child, commands.values()))
    section: Section = {}
    for (family, command), (status, out, message) in zip(commands.items(), ended, strict=True):
        section[family] = f"compiles, {out} s" if status == 0 else f"fails: {message}"
        if status:
            problems.append(
                f"a compiled decode step of {family} fails with torch {torch.__version__} and "
                f"transformers {installed}: {message}. "
                f"Report it with what `{shlex.join([sys.executable, *command])}` prints."
            )
    return section


def _gpu(problems: Problems) -> Section:
    import torch

    from dsv4_ops.core.target import TARGETS, capability_of, target_of
    from dsv4_ops.dispatch.probes import no_gpu_reason

    reason = no_gpu_reason()
    if reason:
        return {"none": reason}
    section: Section = {}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        section[f"cuda:{index}"] = (
            f"{device.name}, {device.multi_processor_count} SMs, "
            f"{device.total_memory / 2**30:.1f} GiB, sm_{device.major}{device.minor}"
        )
        capability = capability_of(torch.device("cuda", index))
        if capability is not None and capability < min(TARGETS):
            problems.append(
                f"cuda:{index} has compute capability {device.major}.{device.minor}, and no kernel "
                "was compiled for GPUs before 8.0. Pass impl='reference', or hide this GPU with "
                "CUDA_VISIBLE_DEVICES."
            )
        target = target_of(capability)
        section[f"kernels on cuda:{index}"] = (
            "Triton and Gluon (Hopper)" if target.is_hopper else "Triton"
        ) + ("" if target.converts_codes else ", e4m3 codes by integers")
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    section["driver supports CUDA"] = f"{driver // 1000}.{driver % 1000 // 10}" if driver else None
    return section


def _providers(problems: Problems, load: bool) -> Section:
    from dsv4_ops.dispatch.probes import probe_all

    return {provider.name: asdict(provider) for provider in probe_all(load=load)}


def _serve(problems: Problems) -> Section:
    """Report the packages that ``serve`` needs besides transformers."""
    from dsv4_ops.core.errors import install_extra
    from dsv4_ops.dispatch.probes import distribution_version

    required = importlib.metadata.requires("dsv4_ops") or []
    extra = [each for each in required if re.search(r"extra == .serve.", each)]
    names = [re.split(r"[^\w-]", each)[0] for each in extra]
    versions = {name: distribution_version(name) for name in names if name != "dsv4_ops"}
    missing = [name for name, version in versions.items() if version is None]
    remedy = {"remedy": install_extra("serve")} if missing else {}
    return {**versions, "usable": not missing, **remedy}


def _tensorrt(problems: Problems) -> Section:
    """Report the installed torch-tensorrt and TensorRT, and the features that work with these
    releases."""
    from dsv4_ops.dispatch import tensorrt
    from dsv4_ops.dispatch.probes import distribution_version, probe

    installed = probe("torch_tensorrt").version
    if installed is None:
        return {"installed": False}
    first, last = tensorrt.SUPPORTED
    release = tuple(int(part) for part in installed.split("+")[0].split(".")[:2])
    supported = first <= release < last
    if not supported:
        problems.append(
            f"torch-tensorrt {installed} is not known to this package, which refuses ops that "
            f"write there. Install {first[0]}.{first[1]} up to, not including, {last[0]}.{last[1]}."
        )
    names = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
    writes = "kept after dsv4_ops.integrations.tensorrt.enable(); refused without it"
    return {
        "installed": True,
        "version": installed,
        "supported": supported,
        "TensorRT": next(filter(None, map(distribution_version, names)), None),
        "TensorRT's libraries": importlib.util.find_spec("tensorrt_libs") is not None,
        "cache writes": writes if supported else "refused",
        "plugins": "experimental" if release >= tensorrt.PLUGINS_SINCE else "none",
        "tested": "without engines only (docs/tensorrt.md)",
    }


def _lowerings(problems: Problems, run_selftest: bool, progress: Callable[[str], None]) -> Section:
    from torch._library.simple_registry import find_torch_dispatch_rule
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    import dsv4_ops
    from dsv4_ops.core.registry import OPS

    inactive = [
        name
        for name, spec in OPS.items()
        if find_torch_dispatch_rule(spec.op, FunctionalTensorMode) is None
    ]
    section: Section = {
        "ops": len(OPS),
        "active": bool(OPS) and not inactive,
        "without trace rule": inactive,
        "self-test": "not run, only trace rules looked up; `doctor --selftest` compiles an op",
    }
    if not OPS or inactive:
        problems.append(
            f"these ops have no trace rule and compile to opaque calls: {_text(inactive)}. "
            f"Reinstall dsv4_ops {dsv4_ops.__version__} and a supported torch."
        )
    if run_selftest:
        progress("compiling an op in a fresh process, in seconds")
        section["self-test"] = outcome = _selftest_outcome()
        if outcome != "passed":
            section["active"] = False
            problems.append(
                f"the compile self-test failed: {outcome}. Run it with the traceback: "
                f'{sys.executable} -c "import dsv4_ops.cli.doctor as d; d.selftest()".'
            )
    return section


def selftest() -> None:
    """Compile ``token_map`` on CPU; raise if the result or the generated code is wrong.

    Run this function in its own process, as ``collect(selftest=True)`` does.
    """
    import torch

    import dsv4_ops

    def positions(query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        return dsv4_ops.token_map(query_start_loc, seq_lens, num_tokens=5).positions

    from dsv4_ops.lowering._compat import run_and_get_code

    query_start_loc = torch.tensor([0, 3, 4], dtype=torch.int32)
    seq_lens = torch.tensor([10, 7], dtype=torch.int32)
    compiled = torch.compile(positions, fullgraph=True)
    result, codes = run_and_get_code(compiled, query_start_loc, seq_lens)
    if result.tolist() != [7, 8, 9, 6, -1]:
        raise RuntimeError(f"compiled token_map gave {result.tolist()}")
    if not codes:
        raise RuntimeError("the compiler returned no code to look at")
    if any("torch.ops.dsv4_ops" in code for code in codes):
        raise RuntimeError(
            "the generated code calls torch.ops.dsv4_ops: the lowering is not active"
        )


def _selftest_outcome() -> str:
    """Run ``selftest`` in a fresh process without caches, to test that the first compilation of a
    process uses the lowerings."""
    code = "import dsv4_ops.cli.doctor as d; d.selftest()"
    status, _, message = _child(["-c", code], TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    return f"exit status {status}: {message}" if status else "passed"


def _child(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """Run Python in a new process; return its exit status, output and final error."""
    try:
        child = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, "", str(error)
    return child.returncode, child.stdout.strip(), _error_line(child.stderr)


def _error_line(stderr: str) -> str:
    """Find the line of a traceback that names the error; notes may follow this line."""
    lines = stderr.strip().splitlines() or ["no message"]
    named = (
        line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported)\b", line)
    )
    return next(named, lines[-1])


def _cache(problems: Problems) -> Section:
    import torch.compiler.config as compiler_config

    from dsv4_ops._version import __version__
    from dsv4_ops.core.fingerprint import source_hash

    tag, ours = compiler_config.cache_key_tag, f"dsv4_ops={__version__}:{source_hash()}"
    included = ours in tag.split(";")
    if not included:
        problems.append(
            f"torch.compiler.config.cache_key_tag is {tag!r} and lacks {ours!r}: "
            "caches may serve code of other lowerings. "
            "Append to the tag instead of replacing it, and restart the process."
        )
    from dsv4_ops.lowering._compat import cache_dir

    folder = Path(cache_dir())
    if not os.access(folder, os.W_OK):
        problems.append(
            f"the cache folder {folder} is not writable. "
            "Set TORCHINDUCTOR_CACHE_DIR to one that is."
        )
    return {
        "cache_key_tag": tag,
        "ours": ours,
        "included": included,
        "folder": str(folder),
        "compiled steps": _folder_of_parts(),
    }


def _folder_of_parts() -> str:
    try:
        from dsv4_ops.integrations.transformers.compile_cache.precompiled import folder_of_parts
    except ImportError:
        return "none without transformers"
    none = "not kept: DSV4_OPS_CACHE is off, or the folder of caches is not yours alone"
    return str(folder_of_parts() or none)


def _aot_inductor(problems: Problems) -> Section:
    section: Section = {"CXX": os.environ.get("CXX") or None}
    try:
        from dsv4_ops.lowering._compat import get_cpp_compiler

        compiler = get_cpp_compiler()
    except Exception as error:
        section["compiler"] = f"none: {type(error).__name__}"
        problems.append(
            "torch finds no C++ compiler: neither CPU code nor AOTInductor packages can be built. "
            "Install g++, or set CXX to the path of a compiler (a path alone, without options)."
        )
        return section
    section["compiler"] = shutil.which(compiler) or compiler
    if sys.platform != "linux":
        section["links libstdc++"] = f"not checked on {sys.platform}"
        return section
    try:
        needed = linked_libraries(compiler)
    except RuntimeError as error:
        section["links libstdc++"] = str(error)
        problems.append(f"{error}. Install g++ and its C++ library, or set CXX to one that works.")
        return section
    dynamic = any(library.startswith(_LIBSTDCXX) for library in needed)
    section["links libstdc++"] = "dynamically" if dynamic else "statically or not at all"
    section["needed libraries"] = needed
    if not dynamic:
        problems.append(
            "export CXX=g++ (a compiler that links libstdc++ dynamically); "
            f"AOTInductor packages built with this one, {compiler}, crash at load."
        )
    return section


def linked_libraries(compiler: str) -> list[str]:
    """Build a C++ shared library with ``compiler``, and list the libraries that it loads.

    Args:
        compiler: The compiler's command, with or without options.

    Returns:
        The NEEDED entries of the library. Without ``readelf``, the list has only libstdc++, and
        only if this name occurs in the library's bytes.

    Raises:
        RuntimeError: the compiler cannot build a shared library.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4_ops_doctor_") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROBE_SOURCE)
        command = [*shlex.split(compiler), "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            built = subprocess.run(
                command, capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"{compiler} does not run: {error}") from error
        if built.returncode != 0 or not library.is_file():
            message = built.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"{compiler} builds no shared library: {message[0]}")
        return _needed(library)


def _needed(library: Path) -> list[str]:
    readelf = shutil.which("readelf")
    if readelf is None:
        return [_LIBSTDCXX] if _LIBSTDCXX.encode() in library.read_bytes() else []
    listing = subprocess.run(
        [readelf, "-d", str(library)],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    lines = (line for line in listing.splitlines() if "(NEEDED)" in line)
    return [line.partition("[")[2].partition("]")[0] for line in lines]
