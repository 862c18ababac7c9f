"""SimReplica: the real scheduler of one engine, whose runner takes virtual time."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import NamedTuple

from headrace.config import CacheConfig, SchedulerConfig
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.errors import EngineError, RequestError
from headrace.routing import CacheReport, CacheReporter
from headrace.sim.step_time import StepTimeModel

_TOKEN = 1
"""Every sampled token: no request of a simulation ends at one."""


class SimDelta(NamedTuple):
    """Tokens that one sample gained in one step."""

    request_id: str
    sample: int
    tokens: int
    cached: int
    finished: bool


@dataclasses.dataclass(slots=True)
class SimStep:
    """The outcome of one turn of the engine's loop."""

    end: float
    """Time at which its deltas leave the engine."""
    deltas: list[SimDelta]
    refused: list[tuple[str, RequestError]]
    report: CacheReport | None = None


class SimReplica:
    """Takes the same turns as an engine process: messages in, then a step as ``EngineCore.step`` makes it.

    Up to ``pipeline_depth`` steps are launched; the device runs them one after the other, while the host goes on.
    """

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig, times: StepTimeModel, seed: int) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(scheduler, cache, clock=lambda: self.now)
        self.inbox: list[Request] = []
        self._changes = self.scheduler.kv.record_changes()
        self._reporter = CacheReporter(self.scheduler.kv)
        self.busy_seconds = 0.0
        """Time for which the device was busy."""
        self.num_steps = 0
        self.num_rows = 0
        """Rows of all steps."""
        self._times = times
        self._random = random.Random(seed)
        self._depth = scheduler.pipeline_depth
        self._launched: deque[tuple[StepPlan, float, float]] = deque()
        """Plan, how long the device takes for it, and when it is done."""
        self._device_free = 0.0

    def has_work(self) -> bool:
        return bool(self.inbox) or self.scheduler.has_work()

    def step(self, now: float) -> SimStep:
        """One turn that begins at ``now``. Raises: EngineError: work is pending, and no step can be launched."""
        self.now = now
        refused = self._take()
        while len(self._launched) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._launch(plan)
        if not self._launched:
            if self.scheduler.has_work():
                raise EngineError("work is pending, and no step of it can be launched")
            return SimStep(self.now, [], refused)
        plan, seconds, end = self._launched.popleft()
        self.now = max(self.now, end)
        updates = self.scheduler.update(plan, _result(plan, seconds))
        self.now += self._times.collect_seconds(plan, sum(update.finish_reason is not None for update in updates))
        deltas = [
            SimDelta(
                update.seq.request.request_id,
                update.seq.index,
                len(update.token_ids),
                update.seq.num_cached_tokens,
                update.finish_reason is not None,
            )
            for update in updates
        ]
        report = self._reporter.report(self._changes)
        self._changes.clear()
        return SimStep(self.now, deltas, refused, report)

    def _take(self) -> list[tuple[str, RequestError]]:
        refused = []
        for request in self.inbox:
            try:
                self.scheduler.add(request)
            except RequestError as error:
                refused.append((request.request_id, error))
        self.inbox.clear()
        return refused

    def _launch(self, plan: StepPlan) -> None:
        self.now += self._times.launch_seconds(plan)
        seconds = self._times.device_seconds(plan, self._random)
        self._device_free = max(self._device_free, self.now) + seconds
        self._launched.append((plan, seconds, self._device_free))
        self.now += self._times.eager_seconds(plan)
        self.busy_seconds += seconds
        self.num_steps += 1
        self.num_rows += len(plan.rows)


def _result(plan: StepPlan, seconds: float) -> StepResult:
    sampled = [row for row in plan.rows if row.num_logits]
    tokens = [[_TOKEN] * row.num_logits for row in sampled]
    return StepResult(plan.step, [row.seq_id for row in sampled], tokens, forward_seconds=seconds)
