"""A buffer where a traced reference asks for one (``reference.common.materialized``).

Inductor inlines what is computed per row into the code of every element of the row, several times
where several kernels read it. That is slow to run on a CPU, and the sum of such expressions takes
minutes to compile in a graph of a whole model.
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
    """``values``; code of Inductor computes it once."""
    lower_with(_op, _realized)
    result: Tensor = _op(values)
    return result


def _realized(values: Any) -> Any:
    values.realize()
    return values
