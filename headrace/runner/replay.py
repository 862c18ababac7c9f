"""Replaying a recorded stream of plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.core.plan import Recorded, RunnerEvent, SamplePlan, StepPlan, StepResult, decode_plan
from headrace.errors import ConfigError
from headrace.runner.parts.record import FORMAT, LENGTH_BYTES, Header, Recorder, fingerprint
from headrace.runner.runner import ModelRunner


def read_plans(path: str | Path) -> tuple[Header, Iterator[Recorded]]:
    """The header, and the plans in their order. What a crash cut off at the end is left out.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"recorded steps cannot be read from {path}: {error.strerror}", "record_steps") from error
    records = _records(data)
    try:
        header = msgspec.msgpack.decode(next(records, b""), type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds no recorded steps", "record_steps") from error
    if header.format != FORMAT:
        raise ConfigError(f"{path} holds {header.format!r}, not {FORMAT!r}", "record_steps")
    return header, map(decode_plan, records)


def _records(data: bytes) -> Iterator[bytes]:
    place = 0
    while place + LENGTH_BYTES <= len(data):
        end = place + LENGTH_BYTES + int.from_bytes(data[place : place + LENGTH_BYTES], "little")
        if end > len(data):
            return
        yield data[place + LENGTH_BYTES : end]
        place = end


def replay(path: str | Path, runner: ModelRunner) -> Iterator[StepResult]:
    """Runs recorded plans through a runner that has run nothing yet and records nothing now, and yields their results.

    Raises:
        ConfigError: the plans were made for another model or configuration; names what differs.
    """
    header, plans = read_plans(path)
    ours = fingerprint(runner.config)
    theirs = header.fingerprint
    differing = [f"{name} ({theirs.get(name)}, not {ours[name]})" for name in ours if theirs.get(name) != ours[name]]
    if differing:
        raise ConfigError(f"the steps were recorded under another configuration: {', '.join(differing)}", "record_steps")
    runner.parts[:] = [part for part in runner.parts if not isinstance(part, Recorder)]
    return _results(plans, runner)


def _results(plans: Iterator[Recorded], runner: ModelRunner) -> Iterator[StepResult]:
    """A step is sampled by the plan that follows its own, or by an empty one. Raises ConfigError where weights were updated."""
    plan, last = next(plans, None), 0
    while isinstance(plan, StepPlan | RunnerEvent):
        if isinstance(plan, RunnerEvent):
            if plan.what == "weights":
                raise ConfigError(f"weights were updated after step {last}: what follows needs the new ones", "record_steps")
            runner.capture_next()
            plan = next(plans, None)
            continue
        last = plan.step
        step, following = runner.execute(plan), next(plans, None)
        if isinstance(following, SamplePlan):
            runner.sample(step, following)
            following = next(plans, None)
        else:
            runner.sample(step, SamplePlan(plan.step))
        yield runner.collect(step)
        plan = following
