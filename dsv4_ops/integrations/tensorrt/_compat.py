"""Undocumented names of torch-tensorrt. Only this file imports these names.

The comment after a name says which releases have the name. We ran release 2.13, and read the source
of the other releases.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from dsv4_ops.core.errors import argument_error, install_extra
from dsv4_ops.dispatch.tensorrt import SUPPORTED

_PASSES = "torch_tensorrt.dynamo.lowering.passes._aten_lowering_pass"
_NAMES = {
    "add_pass": f"{_PASSES}:_aten_lowering_pass",  # 2.11 to 2.14
    "remove_pass": f"{_PASSES}:_remove_lowering_pass",  # 2.11 to 2.14
    "passes": f"{_PASSES}:ATEN_POST_LOWERING_PASSES",  # 2.11 to 2.14
    "remove_unread": f"{_PASSES}:remove_num_users_is_0_nodes",  # 2.11 to 2.14
    "backends": "torch_tensorrt.dynamo.backend.backends:",  # 2.11 to 2.14
    "aot_backend": "torch_tensorrt.dynamo.backend.backends:aot_torch_tensorrt_aten_backend",
    # 2.11 to 2.14
    "aot_autograd": "torch_tensorrt.dynamo.backend.backends:aot_autograd",  # 2.11 to 2.14
}


def load(op: str) -> Mapping[str, Any]:
    """Import torch-tensorrt, and return the objects that ``_NAMES`` lists.

    Raises:
        ImportError: torch-tensorrt is missing or broken, or lacks a name.
    """
    try:
        importlib.import_module("torch_tensorrt")
    except Exception as error:  # a plain Exception if libnvinfer is missing
        raise argument_error(
            op,
            "torch_tensorrt",
            must="be installed with TensorRT's libraries",
            got=f"{type(error).__name__}: {error}".splitlines()[0],
            do=f"{install_extra('tensorrt')}, and see `python -m dsv4_ops doctor`",
            kind=ImportError,
        ) from error
    found = {}
    for name, place in _NAMES.items():
        module, _, attribute = place.partition(":")
        try:
            loaded = importlib.import_module(module)
            found[name] = getattr(loaded, attribute) if attribute else loaded
        except (ImportError, AttributeError) as error:
            first, last = (".".join(map(str, pair)) for pair in SUPPORTED)
            raise argument_error(
                op,
                "torch_tensorrt",
                must=f"be {first} up to, not including, {last}, which have {place}",
                got=version(),
                do="Install one of these",
                kind=ImportError,
            ) from error
    return found


def version() -> str:
    """Return the installed version of torch-tensorrt."""
    return importlib.metadata.version("torch-tensorrt")
