"""A calibration and configurations of simulations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

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
    """The command of an engine's process whose steps take ``factor`` times as long as ``TIMES`` says."""
    return sys.executable, str(Path(__file__).with_name("sleeping_process.py")), str(factor)
