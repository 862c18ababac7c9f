"""ReplicaSet: several engines behind one client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.weights import OF_FILES, ServedWeights, WeightStatus
from headrace.engine.endings import aborted
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from headrace.metrics.prometheus import ReplicaReport
from headrace.metrics.stats import EngineStats
from headrace.options import INT32_MAX
from headrace.processes import messages
from headrace.processes.quarantine import Quarantine
from headrace.processes.replica_weights import ReplicaWeights
from headrace.processes.spawn import Spawned
from headrace.processes.supervisor import Client, EngineSupervisor, Health
from headrace.routing import Capacity, Router, RouterStats, RoutingDecision, make_policy

logger = logging.getLogger("headrace.engine")


class ReplicaStatus(NamedTuple):
    """One replica, for operators."""

    replica: int
    state: str
    reason: str
    """Reason why it serves nothing; empty if it does."""
    pid: int | None
    info: EngineInfo | None
    """Information on the last start; None: it has not been ready yet."""
    stats: EngineStats
    routing: RouterStats


class _Replica(Client):
    """One engine of the set: the client of its supervisor."""

    def __init__(self, replicas: ReplicaSet, number: int) -> None:
        self._replicas = replicas
        self.number = number
        self.supervisor: EngineSupervisor
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.ended = EngineStats()
        """Counters of its engines that are gone: sums over the replicas never fall."""
        self.drained: asyncio.Event | None = None
        """Set once it has no request left, while it is sent none; None: it is sent requests."""

    def send(self, message: messages.ToEngine) -> None:
        """Sends a message. Does nothing while the engine hangs and is about to be killed: ``on_lost`` then reports its
        requests."""
        with contextlib.suppress(EngineDeadError):
            self.supervisor.send(message)

    @property
    def weights(self) -> WeightStatus:
        return self.supervisor.weights

    @property
    def up(self) -> bool:
        return self.supervisor.health().ok and self.info is not None

    def on_message(self, message: messages.FromEngine) -> None:
        self._replicas.on_message(self, message)

    def on_lost(self, reason: str, *, died: bool, request_ids: Collection[str] | None = None) -> None:
        self._replicas.on_lost(self, reason, died=died)

    def pending(self) -> list[str]:
        return self._replicas.pending_at(self)

    def reason(self) -> str:
        """Reason why it takes no requests; empty if it does."""
        reason = self.supervisor.health().reason or self.weights.reason
        return reason or ("" if self.drained is None else "it is drained until it is resumed")


@dataclasses.dataclass(slots=True)
class _Call:
    """A control message that every replica answers."""

    message: messages.Control
    unanswered: set[int]
    value: bool = True
    error: str | None = None
    param: str | None = None


class ReplicaSet:
    """``args.data_parallel_size`` engines, started together, each watched and restarted on its own.

    It has the interface of an ``EngineSupervisor``. A router binds requests to replicas as late as possible. A replica that
    dies takes its own requests along; those of which nothing was streamed run again elsewhere, with the same seeds and so
    with the same tokens. While any replica runs, requests are taken; when the last one dies, those that wait are answered too.
    """

    def __init__(
        self,
        args: EngineArgs,
        client: Client,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        command: Sequence[str],
        quarantine: Quarantine,
        spawned: Spawned | None = None,
        served: ServedWeights = OF_FILES,
    ) -> None:
        self._client = client
        self._timeout = args.dp_queue_timeout
        count = args.data_parallel_size
        policy = make_policy(args.dp_routing_policy, count, args.seed)
        by_priority = args.policy == "priority"
        self._router = Router(policy, count, args.block_size, by_priority=by_priority, max_queue_len=args.max_queue_len)
        # The queue is here: what a replica is sent, it must take.
        own_args = dataclasses.replace(args, max_queue_len=INT32_MAX)
        self._replicas = [_Replica(self, number) for number in range(count)]
        for replica in self._replicas:
            replica.supervisor = EngineSupervisor(
                own_args,
                replica,
                on_progress=None if on_progress is None else _named(on_progress, replica.number),
                command=command,
                quarantine=quarantine,
                spawned=spawned if replica.number == 0 else None,
                served=served,
                replica=replica.number,
                on_turn=functools.partial(self._on_turn, replica.number),
            )
        self._calls: dict[int, _Call] = {}
        self._weights = ReplicaWeights(self._replicas, client.on_message, heals=args.heal_from_sibling)
        self._drains: list[messages.Control] = []
        """Calls to fan out once nothing waits."""
        self._expiry: asyncio.TimerHandle | None = None
        self._closed = False

    # Life

    async def start(self) -> EngineInfo:
        """Starts all replicas, and waits until the first is ready.

        Raises:
            ConfigError, EngineError: none started; the error of the first that failed.
        """
        starts = [asyncio.create_task(replica.supervisor.start()) for replica in self._replicas]
        errors: list[BaseException] = []
        try:
            for done in asyncio.as_completed(starts):
                try:
                    return await done
                except Exception as error:
                    errors.append(error)
                    logger.error("a replica did not start: %s", error)
            raise errors[0]
        finally:
            # The others go on: their supervisors know what became of them.
            for task in starts:
                task.add_done_callback(_retrieve)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.gather(*(replica.supervisor.close() for replica in self._replicas))
        self._client.on_lost("the engine was closed", died=False)

    @property
    def origin(self) -> float:
        return self._replicas[0].supervisor.origin

    @property
    def pid(self) -> int | None:
        """Process id of the first replica that has a process."""
        return next((pid for replica in self._replicas if (pid := replica.supervisor.pid) is not None), None)

    # Facts

    def health(self) -> Health:
        """Good while a replica serves; ``reason`` says which do not, and why."""
        down = [f"replica {replica.number}: {reason}" for replica in self._replicas if (reason := replica.reason())]
        num_up = len(self._replicas) - len(down)
        reason = f"{num_up} of {len(self._replicas)} replicas are up; {'; '.join(down)}" if down else ""
        lacks_weights = all(replica.up and replica.weights.reason for replica in self._replicas)
        return Health(num_up > 0, reason, all(replica.supervisor.health().final for replica in self._replicas), lacks_weights)

    def status(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                replica.number,
                replica.supervisor.state,
                replica.reason(),
                replica.supervisor.pid,
                replica.info,
                replica.stats,
                self._router.stats[replica.number],
            )
            for replica in self._replicas
        ]

    def reported(self) -> list[ReplicaReport]:
        """States of the replicas that the metrics show."""
        routing = self._router.stats
        return [
            ReplicaReport(self._router.loads.up[replica.number], replica.stats, *dataclasses.astuple(routing[replica.number]))
            for replica in self._replicas
        ]

    def decisions(self) -> list[RoutingDecision]:
        """The latest decisions of the router."""
        return list(self._router.decisions)

    @property
    def stats(self) -> EngineStats:
        """Sums over the replicas. Counters include engines that are gone, and the queue of the router waits."""
        total = EngineStats(num_waiting=self._router.num_queued)
        for replica in self._replicas:
            total = total.plus(replica.stats).plus(replica.ended)
        return total

    # One replica

    async def drain(self, number: int) -> None:
        """Sends a replica no more requests, also after a restart, and waits until it has none left. The others go on.

        Raises:
            RequestError: no other replica takes requests.
        """
        replica, router = self._replicas[number], self._router
        if replica.drained is None:
            if router.loads.num_up == router.loads.up[number]:
                raise RequestError(f"no replica but {number} takes requests", "replica")
            replica.drained = asyncio.Event()
            router.pause(number)
            self._bind()
        self._note_drained(replica)
        await replica.drained.wait()

    def resume(self, number: int) -> None:
        """Sends a drained replica requests again."""
        replica = self._replicas[number]
        if replica.drained is not None:
            replica.drained.set()
            replica.drained = None
            if replica.supervisor.health().ok:
                self._router.resume(number)
                self._bind()

    @property
    def weights(self) -> WeightStatus:
        return self._weights.status()

    def _route_whole(self) -> None:
        """Sends requests to replicas whose weights are whole, if any are; the others refuse them."""
        up = [replica for replica in self._replicas if replica.up]
        whole = {replica.number for replica in up if not replica.weights.reason}
        for replica in up if whole else ():
            routed = self._router.loads.up[replica.number]
            if routed and replica.number not in whole:
                self._router.pause(replica.number)
            elif not routed and replica.number in whole and replica.drained is None:
                self._router.resume(replica.number)

    def _note_drained(self, replica: _Replica) -> None:
        if replica.drained is not None and not self._router.sent_to(replica.number):
            replica.drained.set()

    def _on_turn(self, number: int, begins: bool) -> None:
        """Lets queued requests run elsewhere while a replica runs a suspect alone."""
        self._router.loads.hold(number, begins)
        if not begins:
            self._bind()

    # Messages to the replicas

    def check(self) -> None:
        """Raises: EngineDeadError with the reasons, unless a replica runs."""
        if not self._router.loads.num_up:
            raise EngineDeadError(self.health().reason)

    def send(self, message: messages.ToEngine) -> None:
        """Raises: EngineDeadError."""
        if isinstance(message, messages.WeightCall):
            self._weights.send(message)
            return
        self.check()
        match message:
            case messages.AddRequest(request):
                self._add(request)
            case messages.Abort(request_ids):
                self._abort(request_ids)
            case messages.Control(_, "drain"):
                self._drains.append(message)
                self._send_drains()
            case messages.Control():
                self._fan_out(message)
            case _:
                raise EngineError(f"a set of replicas takes no {type(message).__name__}")

    def _add(self, request: Request) -> None:
        now = time.monotonic()
        try:
            self._router.add(request, now)
        except RequestError as error:
            kind: Any = "queue_full" if isinstance(error, QueueFullError) else "request"
            self._client.on_message(messages.Rejected(request.request_id, kind, error.message, error.param))
            return
        self._bind(now)
        if self._timeout is not None and self._expiry is None and self._router.num_queued:
            self._expiry = asyncio.get_running_loop().call_later(self._timeout, self._expire)

    def _bind(self, now: float | None = None) -> None:
        """Sends what the replicas have room for."""
        if self._router.num_queued and self._router.loads.num_open:
            for request, number in self._router.bind(time.monotonic() if now is None else now):
                self._replicas[number].send(messages.AddRequest(request))
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("%s", self._router.decisions[-1])
        if self._drains:
            self._send_drains()

    def _expire(self) -> None:
        """Refuses the requests that have waited too long."""
        self._expiry = None
        timeout, now = self._timeout or 0.0, time.monotonic()
        for request_id in self._router.expired(now - timeout):
            text = f"no replica had room for the request within {timeout:g} s (dp_queue_timeout)"
            self._client.on_message(messages.Rejected(request_id, "queue_full", text, None))
        if (oldest := self._router.oldest()) is not None:
            delay = max(0.0, oldest + timeout - now)
            self._expiry = asyncio.get_running_loop().call_later(delay, self._expire)
        self._bind()

    def _abort(self, request_ids: list[str]) -> None:
        """Unknown ids are ignored: their requests have ended."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (number := self._router.replica_of(request_id)) is not None:
                by_replica.setdefault(number, []).append(request_id)
            elif (request := self._router.remove(request_id)) is not None:
                self._client.on_message(messages.Accepted(request_id))
                self._client.on_message(messages.StepDeltas(list(aborted(request))))
        for number, ids in by_replica.items():
            self._replicas[number].send(messages.Abort(ids))
        self._bind()

    def _fan_out(self, message: messages.Control) -> None:
        up = [replica for replica in self._replicas if replica.up]
        self._calls[message.call] = _Call(message, {replica.number for replica in up})
        for replica in up:
            replica.send(message)

    def _send_drains(self) -> None:
        if not self._router.num_queued:
            drains, self._drains = self._drains, []
            for message in drains:
                self._fan_out(message)

    # Messages from the replicas

    def on_message(self, replica: _Replica, message: messages.FromEngine) -> None:
        number, router = replica.number, self._router
        match message:
            case messages.StepDeltas(deltas):
                # The client first: a request of which it heard the end is forgotten here.
                self._client.on_message(message)
                for delta in deltas:
                    cached = delta.num_cached_tokens or 0
                    router.progress(
                        delta.request_id, delta.index, len(delta.token_ids), cached, delta.finish_reason is not None
                    )
                self._note_drained(replica)
                self._bind()
            case messages.Stats(stats):
                replica.stats = stats
                router.loads.observe(number, stats.computed_prompt_tokens)
                self._client.on_message(message)
                self._bind()
            case messages.Ready(info, stats):
                replica.info, replica.stats = info, stats
                router.start(number, capacity_of(info))
                if replica.drained is not None:
                    router.pause(number)
                self._weights.started(replica)
                self._route_whole()
                self._client.on_message(message)
                self._bind()
            case messages.WeightsChanged():
                self._route_whole()
                self._client.on_message(message)
                self._bind()
            case messages.WeightReply():
                self._weights.answered(number, message)
            case messages.CacheChanged(report):
                router.cache_changed(number, report)
            case messages.Accepted(request_id):
                router.accepted(request_id)
                self._client.on_message(message)
            case messages.Rejected(request_id):
                router.rejected(request_id)
                self._client.on_message(message)
                self._bind()
            case messages.ControlReply(call, value, error, param):
                self._answer(call, number, value, error, param)
            case _:
                self._client.on_message(message)

    def _answer(
        self, number: int, replica: int, value: bool = True, error: str | None = None, param: str | None = None
    ) -> None:
        """One replica has answered a call, or is gone, which leaves nothing to do there."""
        call = self._calls.get(number)
        if call is None or replica not in call.unanswered:
            return
        call.unanswered.discard(replica)
        call.value &= value
        call.error = call.error or (None if error is None else f"replica {replica}: {error}")
        call.param = call.param or param
        if call.unanswered:
            return
        del self._calls[number]
        if call.message.name == "drain" and self.pending():
            # Requests of a replica that died meanwhile run elsewhere.
            self._drains.append(call.message)
            self._send_drains()
            return
        self._client.on_message(messages.ControlReply(number, call.value, call.error, call.param))

    def on_lost(self, replica: _Replica, reason: str, *, died: bool) -> None:
        number = replica.number
        replica.ended = replica.ended.plus(replica.stats.counters())
        replica.stats = EngineStats()
        sent = self._router.sent_to(number)
        lost = self._router.stop(number)
        self._note_drained(replica)
        if self._closed:
            return
        why = f"replica {number}: {reason}"
        waited = [name for name in lost if name not in sent]
        self._client.on_lost(why, died=died, request_ids=sent)
        # Nothing runs any more: they are answered too, and did not kill the replica.
        self._client.on_lost(why, died=False, request_ids=waited)
        for call in list(self._calls):
            self._answer(call, number)
        self._weights.lost(number)
        if not self._router.loads.num_up:
            drains, self._drains = self._drains, []
            for message in drains:
                self._client.on_message(messages.ControlReply(message.call, False, why))
        self._bind()

    # Work that waits for an answer

    def pending(self) -> list[str]:
        sent = (name for replica in self._replicas for name in self._router.sent_to(replica.number))
        return [*self._router.queued, *sent]

    def pending_at(self, replica: _Replica) -> list[str]:
        calls = (call.message.name for call in self._calls.values() if replica.number in call.unanswered)
        return [*self._router.sent_to(replica.number), *calls, *self._weights.pending_at(replica.number)]


def capacity_of(info: EngineInfo) -> Capacity:
    """Returns the amounts of work that an engine runs at once."""
    return Capacity.of(info.max_num_seqs, info.max_num_batched_tokens, info.block_size, info.num_blocks, info.state_grid)


def _named(on_progress: Callable[[Progress], None], number: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        on_progress(msgspec.structs.replace(progress, phase=f"replica {number}: {progress.phase}"))

    return report


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Keeps asyncio from logging an exception that no caller reads."""
    with contextlib.suppress(BaseException):
        task.exception()
