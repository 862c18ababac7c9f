"""Simulation: a front with the real router, its replicas, and the time of all of them."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from headrace.core.request import Request
from headrace.errors import EngineDeadError, RequestError
from headrace.metrics.exchanges import Exchange, summary
from headrace.metrics.stats import EngineStats
from headrace.options import INT32_MAX
from headrace.routing import Capacity, Router, make_policy
from headrace.sim.config import ReplicaFailure, SimConfig
from headrace.sim.replica import SimReplica, SimStep

_STATS_SECONDS = 0.5
"""Time between two reports of an engine's statistics."""


class Simulation:
    """Runs requests through a cluster in virtual time. The same configuration gives the same result, byte for byte."""

    def __init__(self, config: SimConfig) -> None:
        """``config``: with its calibration."""
        self.config = config
        self.now = 0.0
        self.exchanges: dict[str, Exchange] = {}
        self.num_retried = 0
        self._calibration = config.measured
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        engine = self._calibration.engine
        policy = make_policy(config.routing, config.replicas, config.seed)
        by_priority = engine.policy == "priority"
        self.router = Router(
            policy, config.replicas, engine.block_size, by_priority=by_priority, max_queue_len=config.max_queue_len
        )
        self._running = [False] * config.replicas
        """Whether a turn of the replica's loop is among the events."""
        self._lives = [0] * config.replicas
        """Number of times that each replica has died: events from before a death are dropped."""
        self._report_at = [0.0] * config.replicas
        self._last: dict[str, float] = {}
        """Request -> when its last tokens arrived."""
        self._requests: dict[str, Request] = {}
        """Requests that have not ended."""
        self._times = self._calibration.step_times.limited(engine.max_num_seqs, engine.max_num_batched_tokens)
        self.replicas = [self._make(number) for number in range(config.replicas)]
        for number in range(config.replicas):
            self.router.start(number, self._capacity())

    def _capacity(self) -> Capacity:
        """A single engine has no router before it, and takes all requests."""
        return self._calibration.engine.capacity() if self.config.replicas > 1 else Capacity(INT32_MAX, INT32_MAX, INT32_MAX)

    def _make(self, number: int) -> SimReplica:
        engine = self._calibration.engine
        scheduler = engine.scheduler()
        if self.config.replicas == 1:
            scheduler = dataclasses.replace(scheduler, max_queue_len=self.config.max_queue_len)
        return SimReplica(scheduler, engine.cache(), self._times, self.config.seed * 4096 + number)

    def run(self, requests: Iterable[Request]) -> None:
        """Runs until all requests have ended. They come in order of arrival."""
        arrivals = iter(requests)
        for failure in self.config.failures:
            self._at(failure.at, partial(self._kill, failure))
        self._expect(arrivals)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    # The front

    def _expect(self, arrivals: Iterator[Request]) -> None:
        request = next(arrivals, None)
        if request is not None:
            self._at(request.arrival_time, partial(self._arrive, request, arrivals))

    def _arrive(self, request: Request, arrivals: Iterator[Request]) -> None:
        name = request.request_id
        self.exchanges[name] = Exchange(input_tokens=len(request.prompt_token_ids), error="not finished")
        self._requests[name] = request
        self._queue(request)
        self._expect(arrivals)

    def _queue(self, request: Request) -> None:
        try:
            self.router.add(request, self.now)
        except (RequestError, EngineDeadError) as error:
            self._fail(request.request_id, str(error))
        self._bind()

    def _bind(self) -> None:
        for request, number in self.router.bind(self.now):
            arrival = self.now + self.config.message_seconds
            self._at(arrival, partial(self._deliver, request, number, self._lives[number]))

    def _fail(self, request_id: str, reason: str) -> None:
        self.exchanges[request_id].error = reason
        self._requests.pop(request_id, None)

    def _hear(self, number: int, life: int, step: SimStep, computed: int | None) -> None:
        """The messages of one turn of a replica arrive."""
        if self._lives[number] != life:
            return
        for request_id, error in step.refused:
            self.router.rejected(request_id)
            self._fail(request_id, str(error))
        if step.report is not None:
            self.router.cache_changed(number, step.report)
        for delta in step.deltas:
            self._note(delta.request_id, delta.tokens, delta.finished)
            self.router.progress(delta.request_id, delta.sample, delta.tokens, delta.cached, delta.finished)
        if computed is not None:
            self.router.loads.observe(number, computed)
        self._bind()

    def _note(self, request_id: str, tokens: int, finished: bool) -> None:
        exchange, arrived = self.exchanges[request_id], self._requests[request_id].arrival_time
        if tokens:
            if exchange.first_token is None:
                exchange.first_token = self.now - arrived
                self.router.accepted(request_id)
            else:
                exchange.between_tokens += [(self.now - self._last[request_id]) / tokens] * tokens
            self._last[request_id] = self.now
            exchange.output_tokens += tokens
        if finished:
            exchange.error, exchange.whole = None, self.now - arrived
            del self._requests[request_id]
            self._last.pop(request_id, None)

    # The replicas

    def _deliver(self, request: Request, number: int, life: int) -> None:
        if self._lives[number] != life:
            return
        self.replicas[number].inbox.append(request)
        if not self._running[number]:
            self._running[number] = True
            self._turn(number, life)

    def _turn(self, number: int, life: int) -> None:
        """One turn of a replica's loop. Messages that arrive before its end are taken in by the next."""
        replica = self.replicas[number]
        if self._lives[number] != life:
            return
        if not replica.has_work():
            self._running[number] = False
            return
        step = replica.step(self.now)
        computed = None
        if step.end >= self._report_at[number] or not replica.has_work():
            self._report_at[number] = step.end + _STATS_SECONDS
            computed = replica.scheduler.stats().computed_prompt_tokens
        if step.deltas or step.refused or step.report is not None or computed is not None:
            self._at(step.end + self.config.message_seconds, partial(self._hear, number, life, step, computed))
        self._at(step.end, partial(self._turn, number, life))

    def _kill(self, failure: ReplicaFailure) -> None:
        number = failure.replica
        if not self.router.loads.up[number]:
            return
        self._lives[number] += 1
        self._running[number] = False
        lost = self.router.stop(number)
        dead, self.replicas[number] = self.replicas[number], self._make(number)
        self.replicas[number].busy_seconds = dead.busy_seconds
        self.replicas[number].num_steps, self.replicas[number].num_rows = dead.num_steps, dead.num_rows
        self._at(self.now + failure.down_seconds, partial(self._restart, number))
        for request_id in lost:
            if self.exchanges[request_id].first_token is None and self.router.loads.num_up:
                self.num_retried += 1
                self._queue(self._requests[request_id])
            else:
                self._fail(request_id, f"replica {number} died")
        self._bind()

    def _restart(self, number: int) -> None:
        self.router.start(number, self._capacity())
        self._bind()

    # The outcome

    def report(self) -> dict[str, Any]:
        """Returns a measured server's numbers, and the work of each replica."""
        return summary(list(self.exchanges.values()), self.now, "between tokens") | {
            "benchmark": "simulate",
            "replicas": self.config.replicas,
            "routing": self.config.routing,
            "retried": self.num_retried,
            "by_replica": [self._by_replica(number) for number in range(self.config.replicas)],
        }

    def _by_replica(self, number: int) -> dict[str, Any]:
        replica, routing = self.replicas[number], self.router.stats[number]
        stats = replica.scheduler.stats()
        query = stats.prefix_query_tokens
        return {
            "requests": routing.accepted,
            "steps": replica.num_steps,
            "rows_per_step": round(replica.num_rows / replica.num_steps, 2) if replica.num_steps else 0.0,
            "busy": round(replica.busy_seconds / self.now, 4) if self.now else 0.0,
            "preemptions": stats.num_preemptions,
            "prefix_hit_rate": round(stats.prefix_hit_tokens / query, 4) if query else 0.0,
        } | self._states_of(stats)

    def _states_of(self, stats: EngineStats) -> dict[str, Any]:
        """Counts what the replica found and kept for state layers, if there are any."""
        if self._calibration.engine.states is None:
            return {}
        query = stats.prefix_query_tokens
        return {
            "prefix_attention_rate": round(stats.prefix_attention_tokens / query, 4) if query else 0.0,
            "state_snapshots_saved": sum(stats.state_snapshots_saved.values()),
            "state_snapshots_skipped": sum(stats.state_snapshots_skipped.values()),
        }
