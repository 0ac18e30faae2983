"""Print pip's requirements for a lane of ``dsv4_ops/core/versions.py``, or the names of all lanes.

python .ci/lanes.py [LANE]
"""

import runpy
import sys
from pathlib import Path

VERSIONS = Path(__file__).resolve().parents[1] / "dsv4_ops" / "core" / "versions.py"


def main(*names: str) -> int:
    """Print the requirements; return 2 for an unknown lane. This needs no package."""
    lanes = runpy.run_path(str(VERSIONS))["LANES"]
    if not names:
        print(*lanes)
        return 0
    (name,) = names
    if name not in lanes:
        print(f"LANE must be one of {', '.join(lanes)}, got {name!r}.", file=sys.stderr)
        return 2
    print(*(f"{package}=={release}.*" for package, release in lanes[name]._asdict().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
