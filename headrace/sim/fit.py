"""Fits a StepTimeModel to measured steps by least squares."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.sim.step_time import (
    KINDS,
    NO_GRAPHS,
    PROBABILITIES,
    Curve,
    GraphSizes,
    KindTimes,
    StepFeatures,
    StepKind,
    StepTimeModel,
)

_KNOTS: dict[StepKind, int] = {"decode": 6, "mixed": 8}
_PLACES = 32
"""Maximum number of places where knots may be."""
_PLACING = 1500
"""Steps that knots are placed by."""
_HOST = ("host_step", "host_row", "host_start", "host_end", "host_prompt", "host_eager")
_LEAST_STEPS = 40
"""Steps of a kind that a fit needs."""
_ROUNDS = 8
"""Rounds of reweighting: outliers count less from one to the next."""
_OUTLIER = 2.0
"""Number of median deviations beyond which residuals count less."""
Array = npt.NDArray[np.float64]


class MeasuredStep(NamedTuple):
    features: StepFeatures
    rows: int
    device_seconds: float
    host_seconds: float
    starts: int = 0
    """Sequences that the host started in this turn."""
    ends: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the steps that the host launched in this turn."""
    eager: int = 0
    """Prompt tokens that were launched kernel by kernel, where other steps are replayed."""


class KindError(msgspec.Struct, frozen=True):
    """Accuracy of the estimates of held-out steps of one kind."""

    steps: int
    mean_error: float
    """Mean of the absolute relative errors."""
    p90_error: float
    total_error: float
    """Relative error of the sum of all steps, which decides the throughput."""


class Fit(NamedTuple):
    model: StepTimeModel
    errors: dict[StepKind, KindError]


def enough(steps: Sequence[MeasuredStep]) -> bool:
    """Whether ``fit`` has the steps of each kind that it needs."""
    return all(len(_of_kind(steps, kind)) >= _LEAST_STEPS for kind in KINDS)


def _of_kind(steps: Sequence[MeasuredStep], kind: StepKind) -> list[MeasuredStep]:
    return [step for step in steps if step.features.kind == kind and step.device_seconds > 0]


def fit(steps: Sequence[MeasuredStep], graphs: GraphSizes = NO_GRAPHS, *, held_out: float = 0.2, seed: int = 0) -> Fit:
    """Fits to all steps but a random part, on which the errors are measured.

    Raises:
        ConfigError: there are too few steps of a kind.
    """
    shuffled = list(steps)
    random.Random(seed).shuffle(shuffled)
    kinds: dict[StepKind, KindTimes] = {}
    errors: dict[StepKind, KindError] = {}
    for kind in KINDS:
        mine = _of_kind(shuffled, kind)
        if len(mine) < _LEAST_STEPS:
            raise ConfigError(f"{len(mine)} {kind} steps were measured, and a fit needs {_LEAST_STEPS}: measure longer")
        count = int(len(mine) * held_out)
        kinds[kind] = _fit_kind(kind, mine[count:])
        errors[kind] = _error(kinds[kind], mine[:count])
    host = dict(zip(_HOST, _fit_host(shuffled), strict=True))
    return Fit(StepTimeModel(kinds["decode"], kinds["mixed"], **host, graphs=graphs), errors)


def _fit_host(steps: Sequence[MeasuredStep]) -> list[float]:
    """Seconds of a step, a row, a start, an end, a prompt token and an eager launch. Their sum over all steps is that of the
    measured times."""
    columns = np.array([[1.0, step.rows, step.starts, step.ends, step.prompt_tokens, step.eager] for step in steps])
    seconds = np.array([max(step.host_seconds, 1e-7) for step in steps])
    found = _least_squares(columns, seconds)
    return [_rounded(float(value)) for value in found * (seconds.sum() / (columns @ found).sum())]


def _fit_kind(kind: StepKind, steps: Sequence[MeasuredStep]) -> KindTimes:
    tokens = np.array([step.features.tokens for step in steps], dtype=np.float64)
    slopes = np.array([_slopes(kind, step.features) for step in steps], dtype=np.float64)
    seconds = np.array([step.device_seconds for step in steps])
    knots = _knots(tokens, slopes, seconds, _KNOTS[kind])
    found = [float(value) for value in _least_squares(_columns(knots, tokens, slopes), seconds)]
    curve, slope = Curve([float(knot) for knot in knots], found[: len(knots)]), found[len(knots) :]
    times = KindTimes(curve, slope[0]) if kind == "decode" else KindTimes(curve, slope[0], slope[1], slope[2])
    ratios = sorted(step.device_seconds / times.mean(step.features) for step in steps)
    quantiles = [float(value) for value in np.quantile(ratios, PROBABILITIES)]
    head, tail = ratios[: math.ceil(PROBABILITIES[1] * len(ratios))], ratios[int(PROBABILITIES[-2] * len(ratios)) :]
    quantiles[0] = max(0.0, min(quantiles[1], 2 * sum(head) / len(head) - quantiles[1]))
    quantiles[-1] = max(quantiles[-2], 2 * sum(tail) / len(tail) - quantiles[-2])
    times = msgspec.structs.replace(times, residuals=tuple(quantiles))
    # The quantiles keep the tails; their mean must be that of the measured times, or throughput would be off.
    total = sum(step.device_seconds for step in steps) / sum(times.mean(step.features) for step in steps)
    drawn = sum(times.factor((place + 0.5) / 1000) for place in range(1000)) / 1000
    return msgspec.structs.replace(times, residuals=tuple(_rounded(value * total / drawn) for value in quantiles))


