"""Dataclasses of tensors that torch takes apart, as graphs and exported programs ask for."""

from __future__ import annotations

from torch.utils import _pytree as pytree


def register(*classes: type, namespace: str = "dsv4_ops") -> None:
    """Register dataclasses, by names that exported programs hold."""
    for each in classes:
        pytree.register_dataclass(each, serialized_type_name=f"{namespace}.{each.__name__}")
