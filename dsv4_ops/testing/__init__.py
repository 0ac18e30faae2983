"""Named cases, hypothesis strategies and the contract of every op, for our tests and yours.

    from dsv4_ops.testing import assert_contract, batches

    assert_contract("swa_indices_and_lens")  # everything that an op promises, on this machine

    @given(batches())  # ragged batches with padding, boundary lengths and adversarial tables
    def test_my_integration(batch): ...

``hypothesis`` is imported only when a strategy is requested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsv4_ops.testing.case import Case, OpTesting
from dsv4_ops.testing.strategies.batches import batches

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["Case", "OpTesting", "assert_contract", "batches", "cases_of", "op_testing", "strategy"]


def op_testing(op: str) -> OpTesting:
    """Cases, configurations and strategy of the op called ``op``."""
    from dsv4_ops.core.registry import OPS

    if op not in OPS:
        raise ValueError(
            f"op_testing: op must be a name in the registry, got {op!r}. See `python -m dsv4_ops "
            "list`."
        )
    found: OpTesting = OPS[op].implementation("testing")
    return found


def cases_of(op: str) -> list[Case]:
    """Named cases of ``op``, those with hand-computed results first."""
    return op_testing(op).cases()


def strategy(op: str) -> SearchStrategy[Case]:
    """Hypothesis strategy of calls of ``op`` over batch structure and configuration."""
    return op_testing(op).strategy()


def assert_contract(op: str, **settings: Any) -> None:
    """Run the contract of ``op``.

    See ``dsv4_ops.testing.contract.checks.assert_contract``."""
    # by name: the contract is the top layer, this package near the bottom
    importlib.import_module("dsv4_ops.testing.contract.checks").assert_contract(op, **settings)
