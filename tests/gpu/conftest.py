"""All tests of this folder are marked gpu, and need a CUDA device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _launches_are_chosen_again() -> None:
    """Forget chosen launches, because tests replace the functions that choose them."""
    from dsv4_ops.kernels.launch_plans import PLANS

    PLANS.plans.clear()


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def a100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a Hopper card as an A100."""
    from tests.support.ampere import as_an_a100

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    with as_an_a100(tmp_path_factory.getbasetemp()):
        yield
