"""Hypothesis settings of tests that draw the same calls in each run."""

from hypothesis import HealthCheck, settings

from tests.helpers import NIGHTLY


def sampled(max_examples: int) -> settings:
    """``make test`` draws a quarter of them."""
    return settings(
        max_examples=max_examples if NIGHTLY else max_examples // 4,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