def _slopes(kind: StepKind, step: StepFeatures) -> list[float]:
    if kind == "decode":
        return [step.context_tokens]
    return [step.context_tokens, step.decode_rows, step.prefill_context]


def _knots(tokens: Array, slopes: Array, seconds: Array, count: int) -> list[int]:
    """The smallest and the largest value, and those between them that explain most: one after the other, then each is
    exchanged for a better one."""
    low, high = float(tokens.min()), float(tokens.max())
    every = -(-len(tokens) // _PLACING)
    tokens, slopes, seconds = tokens[::every], slopes[::every], seconds[::every]
    places = set(np.unique(tokens).astype(int).tolist())
    if len(places) > _PLACES:
        places = {int(tokens[np.abs(tokens - at).argmin()]) for at in np.geomspace(low, high, _PLACES)}
    knots = sorted({int(low), int(high)})

    def with_best(knots: list[int]) -> list[int]:
        wider = [sorted([*knots, place]) for place in sorted(places.difference(knots))]
        return min(wider, key=lambda each: _error_of(each, tokens, slopes, seconds))

    while len(knots) < min(count, len(places)):
        knots = with_best(knots)
    for knot in knots[1:-1]:
        knots = with_best([each for each in knots if each != knot])
    return knots


def _error_of(knots: Sequence[int], tokens: Array, slopes: Array, seconds: Array) -> float:
    """The mean relative error of a fit with these knots, in which outliers count as what they are: few."""
    columns = _columns(knots, tokens, slopes)
    found = _non_negative(columns / seconds[:, None], np.ones(len(seconds)))
    return float(np.abs(columns @ found / seconds - 1.0).mean())


def _columns(knots: Sequence[int], tokens: Array, slopes: Array) -> Array:
    """Returns the columns of ``KindTimes.mean``: the weight of each knot, and the factors of the slopes."""
    if len(knots) == 1:
        return np.column_stack([np.ones(len(tokens)), slopes])
    hats = [np.interp(tokens, knots, np.eye(len(knots))[place]) for place in range(len(knots))]
    return np.column_stack([*hats, slopes])


def _least_squares(columns: Array, seconds: Array) -> Array:
    """Solves ``columns @ x = seconds`` for ``x >= 0``, in relative errors, with less weight for outliers."""
    weights = np.ones(len(seconds))
    solution = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        scale = weights / seconds
        solution = _non_negative(columns * scale[:, None], seconds * scale)
        errors = np.abs(columns @ solution / seconds - 1.0)
        bound = _OUTLIER * max(float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, 1e-12)))
    return np.array([_rounded(float(value)) for value in solution])


def _non_negative(matrix: Array, target: Array) -> Array:
    """Least squares with all unknowns at least 0 (Lawson and Hanson's active sets)."""
    size = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    gram, right = (matrix / scale).T @ (matrix / scale), (matrix / scale).T @ target
    active = np.zeros(size, dtype=bool)
    solution = np.zeros(size)
    for _ in range(3 * size):
        gradient = right - gram @ solution
        gradient[active] = -math.inf
        if gradient.max(initial=-math.inf) <= 1e-10 * max(1.0, float(np.abs(right).max())):
            break
        active[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(size)
            trial[active] = np.linalg.lstsq(gram[np.ix_(active, active)], right[active], rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                solution = trial
                break
            step = min(solution[i] / (solution[i] - trial[i]) for i in np.flatnonzero(negative))
            solution = solution + step * (trial - solution)
            active &= solution > 1e-15
            solution[~active] = 0.0
    found: Array = solution / scale
    return found


def _error(times: KindTimes, steps: Sequence[MeasuredStep]) -> KindError:
    """Measures the error of the typical time: half of the residuals lie above the median, half below."""
    typical = times.factor(0.5)
    estimates = np.array([times.mean(step.features) for step in steps])
    seconds = np.array([step.device_seconds for step in steps])
    errors = np.abs(estimates * typical / seconds - 1.0)
    mean = sum(times.factor((place + 0.5) / 1000) for place in range(1000)) / 1000
    total = float(estimates.sum() * mean / seconds.sum() - 1.0)
    return KindError(len(steps), _rounded(float(errors.mean())), _rounded(float(np.quantile(errors, 0.9))), _rounded(total))


def _rounded(value: float) -> float:
    """Rounds to 6 significant digits, as a file shows them."""
    return float(f"{value:.6g}")
