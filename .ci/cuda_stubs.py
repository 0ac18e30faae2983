"""Stand-ins for CUDA's libraries: a CUDA build of torch imports where none are installed.

    python .ci/cuda_stubs.py SITE_PACKAGES

PyPI has no CPU build of the newest torch, and its CUDA libraries take gigabytes that a machine
without a GPU never calls. Every function that torch binds is defined here and answers "no device",
so ``torch.cuda.is_available()`` is False, and all that runs on the CPU is torch's own code.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"lib(?:cu|nv|nccl)\w*\.so\.\d+")
NO_DEVICE = 100  # cudaErrorNoDevice


def _read(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing_libraries(folder: Path) -> dict[str, dict[str, set[str]]]:
    """CUDA libraries that those in ``folder`` need and do not find there: functions by version.

    A symbol without a version may be of any library: one that defines it is enough for the loader.
    """
    present = {path.name for path in folder.iterdir()}
    missing: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("*.so*"):
        needed = re.findall(r"NEEDED.*\[(.*)\]", _read("readelf", "-dW", str(path)))
        absent = [name for name in needed if CUDA.fullmatch(name) and name not in present]
        if not absent:
            continue
        owners: dict[str, str] = {}
        for part in _read("readelf", "-VW", str(path)).split("File: ")[1:]:
            for version in re.findall(r"Name: (\S+)", part):
                owners[version] = part.split()[0]
        for name in absent:
            missing[name][""]
        for line in _read("nm", "-D", "--undefined-only", str(path)).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            owner = owners.get(version, "") if version else absent[0]
            if owner in absent and (version or re.match(r"_*(cu|nv|nccl)", symbol)):
                missing[owner][version].add(symbol)
    return missing


def _definition(function: str) -> str:
    if function == "cudaGetErrorString":
        return f'const char *{function}(int code) {{ return "there is no CUDA here"; }}\n'
    # what registers kernels while a library loads returns a handle that nobody follows
    return f"long {function}(void) {{ return {0 if function.startswith('__') else NO_DEVICE}; }}\n"


def build(folder: Path) -> list[str]:
    """Compile a library for each that is missing, beside torch's own; returns their names."""
    libraries = missing_libraries(folder)
    for name, versions in libraries.items():
        with tempfile.TemporaryDirectory() as work:
            source, script = Path(work, "stubs.c"), Path(work, "versions")
            functions = set().union(*versions.values())
            source.write_text("".join(map(_definition, sorted(functions))))
            script.write_text(
                "".join(
                    f"{version} {{ global: {''.join(f'{symbol}; ' for symbol in symbols)}}};\n"
                    for version, symbols in versions.items()
                    if version
                )
            )
            command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
            command += [f"-Wl,--version-script={script}"] if script.read_text() else []
            command += ["-o", str(folder / name), str(source)]
            subprocess.run(command, check=True)
    return sorted(libraries)


if __name__ == "__main__":
    built = build(Path(sys.argv[1], "torch", "lib"))
    print(f"stand-ins for {len(built)} CUDA libraries: {', '.join(built) or 'none were missing'}")
