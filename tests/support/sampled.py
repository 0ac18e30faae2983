"""Hypothesis settings of tests that draw the same calls in each run."""

from hypothesis import HealthCheck, settings


def sampled(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
