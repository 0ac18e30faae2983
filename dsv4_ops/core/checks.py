"""Argument checks of the public functions: the only place that words an error.

Every message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``. A check looks at
shapes, dtypes, devices and Python ints, never at tensor values, so it costs no device
synchronisation, works on symbolic sizes, and stays on under ``torch.compile``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.types import MAX_REQUESTS

_DIMENSIONS = {
    "num_reqs": "the requests of the batch, padding requests included",
    "num_tokens": "the tokens of the padded batch",
    "max_blocks": "the pages of the longest request",
    "topk": "the selected rows of a token",
}


class Checks:
    """Checks the arguments of one call and remembers the sizes that dimension names got."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, str] = {}
        self.device: torch.device | None = None
        self.device_owner = ""

    def tensor(self, name: str, value: Tensor, dtype: torch.dtype, *dims: str | int) -> None:
        """``value`` is a tensor of ``dtype``, with the named sizes, on the device of the tensors
        before it."""
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self.op}: {name} must be a tensor, got {type(value).__name__}. Pass a "
                f"{dtype} tensor."
            )
        if value.dtype != dtype:
            raise TypeError(
                f"{self.op}: {name} must be {dtype}, got {value.dtype}. Cast it with .to({dtype})."
            )
        if value.dim() != len(dims):
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                f"Pass a tensor of {len(dims)} dimension{'s' if len(dims) > 1 else ''}."
            )
        for axis, dim in enumerate(dims):
            self._dimension(name, value, dims, axis, dim)
        if self.device is None:
            self.device, self.device_owner = value.device, name
        elif value.device != self.device:
            raise ValueError(
                f"{self.op}: {name} must be on {self.device} like {self.device_owner}, got "
                f"{value.device}. "
                "Move all tensors of a call to one device."
            )

    def _dimension(
        self, name: str, value: Tensor, dims: tuple[str | int, ...], axis: int, dim: str | int
    ) -> None:
        size = value.shape[axis]
        if isinstance(dim, int):
            if size != dim:
                raise ValueError(
                    f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                    f"Pass exactly {dim} entries in dimension {axis}."
                )
            return
        word, _, extra = dim.partition(" + ")
        offset = int(extra) if extra else 0
        if size < offset:
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)}, got {list(value.shape)}. "
                f"Pass at least {offset} entry, even for an empty batch."
            )
        if word not in self.sizes:
            self.sizes[word], self.owners[word] = size - offset, name
        elif self.sizes[word] != size - offset:
            raise ValueError(
                f"{self.op}: {name} must have shape {_shape(dims)} with {word} = "
                f"{self.sizes[word]} as in "
                f"{self.owners[word]}, got {list(value.shape)}. "
                f"Make them agree: {word} counts {_DIMENSIONS[word]}."
            )

    def at_least(self, minimum: int, **values: int) -> None:
        """Every value is an int of at least ``minimum``."""
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
                raise TypeError(
                    f"{self.op}: {name} must be an int, got {type(value).__name__}. "
                    "Pass a Python int that is known on the host, never a tensor."
                )
            if value < minimum:
                raise ValueError(
                    f"{self.op}: {name} must be at least {minimum}, got {value}. Pass "
                    f"{minimum} or more."
                )

    def divides(self, divisor_name: str, divisor: int, name: str, value: int) -> None:
        """``value`` is a multiple of ``divisor``."""
        if value % divisor != 0:
            raise ValueError(
                f"{self.op}: {name} must be a multiple of {divisor_name} = {divisor}, got {value}. "
                f"Use {name} = {value + divisor - value % divisor}."
            )

    def flag(self, name: str, value: bool) -> None:
        """``value`` is a bool."""
        if not isinstance(value, bool):
            raise TypeError(
                f"{self.op}: {name} must be a bool, got {type(value).__name__}. Pass True or False."
            )

    def request_limit(self) -> None:
        """The batch has no more requests than the compiled searches cover."""
        if self.sizes["num_reqs"] > MAX_REQUESTS:
            raise ValueError(
                f"{self.op}: num_reqs must be at most {MAX_REQUESTS}, got "
                f"{self.sizes['num_reqs']}. "
                "Split the batch."
            )


def _shape(dims: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"
