"""Calibration: measures the steps of an engine under random traffic, and fits a model of their times for the simulator."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.config import EngineArgs, EngineConfig
from headrace.core.plan import SamplePlan, StepPlan, StepResult
from headrace.core.request import Request
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor
from headrace.errors import ConfigError
from headrace.host.garbage import freeze_gc
from headrace.processes.load import LoadedEngine, load_engine
from headrace.processes.messages import StepDeltas, encode
from headrace.runner.graphs import rows_beside
from headrace.runner.inputs import PROMPT_ROWS
from headrace.sampling_params import SamplingParams
from headrace.sim.config import Calibration, EngineShape, GroupShape, StateShape
from headrace.sim.fit import Fit, MeasuredStep, enough, fit
from headrace.sim.step_time import NO_GRAPHS, GraphSizes, features
from headrace.startup.source import FileSource

_ROUND_SHARE = 0.02
"""Share of the measuring time that the shortest rounds have; the longest, in which contexts are longest, have ``_LONGEST``
times as much."""
_LONGEST = 5.0
_MOST_SHARE = 0.2
"""Largest share of a round in which a step full of prompt tokens takes longer."""
_LEAST_ROUND = 0.5
"""Seconds of a round."""
_EXTRA_SECONDS = 600.0
"""Time that a measurement may take beyond the time asked for, until a fit has the steps that it needs."""
_PROMPT_SHARE = 0.5
"""Approximate share of a round in which prompts are computed."""
_FIRST_RATE = 500.0
"""Prompt tokens a second that are assumed before any were measured."""
_MOST_OUTPUT = 256


class Watched:
    """Notes the plan and the device's time of each step of an executor, and the time that the caller waits for the device."""

    def __init__(self, executor: Executor[Any]) -> None:
        self._executor = executor
        self.waited = 0.0
        self.launched: list[StepPlan] = []
        self.done: list[tuple[StepPlan, StepResult]] = []

    def execute(self, plan: StepPlan) -> Any:
        self.launched.append(plan)
        return plan, self._executor.execute(plan)

    def sample(self, handle: Any, plan: SamplePlan) -> None:
        self._executor.sample(handle[1], plan)

    def collect(self, handle: Any) -> StepResult:
        start = time.perf_counter()
        result = self._executor.collect(handle[1])
        self.waited += time.perf_counter() - start
        self.done.append((handle[0], result))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def run(args: EngineArgs, seconds: float, *, seed: int = 0, tell: Callable[[str], None]) -> Calibration:
    """Measures for ``seconds``, or longer until a fit has the steps that it needs, in a separate process.

    Raises:
        ConfigError: the arguments cannot work, or too few steps were measured.
    """
    if args.data_parallel_size > 1:
        raise ConfigError("one engine is calibrated; the simulator multiplies it", "data_parallel_size")
    tell("loading the engine")
    engine = load_engine(FileSource(dataclasses.replace(args, skip_tokenizer_init=True)))
    freeze_gc()
    try:
        steps = measure(engine.core, engine.config, seconds, seed=seed, tell=tell)
        fitted = fit(steps, graph_sizes(engine.core, engine.config), seed=seed)
    finally:
        engine.core.close()
    return calibration(engine, fitted)


def graph_sizes(core: EngineCore, config: EngineConfig) -> GraphSizes:
    """Returns the sizes of the steps that an engine has captured."""
    rows = config.graph_rows
    if not core.executor.graphs().captured:
        return NO_GRAPHS
    return GraphSizes(rows, rows_beside(rows), config.graph_prompt_tokens, PROMPT_ROWS)


def calibration(engine: LoadedEngine, fitted: Fit) -> Calibration:
    return Calibration(
        model=engine.info.model,
        device=engine.info.environment.get("device", engine.info.device),
        engine=shape(engine.config),
        step_times=fitted.model,
        errors={kind: msgspec.to_builtins(error) for kind, error in fitted.errors.items()},
    )


def shape(config: EngineConfig) -> EngineShape:
    """Returns the settings of an engine that decide its steps."""
    scheduler, cache, states = config.scheduler, config.cache, None
    if cache.states is not None:
        states = StateShape(cache.states.block_bytes, cache.state_snapshot_bytes, cache.state_grid)
    return EngineShape(
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        cache_bytes=cache.nbytes,
        groups=[GroupShape(group.bytes_per_token, group.window, group.chunked) for group in cache.groups],
        max_prefill_tokens_beside_decode=scheduler.max_prefill_tokens_beside_decode,
        max_step_seconds=scheduler.max_step_seconds,
        pipeline_depth=scheduler.pipeline_depth,
        policy=scheduler.policy,
        enable_prefix_caching=cache.enable_prefix_caching,
        states=states,
    )


