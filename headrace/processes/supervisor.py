"""EngineSupervisor: keeps one engine process running, and gives up in a crash loop of its own making."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, Protocol

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.core.weights import OF_FILES, ServedWeights, WeightStatus
from headrace.engine.endings import aborted
from headrace.engine.info import EngineInfo, Progress
from headrace.errors import ConfigError, EngineDeadError, EngineError, listed
from headrace.host.child import crashed
from headrace.processes import messages
from headrace.processes.engine_process import EngineProcess
from headrace.processes.isolation import Isolation
from headrace.processes.quarantine import Quarantine
from headrace.processes.spawn import Spawned, spawn
from headrace.processes.watchdog import Watchdog, busy_timeouts

logger = logging.getLogger("headrace.engine")

MAX_DEATHS = 3
"""Deaths of the engine's own in a row, with no request served between them, after which it is not started again."""
STABLE_SECONDS = 60.0
"""An engine that has run so long since it was ready does not count towards a crash loop when it dies."""
MAX_BACKOFF = 30.0
"""Most seconds between two starts."""
_STOP_SECONDS = 5.0
_FIRST_BACKOFF = 0.2

State = Literal["new", "starting", "running", "stuck", "restarting", "failed", "closed"]


class Death(NamedTuple):
    """The end of an engine process, or of the attempt to start one."""

    reason: str
    kind: Literal["crash", "killed", "still", "resources"]
    """crash: caused by the engine, and so perhaps by a request. killed: from outside, for lack of memory, or because it was
    stuck; no request is to blame. still: it hung while it started. resources: it could not start for lack of descriptors, files
    or memory, or because it fits the machine no longer; a later start may succeed."""


class Health(NamedTuple):
    ok: bool
    reason: str
    """Reason why the engine does not serve; empty when all is well."""
    final: bool = False
    """The engine will not be started again."""
    lacks_weights: bool = False
    """The engine runs, of several all of them, and only their weights, or memory that sleeps, keep them from serving."""


class Client(Protocol):
    """The user of the engine."""

    def on_message(self, message: messages.FromEngine) -> None:
        """A message other than those of the start-up and the end."""

    def on_lost(self, reason: str, *, died: bool, request_ids: Collection[str] | None = None) -> None:
        """The engine is gone; nothing that was sent to it will be answered. ``died``: it was not closed.

        ``request_ids``: another replica runs, and these requests alone were sent to the one that is gone.
        """

    def pending(self) -> list[str]:
        """Ids of requests and names of calls that await the engine."""


