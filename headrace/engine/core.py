"""EngineCore: schedule, run, postprocess."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.outputs import OutputProcessor
from headrace.errors import EngineError
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta
from headrace.runner.protocol import Runner


class EngineCore:
    """One engine: who drives it calls ``add`` and ``abort`` between steps, and ``step`` while ``has_work``.

    Not thread-safe. What concerns one request is raised by ``add`` or comes as a delta; an exception that leaves
    ``step`` concerns the engine, which must then not be used again.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner[Any], outputs: OutputProcessor, *, pipeline_depth: int = 1) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.outputs = outputs
        self._depth = pipeline_depth
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        """Steps whose results have not been read, oldest first."""
        self._host_seconds = 0.0
        self._before = EngineStats()
        """What the counters had counted when the warm-up ended."""

    def add(self, request: Request) -> None:
        """Raises: RequestError, QueueFullError: the request was not taken."""
        self.outputs.open(self.scheduler.add(request))

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Ends a request; its blocks are free once the steps under way are done. Unknown or finished: nothing happens."""
        return self.outputs.close(self.scheduler.abort(request_id), "abort")

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[OutputDelta]:
        """Launches what the pipeline has room for, then reads the oldest step's result.

        Raises: EngineError, and whatever the runner raises: the engine is broken.
        """
        start = time.perf_counter()
        while len(self._launched) < self._depth and (plan := self.scheduler.schedule()) is not None:
            self._launched.append((plan, self.runner.launch(plan)))
        if not self._launched:
            if self.scheduler.has_work():
                raise EngineError("work is pending, and no step of it can be launched")
            return []
        plan, handle = self._launched.popleft()
        result = self.runner.collect(handle)
        deltas = self.outputs.process(self.scheduler.update(plan, result))
        self._host_seconds += time.perf_counter() - start - result.forward_seconds - result.sample_seconds
        return deltas

    def settle(self) -> None:
        """Waits for steps under way, so that weights may be written.

        Raises:
            EngineError: requests are running, which would go on with KV of the old weights.
        """
        scheduler = self.scheduler
        if scheduler.num_running or scheduler.num_waiting:
            raise EngineError("requests are running: weights may change when they have ended, or were aborted")
        while self.has_work():
            self.step()

    def weights_changed(self) -> None:
        """No KV from before is found again. Raises: as ``settle``."""
        self.settle()
        self.scheduler.bump_weight_version()

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Serves requests that nobody asked for, as it would any others, and forgets that it did.

        Raises: as ``add`` and ``step``.
        """
        for request in requests:
            self.add(request)
        while self.has_work():
            self.step()
        self.scheduler.reset_prefix_cache()
        self._before = self._counted()

    def stats(self) -> EngineStats:
        return self._counted().since(self._before)

    def _counted(self) -> EngineStats:
        return msgspec.structs.replace(self.scheduler.stats(), host_seconds=self._host_seconds)

    def close(self) -> None:
        self.runner.close()
