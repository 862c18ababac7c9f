"""StepTimeModel: how long a step takes, as a function of its plan."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from headrace.core.plan import StepPlan

StepKind = Literal["decode", "mixed"]
KINDS: tuple[StepKind, ...] = ("decode", "mixed")
PROBABILITIES = (0.0, 0.5, 0.9, 0.99, 1.0)
"""Of the quantiles that a ``KindTimes`` keeps of its residuals. The last one is no quantile: values between the last two
are drawn evenly, and their mean is that of the measured ones, which a single outlier at the end would exceed."""


class StepFeatures(NamedTuple):
    """What the time of a step depends on."""

    decode_rows: int
    """Padded to the captured size where the step is replayed."""
    context_tokens: int
    """Tokens whose KV the decode rows read."""
    prefill_tokens: int
    prefill_context: int
    """Sum over prompt tokens of the tokens whose KV each reads."""

    @property
    def kind(self) -> StepKind:
        return "mixed" if self.prefill_tokens else "decode"


def features(plan: StepPlan, graph_rows: Sequence[int] = ()) -> StepFeatures:
    """``graph_rows``: sizes to which decode steps are padded, rising."""
    decode, prefill = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
    rows = len(decode)
    if not prefill and (place := bisect_left(graph_rows, rows)) < len(graph_rows):
        rows = graph_rows[place]
    return StepFeatures(
        rows,
        sum(row.num_computed + row.num_tokens for row in decode),
        sum(row.num_tokens for row in prefill),
        sum(row.num_tokens * row.num_computed + row.num_tokens * (row.num_tokens + 1) // 2 for row in prefill),
    )


class Curve(msgspec.Struct, frozen=True):
    """Linear between its knots, which rise, and beyond them as between the last two."""

    knots: list[float]
    values: list[float]

    def weights(self, at: float) -> list[float]:
        """Of each value in the curve at a point."""
        return curve_weights(self.knots, at)

    def __call__(self, at: float) -> float:
        return sum(weight * value for weight, value in zip(self.weights(at), self.values, strict=True) if weight)


def curve_weights(knots: Sequence[float], at: float) -> list[float]:
    weights = [0.0] * len(knots)
    if len(knots) == 1:
        weights[0] = 1.0
        return weights
    right = min(max(bisect_left(knots, at), 1), len(knots) - 1)
    share = (at - knots[right - 1]) / (knots[right] - knots[right - 1])
    # Below the first knot the curve is constant: times do not become negative.
    share = max(share, 0.0)
    weights[right - 1], weights[right] = 1.0 - share, share
    return weights


class KindTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of the steps of one kind."""

    base: Curve
    """By decode rows for the kind ``decode``, by prompt tokens for ``mixed``."""
    context: float
    """Per token read by decode rows."""
    row: float = 0.0
    """Per decode row of a mixed step."""
    prefill_context: float = 0.0
    """Per token read by prompt tokens."""
    residuals: tuple[float, ...] = (1.0,) * len(PROBABILITIES)
    """Quantiles of measured by estimated time, for ``PROBABILITIES``."""

    def mean(self, step: StepFeatures) -> float:
        return (
            self.base(step.prefill_tokens if step.prefill_tokens else step.decode_rows)
            + self.context * step.context_tokens
            + (self.row * step.decode_rows if step.prefill_tokens else 0.0)
            + self.prefill_context * step.prefill_context
        )

    def factor(self, probability: float) -> float:
        right = max(1, bisect_left(PROBABILITIES, probability))
        low, high = PROBABILITIES[right - 1], PROBABILITIES[right]
        share = (probability - low) / (high - low)
        return self.residuals[right - 1] * (1.0 - share) + self.residuals[right] * share


class StepTimeModel(msgspec.Struct, frozen=True):
    """Seconds that the device and the host spend on a step. At most 40 numbers.

    A step without prompt tokens is of the kind ``decode``, another ``mixed``.
    """

    decode: KindTimes
    mixed: KindTimes
    host_step: float = 0.0
    """Seconds of a step on the host, before its launch and after its result together."""
    host_row: float = 0.0
    """The same for each row."""
    host_start: float = 0.0
    """For each sequence that a step starts, from its request's arrival in the engine on."""
    host_end: float = 0.0
    """For each sequence that ends with a step."""
    graph_rows: list[int] = []
    """Sizes to which decode steps are padded; empty: they are not."""

    def times(self, kind: StepKind) -> KindTimes:
        return self.decode if kind == "decode" else self.mixed

    def device_seconds(self, plan: StepPlan, random: random.Random | None = None) -> float:
        """``random``: draws a residual; None: the estimate without one."""
        if not plan.rows:
            return 0.0
        step = features(plan, self.graph_rows)
        times = self.times(step.kind)
        seconds = times.mean(step)
        return seconds if random is None else seconds * times.factor(random.random())

    def launch_seconds(self, plan: StepPlan) -> float:
        """On the host, until the step is launched."""
        return (self.host_step + self.host_row * len(plan.rows)) / 2 + self.host_start * len(plan.new)

    def collect_seconds(self, plan: StepPlan, num_ended: int) -> float:
        """On the host, from the step's result on."""
        return (self.host_step + self.host_row * len(plan.rows)) / 2 + self.host_end * num_ended