class EngineSupervisor:
    """Starts the process, restarts it when it dies or is stuck, and stops for good in a crash loop.

    Stuck means what a ``Watchdog`` of a step says while work is pending, with ``args.step_timeout``, or one of the whole start
    while nothing is reported, with ``args.start_timeout``. An engine is healthy from its Ready on, which it sends after its
    warm-up request has gone through scheduler, runner and sampler like any other.

    So an engine that crashes while a client's work is pending was fine before: that is not a crash loop, however often it
    happens, and ``quarantine`` learns which requests the engine had; it is sent suspects alone. An engine that is killed is
    neither in a crash loop. A restart that lacks resources or hangs is tried again for ever.
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
        replica: int = 0,
        on_turn: Callable[[bool], None] = lambda begins: None,
    ) -> None:
        """``quarantine``: shared by all engines that are sent the same requests. ``served``: the weights that the engine should
        have. ``on_turn``: as for ``Isolation``."""
        self._args = args
        self._replica = replica
        self._client = client
        self._on_progress = on_progress
        self._command = command
        self._quarantine = quarantine
        self._isolation = Isolation(quarantine, self._send_request, on_turn)
        self._spawned = spawned
        self.origin = 0.0
        """Time at which the last start-up began, on ``host.clock``."""
        self._state: State = "new"
        self._reason = "the engine has not been started"
        self._phase = ""
        self._engine_process: EngineProcess | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._fatal: messages.Fatal | None = None
        self._deaths = 0
        """Consecutive deaths with no request pending."""
        self._failed_starts = 0
        """Consecutive starts that failed for lack of resources or hung."""
        self._num_steps = 0
        """Signs of life of a running engine."""
        self._num_messages = 0
        self._ready_at: float | None = None
        self._device = "cpu"
        """Type of device of the last engine that was ready."""
        self._task: asyncio.Task[None] | None = None
        self.weights = WeightStatus(number=served.number, version=served.version, pause=served.pause, of_files=served.of_files)
        """State of the engine's weights, as it said last."""
        self._weight_calls: set[int] = set()
        """Commands to the weights that it has not answered."""

    async def start(self) -> EngineInfo:
        """Waits until the engine is ready.

        Raises:
            ConfigError: the arguments cannot work.
            EngineError: the engine did not start. A first start is tried again only where it hung.
        """
        if self._state != "new":
            raise EngineError(f"the engine was started before; now it is {self._state}")
        self._state = "starting"
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")
        return await self._ready

    async def close(self) -> None:
        """Ends the process and reports the loss to the client."""
        if self._state == "closed":
            return
        self._set("closed", "the engine was closed")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDeadError(self._reason))
            self._ready.exception()
        if self._engine_process is not None:
            await self._engine_process.stop(_STOP_SECONDS)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._isolation.clear()
        self._client.on_lost(self._reason, died=False)

    def health(self) -> Health:
        if self._state == "running":
            return Health(True, "")
        phase = f" ({self._phase})" if self._phase and self._state in ("starting", "restarting") else ""
        return Health(False, self._reason + phase, self._state in ("failed", "closed"))

    @property
    def state(self) -> State:
        return self._state

    @property
    def pid(self) -> int | None:
        """Id of the process that runs now."""
        return self._engine_process.pid if self._engine_process is not None else None

    def check(self) -> None:
        """Raises: EngineDeadError with the reason, unless the engine runs."""
        if self._state != "running":
            raise EngineDeadError(self.health().reason)

    def send(self, message: messages.ToEngine) -> None:
        """Raises: EngineDeadError."""
        self.check()
        match message:
            case messages.AddRequest(request):
                self._isolation.add(request)
                return
            case messages.Abort(request_ids):
                for request in self._isolation.remove(request_ids):
                    self._client.on_message(messages.Accepted(request.request_id))
                    self._client.on_message(messages.StepDeltas(list(aborted(request))))
            case messages.Control(_, "drain"):
                self._isolation.release()
            case messages.WeightCall(call):
                self._weight_calls.add(call)
        self._send_now(message)

    def _send_request(self, request: Request) -> None:
        self._send_now(messages.AddRequest(request))

    def _send_now(self, message: messages.ToEngine) -> None:
        if self._engine_process is not None:
            self._engine_process.send(message)

    # Engine processes, one after the other

    async def _supervise(self) -> None:
        while True:
            try:
                death = await self._live()
            except EngineError as error:
                death = Death(str(error), "resources")
            except Exception as error:
                # No caller awaits this task, so an exception would be lost.
                logger.exception("the engine's process cannot be supervised")
                death = Death(f"{type(error).__name__}: {error}", "resources")
            if self._state == "closed":
                return
            wait = self._after(death, self._client.pending())
            if death.kind == "crash":
                self._quarantine.crashed(self._isolation.sent)
            self._isolation.clear()
            self._client.on_lost(self._reason, died=True)
            if self._state == "failed":
                return
            await asyncio.sleep(wait)

    def _after(self, death: Death, pending: list[str]) -> float:
        """Decides what follows a death. Returns the seconds until the next start."""
        first = self._ready is not None and not self._ready.done()
        if death.kind in ("still", "resources") and not first:
            wait = _backoff(self._failed_starts)
            self._failed_starts += 1
            self._set("restarting", f"the engine cannot be started ({death.reason}), and is tried again until it can")
            logger.error("%s; the next time in %.1f s", self._reason, wait)
            return wait
        if death.kind == "crash" and not pending:
            self._count_death()
        if first and death.kind != "still":
            self._fail(f"the engine did not start: {death.reason}")
        elif self._deaths >= MAX_DEATHS:
            self._fail(f"the engine died {self._deaths} times without serving a request; the last time: {death.reason}")
        else:
            self._set("restarting", f"the engine died ({death.reason}) and is being restarted")
            logger.error("%s; in flight: %s", self._reason, listed(pending, 50) or "nothing")
        return _backoff(self._deaths) if self._deaths > 1 else 0.0

    async def _live(self) -> Death:
        """One process from its start to its end.

        Raises:
            EngineError: none could be started.
        """
        self._fatal, self._ready_at, self._phase = None, None, ""
        self._weight_calls.clear()
        served = self.weights.served
        spawned, self._spawned = self._spawned or spawn(self._command), None
        self.origin = spawned.origin
        engine_process = self._engine_process = EngineProcess(spawned, self._on_message)
        watchdog: asyncio.Task[Death] | None = None
        try:
            log_level = logging.getLogger("headrace").getEffectiveLevel()
            engine_process.send(messages.Start(self._args, log_level, spawned.origin, spawned.stacks, self._replica, served))
            watchdog = asyncio.create_task(self._watch(engine_process), name="engine-watchdog")
            status = await asyncio.shield(engine_process.exited)
            # A stuck process may end while its stacks are dumped: that is not the cause.
            return await watchdog if self._state == "stuck" else self._cause(status)
        finally:
            if watchdog is not None:
                watchdog.cancel()
            self._engine_process = None
            engine_process.close()

    async def _watch(self, engine_process: EngineProcess) -> Death:
        """Kills the engine when it is stuck."""
        watchdog, last, stuck = None, None, None
        while stuck is None:
            starting = self._ready_at is None
            timeout = self._args.start_timeout if starting else self._args.step_timeout
            interval = min(1.0, timeout / 4)
            await asyncio.sleep(interval)
            progress = (starting, self._num_messages if starting else self._num_steps)
            # Paused, the engine has requests and runs no step. While it answers a command, it tells of its weights.
            frozen = self.weights.state != "serving" and not self._weight_calls
            idle = not starting and (frozen or not (self._state == "running" and self._client.pending()))
            if watchdog is None or idle or progress != last:
                last = progress
                most = float("inf") if starting else busy_timeouts(self._device)
                watchdog = Watchdog(timeout, engine_process.thread_times, busy_timeouts=most)
            else:
                stuck = watchdog.look(interval)
        if starting:
            reason = f"it stood still while it started: it {stuck}"
            reason += f", in the phase {self._phase}" if self._phase else ""
        else:
            reason = f"no step finished while work was pending: it {stuck}"
        self._set("stuck", f"{reason}; the engine is being restarted")
        logger.error("%s; in flight: %s", reason, listed(self._client.pending(), 50) or "nothing")
        stacks = await engine_process.stacks()
        logger.error("stacks of the engine:\n%s", stacks or "(none: it does not react to signals)")
        engine_process.kill()
        return Death(reason, "still" if starting else "killed")

    def _on_message(self, message: messages.FromEngine) -> None:
        self._num_messages += 1
        if self._state == "stuck":
            return  # It goes on while its stacks are read, and is killed all the same.
        match message:
            case messages.Starting(progress):
                self._phase = progress.phase
                if self._on_progress is not None:
                    self._on_progress(progress)
            case messages.Ready(info):
                self._ready_at = time.monotonic()
                self._device = info.device
                self._failed_starts = 0
                if self._state != "closed":
                    self._set("running", "")
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
                self._client.on_message(message)
            case messages.Fatal():
                self._fatal = message
            case messages.WeightsChanged(status):
                self.weights = status
                self._num_steps += 1
                if self._state == "running":
                    self._client.on_message(message)
            case _:
                if self._state == "running":
                    self._client.on_message(message)
                self._note(message)

    def _note(self, message: messages.FromEngine) -> None:
        """Keeps count of steps, and of what the engine has."""
        match message:
            case messages.StepDeltas(deltas):
                self._num_steps += 1
                for delta in deltas:
                    if delta.finish_reason is None or (request := self._isolation.sample_ended(delta.request_id)) is None:
                        continue
                    if delta.finish_reason in ("stop", "length"):
                        # Whatever kills the engine next, it is not a crash loop yet.
                        self._deaths = 0
                        self._quarantine.served(request)
            case messages.Rejected(request_id):
                self._isolation.ended(request_id)
            case messages.WeightReply(call):
                self._weight_calls.discard(call)

    # Its end

    def _count_death(self) -> None:
        lived = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
        self._deaths = 1 if lived > STABLE_SECONDS else self._deaths + 1

    def _cause(self, status: int) -> Death:
        starting = self._ready_at is None
        if self._fatal is not None:
            if self._fatal.kind != "config" and self._fatal.traceback:
                logger.error("the engine failed:\n%s", self._fatal.traceback)
            if starting and self._fatal.kind != "engine":
                # The arguments worked once: what they lack now is memory, or files.
                return Death(self._fatal.message, "resources")
            return Death(self._fatal.message, "killed" if self._fatal.kind == "killed" else "crash")
        if status == os.EX_TEMPFAIL and starting:
            return Death("its process has no room to start", "resources")
        reason = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        if crashed(status):
            return Death(reason, "crash")
        # SIGKILL during a start comes from a system that is short of memory.
        return Death(reason, "resources" if status == -signal.SIGKILL and starting else "killed")

    def _fail(self, reason: str) -> None:
        self._set("failed", reason)
        if self._ready is None or self._ready.done():
            logger.error("%s", reason)
            return
        fatal = self._fatal
        if fatal is not None and fatal.kind == "config":
            self._ready.set_exception(ConfigError(fatal.message, fatal.param))
        else:
            self._ready.set_exception(EngineError(f"{reason}\n{fatal.traceback}" if fatal is not None else reason))

    def _set(self, state: State, reason: str) -> None:
        self._state, self._reason = state, reason


def _backoff(attempt: int) -> float:
    """Seconds before the next start."""
    return min(MAX_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(attempt, 32))
