"""Register dataclasses of tensors as pytrees, which graphs and exported programs need."""

from __future__ import annotations

from torch.utils import _pytree as pytree


def register(*classes: type, namespace: str = "dsv4_ops") -> None:
    """Register dataclasses under the names that exported programs store."""
    for each in classes:
        pytree.register_dataclass(each, serialized_type_name=f"{namespace}.{each.__name__}")
