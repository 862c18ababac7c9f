"""A calibration and configurations of simulations."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.plan import SamplePlan, StepPlan, StepResult
from headrace.runner.graphs import GraphCount
from headrace.sim.cluster import Simulation
from headrace.sim.config import Calibration, EngineShape, GroupShape, Lengths, Prefixes, SimConfig, Traffic
from headrace.sim.step_time import Curve, KindTimes, StepTimeModel
from headrace.sim.traffic import generate

TIMES = StepTimeModel(
    decode=KindTimes(Curve([1, 8, 32], [0.008, 0.009, 0.012]), context=2e-8),
    mixed=KindTimes(Curve([1, 256, 2048], [0.009, 0.012, 0.060]), context=2e-8, row=5e-5, prefill_context=1e-9),
    host_step=0.0005,
    host_row=0.00002,
)
SHAPE = EngineShape(
    max_model_len=16_384,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    block_size=16,
    cache_bytes=16 * 4001,
    groups=[GroupShape(1)],
    pipeline_depth=2,
)
"""Its cache has 64,000 tokens."""


def slower(factor: float) -> StepTimeModel:
    """Longer steps without a host's time: what a real host takes beside them counts less."""

    def scaled(times: KindTimes) -> KindTimes:
        curve = msgspec.structs.replace(times.base, values=[value * factor for value in times.base.values])
        return msgspec.structs.replace(times, base=curve)

    return StepTimeModel(scaled(TIMES.decode), scaled(TIMES.mixed))


def config(engine: dict[str, Any] | None = None, times: StepTimeModel = TIMES, **fields: Any) -> SimConfig:
    shape = msgspec.structs.replace(SHAPE, **(engine or {}))
    return SimConfig(calibration=Calibration(engine=shape, step_times=times), **fields)


def traffic(requests: int = 200, rate: float = 50.0, **fields: Any) -> Traffic:
    lengths = {"input_tokens": Lengths(200, 0.8, 4000), "output_tokens": Lengths(20, 0.8, 200)}
    return Traffic(requests=requests, rate=rate, **(lengths | fields))


SHARED = traffic(requests=400, rate=90.0, prefixes=Prefixes(groups=24, tokens=2048, skew=0.5), input_tokens=Lengths(100, 0.5))
"""A replica's cache holds the prefixes of half of the groups, beside what runs."""


def run(settings: SimConfig) -> Simulation:
    assert settings.traffic is not None
    simulation = Simulation(settings)
    simulation.run(generate(settings.traffic, settings.seed, settings.measured.engine.max_model_len))
    return simulation


def sleeping_process(factor: float) -> tuple[str, ...]:
    """The command of an engine's process over a :class:`SleepingExecutor`, whose steps take ``factor`` times as long."""
    return sys.executable, str(Path(__file__).with_name("sleeping_process.py")), str(factor)


class RealTime:
    """The time of the machine."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualTime(RealTime):
    """Passes by sleeping alone, so that no load of the machine changes it."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class SleepingExecutor:
    """Runs steps that take as long as the model says, one after the other."""

    def __init__(self, times: StepTimeModel, clock: RealTime) -> None:
        self._times = times
        self._clock = clock
        self._free = 0.0
        self._launched: deque[tuple[StepPlan, float, float]] = deque()
        self.num_steps = 0
        self.num_rows = 0

    def execute(self, plan: StepPlan) -> StepPlan:
        seconds = self._times.device_seconds(plan)
        self._free = max(self._free, self._clock.now()) + seconds
        self._launched.append((plan, self._free, seconds))
        self.num_steps += 1
        self.num_rows += len(plan.rows)
        return plan

    def sample(self, handle: StepPlan, plan: SamplePlan) -> None:
        pass

    def collect(self, handle: StepPlan) -> StepResult:
        plan, end, seconds = self._launched.popleft()
        self._clock.sleep(max(0.0, end - self._clock.now()))
        sampled = [row for row in plan.rows if row.num_logits]
        tokens = [[1] * row.num_logits for row in sampled]
        return StepResult(plan.step, [row.seq_id for row in sampled], tokens, {}, {}, {}, seconds)

    def graphs(self) -> GraphCount:
        return GraphCount(0, 0)

    def capture_next(self) -> GraphCount:
        return self.graphs()

    def sentinels(self) -> list[int]:
        return []

    def close(self) -> None:
        pass
