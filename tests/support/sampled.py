"""Sampled calls of ops; each run samples the same calls."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings

from dsv4_ops import testing
from tests.helpers import NIGHTLY


def sampled(max_examples: int, by_day: int | None = None) -> settings:
    """Return hypothesis settings; ``make test`` samples ``by_day`` calls, by default a quarter."""
    count = max_examples if NIGHTLY else by_day or max_examples // 4
    same = {"derandomize": True, "database": None, "deadline": None}
    return settings(max_examples=count, suppress_health_check=list(HealthCheck), **same)


def for_each_call(name: str, check: Callable[[Any], None], chosen: Callable[[Any], Any]) -> None:
    """Check sampled calls and named cases of an op; ``chosen`` decorates with settings."""

    @chosen
    @given(testing.strategy(name))
    def compare(case: Any) -> None:
        check(case)

    compare()
    for case in testing.cases_of(name):
        check(case)
