"""YaRN: slow down low frequencies of a rotary embedding for contexts longer than in training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.ints import above, at_least

COLLAPSED_RAMP = 1e-3
"""Width of the ramp if both of its ends fall on the same pair."""


@dataclass(frozen=True)
class YarnScaling:
    """Scale RoPE by YaRN as DeepSeek-V4's compressed layers do.

    YaRN's attention scaling is left out.

    Args:
        factor: Context length divided by the original context length; above 0.
        original_positions: Context length of the training. At least 1.
        beta_fast: Pairs with at least this many turns within the original context keep their
            frequency.
        beta_slow: Pairs with at most this many turns have their frequency divided by ``factor``.
            Above 0, and not above ``beta_fast``.
    """

    factor: float = 16.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        at_least("YarnScaling", 1, original_positions=self.original_positions)
        factors = {"factor": self.factor, "beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        above("YarnScaling", 0, **factors)
        if self.beta_fast < self.beta_slow:
            raise argument_error(
                "YarnScaling",
                "beta_fast",
                must=f"be at least beta_slow = {self.beta_slow}",
                got=self.beta_fast,
                do="Swap the two",
            )

    def slowdowns(self, rope_dim: int, theta: float) -> list[float]:
        """Return the factors by which the ``rope_dim // 2`` frequencies are multiplied.

        Args:
            rope_dim: Number of rotated values per row.
            theta: Base of the frequencies, above 1.
        """

        def pair_of(turns: float) -> float:
            """Return the pair, as a float, that makes this many turns in the original context."""
            period = self.original_positions / (2 * math.pi * turns)
            return rope_dim * math.log(period) / (2 * math.log(theta))

        # as in the official code, each end is clamped on one side only, so a ramp that lies outside
        # of the pairs has low above high
        low = max(math.floor(pair_of(self.beta_fast)), 0)
        high = min(math.ceil(pair_of(self.beta_slow)), rope_dim - 1)
        width = high - low if high != low else COLLAPSED_RAMP
        ramps = (min(max((pair - low) / width, 0.0), 1.0) for pair in range(rope_dim // 2))
        return [ramp / self.factor + 1 - ramp for ramp in ramps]


def rounding_of_frequencies(theta: float, factor: float = 0.0) -> float:
    """Return an upper limit of the relative errors of frequencies that are computed in float32.

    The power amplifies the rounding error of its exponent, and YaRN amplifies the rounding error of
    its weight ``1 - ramp``, by ``factor``. Devices round differently.
    """
    return 2.0**-23 * (abs(math.log(theta)) + factor + 8.0)
