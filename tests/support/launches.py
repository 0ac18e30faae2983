"""A launcher that records launches instead of running them."""

from collections.abc import Callable
from typing import Any

from dsv4_ops.kernels.launcher import Launcher


class Launches(Launcher):
    """Records kernels and grids in order, and the last arguments and constants of each kernel."""

    def __init__(self, capability: tuple[int, int] | None = None) -> None:
        super().__init__(self._kernel, capability=capability)
        self.made: list[tuple[str, Any]] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.constants: dict[str, dict[str, Any]] = {}

    def _kernel(self, kernel: Any) -> Any:
        return _Grid(self, kernel.__name__)


class _Grid:
    def __init__(self, launches: Launches, name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches.made.append((self.name, grid))
            self.launches.arguments[self.name] = arguments
            self.launches.constants[self.name] = constants

        return launch
