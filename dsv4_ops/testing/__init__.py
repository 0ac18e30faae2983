"""Named cases, hypothesis strategies and the contract of every op, for our tests and yours.

    from dsv4_ops.testing import assert_contract, batches

    assert_contract("swa_indices_and_lens")  # check all promises of the op, on this machine

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
    """Return the cases, configurations and strategy of an op."""
    from dsv4_ops.core.registry import OPS

    if op not in OPS:
        raise ValueError(
            f"op_testing: op must be a name in the registry, got {op!r}. See `python -m dsv4_ops "
            "list`."
        )
    cases: OpTesting = OPS[op].implementation("testing")
    return cases


def cases_of(op: str) -> list[Case]:
    """Return the named cases of an op, those with hand-computed results first."""
    return op_testing(op).cases()


def strategy(op: str) -> SearchStrategy[Case]:
    """Return a Hypothesis strategy that samples calls of an op."""
    return op_testing(op).strategy()


def assert_contract(op: str, **settings: Any) -> None:
    """Run the contract of ``op``.

    See ``dsv4_ops.testing.contract.checks.assert_contract``."""
    # imported by name, because the contract is in a higher layer than this package
    importlib.import_module("dsv4_ops.testing.contract.checks").assert_contract(op, **settings)
