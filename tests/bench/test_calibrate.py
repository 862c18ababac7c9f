"""Calibration: a runner of known times, and a real one compared with its simulation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.engine.fakes import FakeRunner
from support.models.tiny_llama import write_config
from support.sim.examples import SHAPE, TIMES, config, traffic

from headrace.bench import calibrate
from headrace.config import EngineArgs
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.outputs import OutputProcessor
from headrace.processes.load import load_engine
from headrace.sim.cluster import Simulation
from headrace.sim.config import Calibration, read
from headrace.sim.fit import enough, fit
from headrace.sim.traffic import generate
from headrace.startup.source import FileSource


def sleeping_engine(depth: int) -> tuple[EngineCore, Any]:
    shape = msgspec.structs.replace(SHAPE, pipeline_depth=depth)
    scheduler, cache = shape.scheduler(), shape.cache()
    core = EngineCore(
        Scheduler(scheduler, cache), FakeRunner(TIMES.device_seconds), OutputProcessor(None), pipeline_depth=depth
    )
    facts = SimpleNamespace(scheduler=scheduler, cache=cache, model=SimpleNamespace(vocab_size=100), graph_rows=())
    return core, facts


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_the_times_of_a_runner_are_found(depth: int) -> None:
    core, facts = sleeping_engine(depth)
    executor = core.executor
    steps = calibrate.measure(core, facts, 2.5, seed=1, tell=lambda what: None)
    assert core.executor is executor and not core.has_work()
    core.check_integrity()
    assert {step.features.kind for step in steps} == {"decode", "mixed"}
    assert all(step.device_seconds == pytest.approx(TIMES.times(step.features.kind).mean(step.features)) for step in steps)
    assert sorted(step.host_seconds for step in steps)[len(steps) // 2] < 0.5, "the host does not count the device's time"
    if min(sum(step.features.kind == kind for step in steps) for kind in ("decode", "mixed")) >= 40:
        assert all(error.mean_error < 0.25 for error in fit(steps).errors.values())


def test_a_short_measurement_goes_on_until_a_fit_has_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sim.fit._LEAST_STEPS", 5)
    core, facts = sleeping_engine(1)
    told: list[str] = []
    steps = calibrate.measure(core, facts, 0.05, seed=1, tell=told.append)
    assert enough(steps) and "too few of a kind" in told[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_engine_and_its_simulation(tmp_path: Path) -> None:
    """Calibrated with other limits than those that are compared. The bound is that of a busy machine."""
    folder = write_config(tmp_path)
    args = EngineArgs(model=str(folder), load_format="dummy", num_threads=1, max_num_seqs=32, num_kv_blocks=1000)
    calibration = calibrate.run(args, 40.0, tell=print)
    print(calibration.errors)
    (tmp_path / "calibration.json").write_text(json.dumps(msgspec.to_builtins(calibration)))
    assert read(tmp_path / "calibration.json", Calibration, "") == calibration

    other = EngineArgs(model=str(folder), load_format="dummy", num_threads=1, max_num_seqs=12, num_kv_blocks=300)
    engine = load_engine(FileSource(other))
    asked = traffic(400, rate=1000.0)
    requests = list(generate(asked, 5, 256))
    start, waiting, tokens = time.perf_counter(), list(requests), 0
    while waiting or engine.core.has_work():
        now = time.perf_counter() - start
        while waiting and waiting[0].arrival_time <= now:
            engine.core.add(waiting.pop(0))
        tokens += sum(len(delta.token_ids) for delta in engine.core.step())
    seconds = time.perf_counter() - start
    shape = calibrate.shape(engine.config)
    engine.core.close()
    settings = config(message_seconds=0.0, max_queue_len=10_000)
    settings = msgspec.structs.replace(
        settings, calibration=Calibration(engine=shape, step_times=calibration.step_times), traffic=asked
    )
    simulation = Simulation(settings)
    simulation.run(requests)
    report = simulation.report()
    print(f"{tokens / seconds:.0f} tokens/s, simulated {report['output_tokens'] / simulation.now:.0f}")
    assert tokens == report["output_tokens"]
    assert simulation.now == pytest.approx(seconds, rel=0.4)
