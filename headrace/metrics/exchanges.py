"""Exchange: the times of one request, and their distribution over many. Measured and simulated requests are reported alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

PERCENTILES = (50, 90, 99)


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; empty for no values."""
    if not seconds:
        return {}
    import numpy as np

    times = np.array(seconds) * 1e3
    quantiles = zip(PERCENTILES, np.percentile(times, PERCENTILES), strict=True)
    result = {"mean": times.mean()} | {f"p{percent}": value for percent, value in quantiles} | {"max": times.max()}
    return {name: round(float(value), 3) for name, value in result.items()}


@dataclasses.dataclass
class Exchange:
    """One request, in seconds since it was sent."""

    first_token: float | None = None
    between_tokens: list[float] = dataclasses.field(default_factory=list)
    """One gap for each token, or event, after the first."""
    whole: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def totals(exchanges: Sequence[Exchange], gaps: str) -> dict[str, Any]:
    """Tokens and distributions of times. ``gaps``: name of the times between tokens or events."""
    return {
        "input_tokens": sum(exchange.input_tokens for exchange in exchanges),
        "output_tokens": sum(exchange.output_tokens for exchange in exchanges),
        "milliseconds": {
            "first token": distribution([e.first_token for e in exchanges if e.first_token is not None]),
            gaps: distribution([gap for e in exchanges for gap in e.between_tokens]),
            "whole request": distribution([e.whole for e in exchanges if e.whole is not None]),
        },
    }
