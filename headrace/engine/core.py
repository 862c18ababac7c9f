"""EngineCore: schedule, run, postprocess."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headrace.constrain.constraints import Constraints, Failed
from headrace.core.plan import SamplePlan, StepPlan
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.adapters import LoadedAdapters
from headrace.engine.outputs import OutputProcessor
from headrace.engine.weights import WeightControl
from headrace.errors import EngineError, RequestError, UnavailableError
from headrace.kv.prefix_cache import Change
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta

if TYPE_CHECKING:
    from headrace.engine.executor import Executor

logger = logging.getLogger("headrace.engine")


_COMPILE_SECONDS = 0.01
"""Time that a step without other work waits for a constraint to be compiled: requests must not wait longer to be taken in."""


class CacheListener(Protocol):
    """Learns what the prefix cache stores and removes."""

    def changed(self, changes: Sequence[Change]) -> None:
        """Called after each step and each call that changed the cache."""
        ...

    def close(self) -> None: ...


class EngineCore:
    """One engine. Call ``add`` and ``abort`` between steps, and ``step`` while ``has_work``.

    Not thread-safe. What concerns one request is raised by ``add`` or comes as a delta; an exception that leaves
    ``step`` concerns the engine, which must then not be used again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor[Any],
        outputs: OutputProcessor,
        constraints: Constraints | None = None,
        *,
        pipeline_depth: int = 1,
        weights_must_be_complete: bool = False,
        capture_seconds: float = 0.0,
    ) -> None:
        """``constraints``: None: constrained requests are refused. ``capture_seconds``: most time that an engine that wakes
        captures CUDA graphs, before it captures the others while it is idle."""
        self.scheduler = scheduler
        self.executor: Executor[Any] = executor
        self.outputs = outputs
        self.adapters = LoadedAdapters(scheduler, executor)
        self._depth = pipeline_depth
        self._capture_seconds = capture_seconds
        self._constraints = constraints if constraints is not None else Constraints(None, 1)
        self._launched: deque[tuple[StepPlan, Any]] = deque()
        """Steps whose results have not been read, oldest first."""
        self._unsampled: tuple[StepPlan, Any] | None = None
        """The last launched step, while its masks wait for tokens in flight. The next is planned after it is sampled."""
        self.hold = False
        """No further step is planned: sequences are frozen once those in flight are collected."""
        self.refusal = ""
        """Reason why requests are refused; empty: they are taken."""
        self._host_seconds = 0.0
        self.weights = WeightControl(self, complete=weights_must_be_complete)
        self._before = EngineStats()
        """Counters at the end of the warm-up."""
        self._listeners: list[CacheListener] = []
        self._changes: list[Change] = []
        """Changes of the prefix cache that the listeners have not heard of yet."""

    def listen(self, listener: CacheListener) -> None:
        """Reports every later change of the prefix cache, which is empty now as a rule. ``close`` closes the listener."""
        if not self._listeners:
            self._changes = self.scheduler.kv.record_changes()
        self._listeners.append(listener)

    def _report_changes(self) -> None:
        changes = self._changes.copy()
        self._changes.clear()
        for listener in self._listeners:
            listener.changed(changes)

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            RequestError, QueueFullError: the request was refused.
            UnavailableError: no request is taken at present.
            EngineError: taking it in failed. Nothing is left of it, and other requests are not affected.
        """
        if self.refusal:
            raise UnavailableError(self.refusal)
        self.adapters.check(request)
        if request.constraint is not None:
            self._constraints.check()
        try:
            sequences = self.scheduler.add(request)
            self.outputs.open(sequences)
            self._constraints.open(sequences)
        except RequestError:
            raise
        except Exception as error:
            logger.exception("request %s cannot be taken in", request.request_id)
            self.abort(request.request_id)
            raise EngineError(f"the request cannot be taken in: {type(error).__name__}: {error}") from error

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Ends a request; its blocks are free once the steps under way are done. Unknown or finished: nothing happens."""
        self._constraints.drop(request_id)
        return self.outputs.close(self.scheduler.abort(request_id), "abort")

    def abort_all(self) -> list[OutputDelta]:
        """Ends all requests."""
        return [delta for request_id in self.scheduler.request_ids for delta in self.abort(request_id)]

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is not collected."""
        return bool(self._launched)

    def preempt_all(self) -> None:
        """Takes slots and KV from all running sequences, which are computed again. No step is in flight."""
        self.scheduler.preempt_all()

    def runnable(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.in_flight if self.hold else self.scheduler.has_work()

    def step(self) -> list[OutputDelta]:
        """Launches what the pipeline has room for, then reads the oldest step's result.

        Raises: EngineError, and whatever the executor raises: the engine is broken.
        """
        start = time.perf_counter()
        if self._constraints.compiling:
            self._fail(self._constraints.collect())
        self._launch()
        if not self._launched:
            if self._constraints.compiling:
                self._constraints.wait(_COMPILE_SECONDS)
            elif self.runnable():
                raise EngineError("work is pending, and no step of it can be launched")
            return []
        plan, handle = self._launched.popleft()
        result = self.executor.collect(handle)
        updates = self.scheduler.update(plan, result)
        if self._unsampled is not None:  # The device waits for it: before anything else.
            waited = time.perf_counter()
            self._sample(*self._unsampled)
            self._constraints.wait_seconds += time.perf_counter() - waited
            self._launch()
        deltas, ended = self.outputs.process(updates)
        for sequence, reason, stop_reason in ended:
            self.scheduler.finish(sequence, reason, stop_reason)
        self.adapters.collect()
        if self._changes:
            self._report_changes()
        self._host_seconds += time.perf_counter() - start - result.forward_seconds - result.sample_seconds
        return deltas

    def _launch(self) -> None:
        while self._unsampled is None and len(self._launched) < self._depth:
            if self.hold or (plan := self.scheduler.schedule()) is None:
                return
            self._unsampled = plan, self.executor.execute(plan)
            self._launched.append(self._unsampled)
            self._sample(*self._unsampled)

    def _sample(self, plan: StepPlan, handle: Any) -> None:
        """Launches the sampling of the last launched step, unless a mask depends on a token in flight."""
        constrained = self.scheduler.constrained()
        sample_plan = SamplePlan(plan.step)
        if constrained:
            if self.scheduler.masks_wait():
                return
            seq_ids, masks, failed = self._constraints.masks(constrained)
            sample_plan = SamplePlan(plan.step, seq_ids, masks.data.cast("B"))
            self._fail(failed)
        self.executor.sample(handle, sample_plan)
        self._unsampled = None

    def _fail(self, failed: Failed) -> None:
        for sequence, error in failed:
            self.scheduler.fail(sequence, error)

    def start_threads(self) -> None:
        """Starts all worker threads, which the first requests that need them would start otherwise."""
        self._constraints.start_threads()

    def idle(self) -> bool:
        """Captures one CUDA graph unless requests are waiting. False: nothing was captured."""
        if self.weights.asleep:
            return False
        graphs = self.executor.graphs()
        if self.has_work() or graphs.captured >= graphs.total:
            return False
        self.executor.capture_next()
        return True

    def capture_graphs(self) -> None:
        """Captures CUDA graphs again, for a while. No step is in flight."""
        end, graphs = time.perf_counter() + self._capture_seconds, self.executor.graphs()
        while graphs.captured < graphs.total and time.perf_counter() < end:
            graphs = self.executor.capture_next()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False: prefix caching is disabled."""
        caching = self.scheduler.kv.reset_prefix_cache()
        if self._changes:
            self._report_changes()
        return caching

    def check_integrity(self) -> None:
        """Raises: EngineError: the block pool or the queues are inconsistent."""
        self.scheduler.check_integrity()

    def drain(self) -> None:
        """Waits for steps in flight, so that weights may be written.

        Raises:
            EngineError: requests are running, which would go on with KV of the old weights.
        """
        scheduler = self.scheduler
        if scheduler.num_running or scheduler.num_waiting:
            raise EngineError("requests are running: weights may change when they have ended, or were aborted")
        while self.has_work():
            self.step()

    def weights_changed(self, version: str, number: int = 0) -> int:
        """Invalidates cached prefixes. No step is in flight. Returns the version's number."""
        number = self.scheduler.weights_changed(version, number)
        if self._changes:
            self._report_changes()
        return number

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Serves warm-up requests, then resets the prefix cache and the counters.

        Raises: as ``add`` and ``step``.
        """
        for request in requests:
            self.add(request)
        while self.has_work():
            self.step()
        self.scheduler.kv.reset_prefix_cache()
        self._before = self._counted()

    def stats(self) -> EngineStats:
        return self._counted().since(self._before)

    def _counted(self) -> EngineStats:
        graphs = self.executor.graphs()
        return msgspec.structs.replace(
            self.scheduler.stats(),
            adapter_sequences=self.adapters.sequences(),
            host_seconds=self._host_seconds,
            graphs_captured=graphs.captured,
            graphs_total=graphs.total,
            grammar_compile_seconds=self._constraints.compile_seconds,
            grammar_fill_seconds=self._constraints.fill_seconds,
            grammar_wait_seconds=self._constraints.wait_seconds,
            grammar_requests=self._constraints.requests.copy(),
            parse_fallbacks=dict(self.outputs.parse_fallbacks),
        )

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._constraints.close()
        self.executor.close()
