"""Fitting step times: known times are found again, outliers do not spoil them, tails are kept."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.sim.examples import TIMES

from headrace.core.plan import LayerRange, Row, StepPlan
from headrace.errors import ConfigError
from headrace.sim.fit import MeasuredStep, fit
from headrace.sim.step_time import Curve, GraphSizes, StepFeatures, features

START, END = 0.0003, 0.0002
"""Seconds of the host for each sequence."""
GRAPHS = GraphSizes((1, 2, 4), (0, 4), (16, 32), 2)


def steps(count: int, noise: float = 0.0, spikes: float = 0.0, seed: int = 1) -> list[MeasuredStep]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        rows = round(32 ** rng.random())
        if rng.random() < 0.5:
            step = StepFeatures(rows, rows * rng.randrange(50, 2000), 0, 0)
        else:
            prompt = round(2048 ** rng.random())
            step = StepFeatures(rows, rows * rng.randrange(50, 2000), prompt, prompt * rng.randrange(1, 4000))
        seconds = TIMES.times(step.kind).mean(step) * (1 + noise * rng.gauss(0, 1))
        if rng.random() < spikes:
            seconds *= 5
        starts, ends = (rng.randrange(3), rng.randrange(2)) if step.prefill_tokens else (0, rng.randrange(3))
        host = TIMES.host_step + TIMES.host_row * rows + START * starts + END * ends
        made.append(MeasuredStep(step, rows, seconds, host, starts, ends))
    return made


def numbers(value: Any) -> int:
    """Returns how many numbers a model has, without its graphs."""
    if isinstance(value, dict):
        return sum(numbers(part) for name, part in value.items() if name != "graphs")
    return sum(map(numbers, value)) if isinstance(value, (list, tuple)) else 1


def test_known_times_are_found_again() -> None:
    fitted = fit(steps(2000))
    for kind, error in fitted.errors.items():
        assert error.mean_error < 0.03 and abs(error.total_error) < 0.02, kind
    assert fitted.model.host_step == pytest.approx(TIMES.host_step, rel=0.01)
    assert fitted.model.host_row == pytest.approx(TIMES.host_row, rel=0.01)
    assert (fitted.model.host_start, fitted.model.host_end) == pytest.approx((START, END), rel=0.01)
    assert numbers(msgspec.to_builtins(fitted.model)) <= 50
    assert min(*fitted.model.decode.base.values, *fitted.model.mixed.base.values) >= 0


def test_outliers_change_the_tail_and_not_the_middle() -> None:
    fitted = fit(steps(3000, noise=0.02, spikes=0.03))
    for kind in ("decode", "mixed"):
        times, true = fitted.model.times(kind), TIMES.times(kind)
        for step in (one.features for one in steps(200, seed=9)):
            if step.kind == kind:
                assert times.mean(step) * times.factor(0.5) == pytest.approx(true.mean(step), rel=0.12)
        assert times.factor(0.999) > 3, "the spikes are kept"
        drawn = sum(times.factor((place + 0.5) / 1000) for place in range(1000)) / 1000
        assert drawn == pytest.approx(1 + 0.03 * 4, abs=0.1), "and so is the mean"


def test_one_outlier_beyond_all_measure_does_not_become_a_habit() -> None:
    made = steps(3000, noise=0.02)
    slow = next(place for place, step in enumerate(made) if step.features.kind == "decode")
    made[slow] = made[slow]._replace(device_seconds=200 * made[slow].device_seconds)
    times = fit(made, held_out=0.01).model.decode
    total = sum(step.device_seconds for step in made if step.features.kind == "decode")
    estimated = sum(times.mean(step.features) for step in made if step.features.kind == "decode")
    drawn = sum(times.factor((place + 0.5) / 1000) for place in range(1000)) / 1000
    assert estimated * drawn == pytest.approx(total, rel=0.01)
    assert times.factor(0.5) == pytest.approx(1.0, abs=0.1), "the middle does not sink for it"


def test_the_hosts_time_has_the_measured_sum() -> None:
    """Most steps are quick, some are not: throughput follows from the sum."""
    made = [
        step._replace(host_seconds=step.host_seconds * (6 if place % 10 == 0 else 1)) for place, step in enumerate(steps(2000))
    ]
    model = fit(made).model
    estimated = sum(
        model.host_step + model.host_row * step.rows + model.host_start * step.starts + model.host_end * step.ends
        for step in made
    )
    assert estimated == pytest.approx(sum(step.host_seconds for step in made), rel=0.01)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="measure longer"):
        fit(steps(50))


def test_a_model_survives_its_file() -> None:
    model = fit(steps(500), GRAPHS).model
    assert msgspec.json.decode(msgspec.json.encode(model), type=type(model)) == model


def test_features_of_a_plan() -> None:
    rows = (Row(1, 0, 10, 1, 1, ()), Row(2, 1, 20, 1, 1, ()), Row(3, 2, 100, 4, 0, ()))
    assert features(StepPlan(1, (), (), rows, 2)) == StepFeatures(2, 32, 4, 400 + 10)
    decode = StepPlan(1, (), (), (*rows[:2], Row(4, 3, 1, 1, 1, ())), 3)
    assert features(decode, GRAPHS).decode_rows == 4 and features(decode, GraphSizes((1, 2))).decode_rows == 3
    assert TIMES.device_seconds(StepPlan(1, (3,), (), (), 0)) == 0.0
    parts = [
        StepPlan(1, (), (), (*rows[:2], Row(3, 2, 0, 100, 0, ())), 2, layers=LayerRange(*own, 7)) for own in ((0, 3), (3, 7))
    ]
    shares = [features(part) for part in parts]
    assert [share.decode_rows for share in shares] == [2, 2]
    assert [sum(share[at] for share in shares) for at in (2, 3)] == [100, 100 * 101 // 2]


def test_a_captured_step_is_padded_and_another_is_eager() -> None:
    decode = tuple(Row(number, number, 10, 1, 1, ()) for number in range(5))

    def step(rows: int, *prompts: int) -> StepFeatures:
        return features(
            StepPlan(1, (), (), (*decode[:rows], *(Row(9, 9, 0, tokens, 1, ()) for tokens in prompts)), rows), GRAPHS
        )

    assert step(3) == StepFeatures(4, 33, 0, 0) and step(5) == StepFeatures(5, 55, 0, 0, eager=True)
    assert step(1, 10, 10) == StepFeatures(4, 11, 32, 110) and step(0, 16) == StepFeatures(0, 0, 16, 136)
    assert step(1, 33) == StepFeatures(1, 11, 33, 561, eager=True), "as many tokens as no graph has room for"
    assert step(1, 5, 5, 5) == StepFeatures(1, 11, 15, 45, eager=True), "and so many prompts"
    assert step(5, 5) == StepFeatures(5, 55, 5, 15, eager=True)


def test_an_engine_with_lower_limits_captures_less() -> None:
    assert GRAPHS.limited(4, 32) == GRAPHS == GRAPHS.limited(100, 4096)
    assert GRAPHS.limited(3, 31) == GraphSizes((1, 2, 3), (0, 3), (16,), 2)
    assert GraphSizes().limited(3, 31) == GraphSizes()


def test_knots_are_where_times_jump() -> None:
    """Beyond 16 rows another kernel takes twice as long."""
    made = [
        step._replace(
            device_seconds=(0.004 if step.features.decode_rows <= 16 else 0.008) + 1e-8 * step.features.context_tokens
        )
        for step in steps(3000)
    ]
    fitted = fit(made)
    assert fitted.errors["decode"].p90_error < 0.02
    assert {16, 17} <= set(fitted.model.decode.base.knots)


def test_the_host_launches_eager_steps_and_takes_prompts_in() -> None:
    made = []
    for place, step in enumerate(steps(2000)):
        tokens, eager = step.features.prefill_tokens, place % 3 == 0
        host = step.host_seconds + 0.004 * eager + 1e-6 * tokens
        made.append(step._replace(host_seconds=host, prompt_tokens=tokens, eager=eager))
    model = fit(made).model
    assert (model.host_eager, model.host_prompt) == pytest.approx((0.004, 1e-6), rel=0.02)


def test_a_curve_is_linear_between_and_beyond_its_knots() -> None:
    curve = Curve([2, 4, 8], [1.0, 2.0, 6.0])
    assert [curve(at) for at in (0, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert Curve([5], [3.0])(100) == 3.0
