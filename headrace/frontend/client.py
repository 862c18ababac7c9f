"""EngineClient: requests to engines in other processes, the streams of their outputs, and calls that wait for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.weights import OF_FILES, ServedWeights
from headrace.engine.info import Progress
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    HeadraceError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from headrace.frontend.adapters import RemoteAdapters
from headrace.frontend.streams import Inbox, OutputStream
from headrace.frontend.weights import Weights
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta
from headrace.processes import messages
from headrace.processes.quarantine import Quarantine
from headrace.processes.replicas import ReplicaSet
from headrace.processes.spawn import COMMAND, Spawned
from headrace.processes.supervisor import EngineSupervisor, Health

logger = logging.getLogger("headrace.engine")


class EngineClient:
    """Sends requests to one engine process, or to ``data_parallel_size`` replicas, from one event loop."""

    command: ClassVar[Sequence[str]] = COMMAND
    """Starts the engine's process."""

    def __init__(
        self,
        args: EngineArgs,
        on_progress: Callable[[Progress], None] | None,
        spawned: Spawned | None,
        served: ServedWeights = OF_FILES,
    ) -> None:
        self.args = args
        self._stats = EngineStats()
        single = self.args.data_parallel_size == 1
        make: type[EngineSupervisor] | type[ReplicaSet] = EngineSupervisor if single else ReplicaSet
        self._quarantine = Quarantine(self.args.quarantine_seconds)
        self._supervisor = make(
            self.args,
            self,
            on_progress=on_progress,
            command=self.command,
            quarantine=self._quarantine,
            spawned=spawned,
            served=served,
        )
        self._inboxes: dict[str, Inbox] = {}
        self._calls: dict[int, tuple[messages.ControlName, asyncio.Future[bool]]] = {}
        packed_bytes = self.args.weight_transfer_config.packed_buffer_size_bytes
        self.weights = Weights(self._supervisor, self.abort_all, packed_bytes)
        self._num_calls = 0
        self._draining = False
        self.adapters = RemoteAdapters(self.args, self._ask, self._tell, self._open_requests)
        """Adapters that requests may name."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def health(self) -> Health:
        """Good while requests are served, or queued; else says why they are not."""
        health, weights = self._supervisor.health(), self._supervisor.weights
        return Health(False, weights.reason, lacks_weights=True) if health.ok and weights.reason else health

    @property
    def failed(self) -> bool:
        """The engine stays down: it did not start, died repeatedly, or was closed."""
        return self.health().final

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, at most ``STATS_SECONDS`` old, and exact while the engine is idle. Counters restart at 0 with
        the engine; those of several replicas are sums, which do not."""
        return self._stats if isinstance(self._supervisor, EngineSupervisor) else self._supervisor.stats

    @property
    def replicas(self) -> ReplicaSet | None:
        """None: there is one engine."""
        return self._supervisor if isinstance(self._supervisor, ReplicaSet) else None

    @property
    def engine_pid(self) -> int | None:
        """Process id of the running engine."""
        return self._supervisor.pid

    # Requests

    async def add(self, *requests: Request) -> OutputStream:
        """Hand requests to the engine, and return once they are in its queue. One stream carries the deltas of all.

        Raises:
            RequestError: the engine refuses one, a request with this id is running, or one has crashed the engine; then none
                runs.
            QueueFullError: too many requests are waiting.
            EngineDeadError: the engine is not running, or died before it took the requests.
            EngineError: this is not the process or the event loop that started the engine, or taking a request in failed.
        """
        self._check_owner()
        self._supervisor.check()
        if self._draining:
            raise EngineDeadError("the engine is draining and takes no more requests")
        for request in requests:
            if request.request_id in self._inboxes:
                raise RequestError(f"a request with the id {request.request_id!r} is running", "request_id")
            if (refusal := self._quarantine.refusal(request)) is not None:
                raise refusal
        requests = tuple(map(self.adapters.names.current, requests))
        inbox = Inbox(requests)
        self._inboxes |= dict.fromkeys(inbox.open, inbox)
        stream = OutputStream(inbox, self._abandon)
        try:
            for request in requests:
                self._supervisor.send(messages.AddRequest(request))
            await inbox.accepted
        except BaseException:
            # Refused in part or cancelled: the engine may have taken some.
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request within a step; its stream gets deltas with finish_reason "abort". Unknown ids are ignored."""
        self._check_owner()
        self._abandon_here([request_id])

    def abort_all(self) -> None:
        """Ends all requests, those included that no engine has yet."""
        self._abandon_here(list(self._inboxes))

    def _abandon(self, request_ids: list[str]) -> None:
        """Abort from any thread: the garbage collector may drop a stream in another one."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abandon_here, request_ids)
        except RuntimeError:
            logger.debug("%s: dropped after the event loop had ended", request_ids)

    def _abandon_here(self, request_ids: list[str]) -> None:
        running = [request_id for request_id in request_ids if request_id in self._inboxes]
        if running and self._supervisor.health().ok:
            logger.debug("abort %s", running)
            for request_id in running:
                self._inboxes[request_id].bound.add(request_id)
            self._supervisor.send(messages.Abort(running))

    def _tell(self, message: messages.Control) -> None:
        """Sends a control message whose answer is not awaited. An engine that does not run has nothing to do."""
        with contextlib.suppress(EngineDeadError):
            self._supervisor.send(message)

    def _open_requests(self) -> Iterator[Request]:
        yield from (inbox.requests[request_id] for request_id, inbox in self._inboxes.items())

    # Calls

    async def drain(self) -> None:
        """Refuses new requests, and waits until those in flight have ended.

        Raises: EngineDeadError: the engine died meanwhile; its requests have ended with errors.
        """
        self._check_owner()
        self._draining = True
        await self._call("drain")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False: prefix caching is disabled."""
        return await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        """Raises: EngineError: the block pool is inconsistent."""
        await self._call("check_integrity")

    def _check_owner(self) -> None:
        """Raises: EngineError: the engine's socket is read by another event loop, or by another process."""
        if os.getpid() != self._pid:
            raise EngineError(f"this AsyncLLM belongs to process {self._pid}: make another one after a fork")
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise EngineError("this AsyncLLM belongs to the event loop that started it, and this is another one")

    async def _call(self, name: messages.ControlName) -> bool:
        return await self._ask(messages.Control(0, name))

    async def _ask(self, message: messages.Control) -> bool:
        """Sends a control message, numbered, and waits for the answer."""
        self._check_owner()
        self._supervisor.check()
        self._num_calls += 1
        call = self._num_calls
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[call] = (message.name, reply)
        try:
            self._supervisor.send(messages.Control(call, message.name, message.adapter))
            return await reply
        finally:
            self._calls.pop(call, None)

    # What the supervisor calls

    def on_message(self, message: messages.FromEngine) -> None:
        match message:
            case messages.StepDeltas(deltas):
                for delta in deltas:
                    self._deliver(delta)
            case messages.Ready(_, stats):
                self._stats = stats
                self.adapters.engine_started()
            case messages.Stats(stats):
                self._stats = stats
            case messages.Accepted(request_id):
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.accept(request_id)
            case messages.Rejected(request_id, kind, text, param):
                if (inbox := self._inboxes.pop(request_id, None)) is not None:
                    # A replica may refuse what another one had accepted: its reader must see the end.
                    inbox.lost(request_id, _rejection(kind, text, param))
            case messages.WeightReply():
                self.weights.answered(message)
            case messages.ControlReply(call, value, error, param):
                _, reply = self._calls.get(call, (None, None))
                if reply is None or reply.done():
                    return
                if error is None:
                    reply.set_result(value)
                else:
                    reply.set_exception(EngineError(error) if param is None else ConfigError(error, param))

    def on_lost(self, reason: str, *, died: bool, request_ids: Collection[str] | None = None) -> None:
        lost = {name: self._inboxes[name] for name in (request_ids or ()) if name in self._inboxes}
        if request_ids is None:
            lost = self._inboxes.copy()
        for request_id, inbox in lost.items():
            refusal = self._quarantine.refusal(inbox.requests[request_id]) if died else None
            if died and request_ids is not None and refusal is None and self._run_again(request_id, inbox):
                continue
            if refusal is not None:
                logger.error("request %s is refused for %g s", request_id, self.args.quarantine_seconds)
            error = EngineDeadError(reason) if refusal is None else RequestError(f"{reason}; {refusal}", code=refusal.code)
            del self._inboxes[request_id]
            inbox.lost(request_id, error)
        if request_ids is not None:
            return
        for _, reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDeadError(reason))
        self.weights.lost(reason)
        self._stats = EngineStats()

    def _run_again(self, request_id: str, inbox: Inbox) -> bool:
        """Sends a request that was lost with its replica to another one. False: it cannot run again, or no replica runs."""
        if request_id in inbox.bound:
            return False
        try:
            self._supervisor.send(messages.AddRequest(inbox.requests[request_id]))
        except EngineDeadError:
            return False
        return True

    def pending(self) -> list[str]:
        return [*self._inboxes, *(name for name, _ in self._calls.values()), *self.weights.pending()]

    def _deliver(self, delta: OutputDelta) -> None:
        inbox = self._inboxes.get(delta.request_id)
        if inbox is None:
            return
        inbox.put(delta)
        if delta.request_id not in inbox.open:
            del self._inboxes[delta.request_id]
            self.adapters.collect()


def _rejection(kind: str, text: str, param: str | None) -> HeadraceError:
    if kind == "engine":
        return EngineError(text)
    if kind == "unavailable":
        return UnavailableError(text)
    return (QueueFullError if kind == "queue_full" else RequestError)(text, param)
