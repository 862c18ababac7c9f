"""Exchange: the times of one request, and their distribution over many. Measured and simulated requests are reported alike."""

from __future__ import annotations

import dataclasses
from collections import Counter
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


def summary(exchanges: Sequence[Exchange], seconds: float, gaps: str) -> dict[str, Any]:
    """``totals`` of the requests of a load that succeeded, and their rates; the others are counted by error."""
    good = [exchange for exchange in exchanges if exchange.error is None]
    measured = totals(good, gaps)
    amounts = {"requests": (len(good), 3)} | {name: (measured[name], 1) for name in ("input_tokens", "output_tokens")}
    return measured | {
        "seconds": round(seconds, 3),
        "requests": {"sent": len(exchanges), "succeeded": len(good), "failed": len(exchanges) - len(good)},
        "errors": Counter(exchange.error for exchange in exchanges if exchange.error is not None),
        "rates": {name: round(amount / seconds, digits) if seconds else 0.0 for name, (amount, digits) in amounts.items()},
    }