def measure(
    core: EngineCore, config: EngineConfig, seconds: float, *, seed: int, tell: Callable[[str], None]
) -> list[MeasuredStep]:
    """Measures the steps of random traffic, in rounds of two kinds: one keeps a number of sequences running, and their prompts
    come between the decode steps of the others; the other starts a number of them and lets them decode until they end. All CUDA
    graphs are captured before, as an idle server captures them."""
    while core.idle():
        tell("capturing CUDA graphs")
    graphs = graph_sizes(core, config)
    traffic = _Traffic(config, seed)
    executor, watched = core.executor, Watched(core.executor)
    core.executor = watched
    steps: list[MeasuredStep] = []
    start = time.perf_counter()
    round_seconds = max(_LEAST_ROUND, seconds * _ROUND_SHARE)
    try:
        for number in itertools.count():
            passed = time.perf_counter() - start
            if passed >= seconds and (enough(steps) or passed >= seconds + _EXTRA_SECONDS):
                return steps
            more = "" if passed < seconds else ": too few of a kind, so it goes on"
            tell(f"{passed:.0f} of {seconds:.0f} s, {len(steps)} steps{more}")
            lasts = traffic.begin_round(steps, round_seconds, seconds * _MOST_SHARE)
            if passed < seconds:
                lasts = min(lasts, seconds - passed)
            _round(core, watched, traffic, time.perf_counter() + lasts, steps, refill=number % 2 == 0, graphs=graphs)
    finally:
        core.executor = executor
    return steps


def _round(
    core: EngineCore,
    watched: Watched,
    traffic: _Traffic,
    end: float,
    steps: list[MeasuredStep],
    *,
    refill: bool,
    graphs: GraphSizes,
) -> None:
    """Runs until ``end``, or until all sequences have ended, and leaves nothing behind."""
    scheduler, serial = core.scheduler, core.scheduler.config.pipeline_depth == 1
    missing, wall, watched.waited = traffic.concurrency, 0.0, 0.0
    watched.launched.clear()
    while time.perf_counter() < end:
        requests = [traffic.request() for _ in range(missing)]
        begin = time.perf_counter()
        for request in requests:
            core.add(request)
        if not core.has_work():
            break
        deltas = core.step()
        encode(StepDeltas(deltas))
        wall += time.perf_counter() - begin
        for plan, result in watched.done:  # One, unless the pipeline is being filled.
            device = result.forward_seconds + result.sample_seconds
            host = wall - device if serial else wall - watched.waited
            ends = sum(delta.finish_reason is not None for delta in deltas)
            starts = sum(len(launched.new) for launched in watched.launched)
            prompt_tokens = sum(features(launched).prefill_tokens for launched in watched.launched)
            eager = sum(features(launched, graphs).eager for launched in watched.launched)
            found = features(plan, graphs), len(plan.rows), device, host
            steps.append(MeasuredStep(*found, starts, ends, prompt_tokens, eager))
            wall, watched.waited = 0.0, 0.0
            watched.launched.clear()
        watched.done.clear()
        missing = traffic.concurrency - scheduler.num_running - scheduler.num_waiting if refill else 0
    for request_id in traffic.names:
        core.abort(request_id)
    while core.has_work():
        core.step()
    watched.done.clear()


class _Traffic:
    """Random requests within the limits of an engine."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self.names: list[str] = []
        """Names of the requests of the round."""
        self.concurrency = 0
        self._random = random.Random(seed)
        self._config = config
        self._numbers = itertools.count()
        self._prompts = 1, 1
        """The shortest and the longest of the round."""

    def begin_round(self, steps: list[MeasuredStep], seconds: float, most: float) -> float:
        """Chooses the number of sequences, and bounds their prompts: computing them takes a part of the round.

        Returns the seconds of the round: those given or up to ``_LONGEST`` times as many, or up to ``most`` where it takes so
        long to compute as many prompt tokens as a step may have, without which the largest steps would be estimated from small
        ones.
        """
        self.names.clear()
        limits = self._config.scheduler
        self.concurrency = self._log_uniform(1, limits.max_num_seqs)
        rates = [step.features.prefill_tokens / step.device_seconds for step in steps if step.features.prefill_tokens]
        # Large steps have the highest rates. Short ones are slow for what they compute.
        rate = sorted(rates)[len(rates) * 9 // 10] if rates else _FIRST_RATE
        full = limits.max_num_batched_tokens / rate / _PROMPT_SHARE if rates else 0.0
        seconds = min(most, max(seconds * math.pow(_LONGEST, self._random.random()), full))
        affordable = int(rate * seconds * _PROMPT_SHARE / self.concurrency)
        longest = max(1, min(self._longest() - 1, affordable))
        self._prompts = self._log_uniform(1, longest), longest
        return seconds

    def request(self) -> Request:
        prompt_len = self._log_uniform(*self._prompts)
        output = self._log_uniform(1, max(1, min(_MOST_OUTPUT, self._longest() - prompt_len)))
        number = next(self._numbers)
        name = f"calibrate-{number}"
        self.names.append(name)
        vocab = self._config.model.vocab_size
        return Request(
            request_id=name,
            prompt_token_ids=[self._random.randrange(vocab) for _ in range(prompt_len)],
            sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output, detokenize=False),
            max_tokens=output,
            seed=number,
            arrival_time=time.monotonic(),
        )

    def _longest(self) -> int:
        """Longest sequence: a part of the cache, so that several fit."""
        shares = sum(1 / max(1, blocks - 1) for blocks in self._config.cache.num_blocks)
        return max(4, min(self._config.scheduler.max_model_len, int(self._config.cache.block_size / shares) // 4))

    def _log_uniform(self, low: int, high: int) -> int:
        return min(high, max(low, round(low * math.pow(high / low, self._random.random()))))
