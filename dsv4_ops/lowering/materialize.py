"""Make a buffer where a traced reference calls ``reference.common.materialized``.

Without a buffer, Inductor would inline the computation of a row's values into every kernel that
reads the row, once for every element of the row. That code would be slow on a CPU, and take minutes
to compile in the graph of a whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.registry import NAMESPACE
from dsv4_ops.lowering.register import lower_with

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("_materialize(Tensor values) -> Tensor")
_library.impl("_materialize", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::_materialize", torch.empty_like, lib=_library)
_op = torch.ops.dsv4_ops._materialize.default


def materialize(values: Tensor) -> Tensor:
    """Return ``values``; Inductor's code then computes them once."""
    lower_with(_op, _realized)
    result: Tensor = _op(values)
    return result


def _realized(values: Any) -> Any:
    values.realize()
    return values
