"""The engine's own process: ``python -m headrace.processes.process``. ``EngineProcess`` is its client."""

from __future__ import annotations

import faulthandler
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from headrace.config import EngineArgs
from headrace.core.weights import WeightResult
from headrace.engine.info import EngineInfo
from headrace.engine.timeline import Timeline
from headrace.errors import (
    ConfigError,
    EngineError,
    QueueFullError,
    RankKilledError,
    RankLostError,
    RequestError,
    UnavailableError,
)
from headrace.host.channel import Channel
from headrace.host.clock import process_start
from headrace.host.garbage import freeze_gc
from headrace.host.parent import Parent, run
from headrace.host.worker_threads import switch_threads_often, use_no_tokenizer_threads
from headrace.outputs import OutputDelta
from headrace.processes import messages
from headrace.processes.early import begin
from headrace.processes.spawn import STACK_SIGNAL, STACKS_SIGNAL
from headrace.sources.adapter import AdapterFiles

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore

logger = logging.getLogger("headrace.engine")

_POLL_SECONDS = 0.01
"""Interval at which a command to the weights that is under way is looked after."""
_IDLE_SECONDS = 5.0
"""Most time that an engine of several processes waits for a message before it asks whether they all still answer."""

Load = Callable[[EngineArgs, Timeline], "tuple[EngineCore, EngineInfo]"]


class EngineLoop:
    """Runs steps while there is work, waits for messages while there is none."""

    def __init__(self, core: EngineCore, channel: Channel) -> None:
        self._core = core
        self._channel = channel
        self._drains: list[int] = []
        """Calls to answer once no work is left."""
        self._report_at = 0.0
        self._running = True

    def run(self) -> None:
        """Runs until Shutdown, or until the client is gone. Raises whatever ``core.step`` raises."""
        core = self._core
        while self._running:
            ended: list[OutputDelta] = []
            while self._running:
                if core.weights.busy:
                    core.weights.poll()
                core.adapters.poll()
                if (message := self._poll()) is None:
                    if core.runnable():
                        break
                    self._idle()
                    continue
                ended += self._handle(message)
                if ended and not core.runnable():
                    break
            if not self._running:
                return
            deltas = ended + core.step() if core.runnable() else ended
            self._report()
            self._send(messages.StepDeltas(deltas))
            if self._drains and not core.has_work():
                self._answer_drains()

    def _idle(self) -> None:
        """Waits for a message, or captures a CUDA graph."""
        core, sentinels = self._core, self._core.executor.sentinels()
        if core.weights.busy or core.adapters.loading:
            self._channel.wait(_POLL_SECONDS, sentinels)
            return
        # Asks all ranks: one that was stopped by a signal does not answer.
        if core.idle():
            self._report()
            return
        if core.has_work():
            # While steps are held, requests come and end without them.
            self._send(messages.Stats(core.stats()))
        self._channel.wait(_IDLE_SECONDS if sentinels else None, sentinels)
        core.executor.check()

    def _send(self, message: messages.FromEngine) -> None:
        self._channel.send(messages.encode(message))

    def _poll(self) -> messages.ToEngine | None:
        """The next message if it is there."""
        try:
            data = self._channel.poll()
        except EOFError:  # The client is gone.
            return messages.Shutdown()
        return None if data is None else messages.decode_to_engine(data)

    def _report(self) -> None:
        """Send statistics if they are due: at the first step after idling, on a timer, and at the last step before idling."""
        now, busy = time.monotonic(), self._core.has_work()
        if now >= self._report_at or not busy:
            self._report_at = now + messages.STATS_SECONDS if busy else 0.0
            self._send(messages.Stats(self._core.stats()))

    def _handle(self, message: messages.ToEngine) -> list[OutputDelta]:
        """Takes one message in; returns the deltas of sequences that it ended."""
        match message:
            case messages.AddRequest():
                self._add(message)
            case messages.Abort(request_ids):
                logger.debug("abort %s", " ".join(request_ids))
                return [delta for request_id in request_ids for delta in self._core.abort(request_id)]
            case messages.Control():
                self._control(message)
            case messages.WeightCall(call, command):
                return self._core.weights.submit(command, lambda result: self._answer_weights(call, result))
            case messages.Shutdown():
                self._running = False
            case messages.Start():
                logger.error("a second Start message arrived")
        return []

    def _add(self, message: messages.AddRequest) -> None:
        request = message.request
        try:
            self._core.add(request)
        except RequestError as error:
            kind: Literal["queue_full", "request"] = "queue_full" if isinstance(error, QueueFullError) else "request"
            self._send(messages.Rejected(request.request_id, kind, error.message, error.param))
            return
        except UnavailableError as error:
            self._send(messages.Rejected(request.request_id, "unavailable", str(error), None))
            return
        except EngineError as error:
            self._send(messages.Rejected(request.request_id, "engine", str(error), None))
            return
        logger.debug("request %s: %d prompt tokens", request.request_id, len(request.prompt_token_ids))
        self._send(messages.Accepted(request.request_id))

    def _control(self, message: messages.Control) -> None:
        if message.name == "drain":
            self._drains.append(message.call)
            if not self._core.has_work():
                self._answer_drains()
            return
        value = True
        try:
            match message:
                case messages.Control(_, "reset_prefix_cache"):
                    value = self._core.reset_prefix_cache()
                case messages.Control(_, "load_adapter", AdapterFiles() as files):
                    self._core.adapters.begin(files, lambda error: self._answer(message, error is None, error))
                    return
                case messages.Control(_, "drop_adapter", AdapterFiles(digest)):
                    self._core.adapters.drop(digest)
                case _:
                    self._core.check_integrity()
        except Exception as error:
            self._answer(message, False, error)
            return
        self._answer(message, value)

    def _answer(self, message: messages.Control, value: bool, error: Exception | None = None) -> None:
        if isinstance(error, ConfigError):
            self._send(messages.ControlReply(message.call, False, error.message, error.param or message.name))
        elif error is not None:
            logger.error("%s failed", message.name, exc_info=error)
            self._send(messages.ControlReply(message.call, False, f"{type(error).__name__}: {error}"))
        else:
            self._send(messages.ControlReply(message.call, value))

    def _answer_weights(self, call: int, result: WeightResult) -> None:
        """Answers a command. What it did to requests and KV is in the statistics by then."""
        self._send(messages.Stats(self._core.stats()))
        self._send(messages.WeightReply(call, result))

    def _answer_drains(self) -> None:
        for call in self._drains:
            self._send(messages.ControlReply(call))
        self._drains.clear()


def serve(load: Load, client: Parent) -> int:
    """Builds the engine that the first message specifies, and runs it. Returns the exit status."""

    def send(message: messages.FromEngine) -> None:
        client.send(messages.encode(message))

    start = messages.decode_to_engine(client.receive())
    if not isinstance(start, messages.Start):
        raise TypeError(f"the first message was {type(start).__name__}, not Start")
    faulthandler.register(STACK_SIGNAL, file=start.stacks, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file=start.stacks, all_threads=True)
    try:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("headrace").setLevel(start.log_level)
        timeline = Timeline(lambda progress: send(messages.Starting(progress)), start.origin)
        timeline.mark("command", "interpreter and options", at=process_start())
        timeline.mark("imports", "the engine's process")
        if start.args.data_parallel_size > 1 and start.args.device != "cpu":
            from headrace.startup.environment import take_device

            take_device(start.args, start.replica)
        core, info = load(start.args, timeline)
        listen(core, start, send)
        core.weights.tell = lambda status: send(messages.WeightsChanged(status))
        core.weights.start(start.weights)
        freeze_gc()
        send(messages.Ready(info, core.stats()))
        EngineLoop(core, client).run()
        core.close()
        return 0
    except ConfigError as error:
        send(messages.Fatal("config", error.message, error.param, traceback.format_exc()))
        return 2
    except RankLostError as error:
        send(messages.Fatal("killed" if isinstance(error, RankKilledError) else "engine", str(error), None, ""))
        return 1
    except Exception as error:
        kind: Literal["resources", "engine"] = "resources" if _lacks_resources(error) else "engine"
        send(messages.Fatal(kind, f"{type(error).__name__}: {error}", None, traceback.format_exc()))
        return 1


def listen(core: EngineCore, start: messages.Start, send: Callable[[messages.FromEngine], None]) -> None:
    """Adds the listeners of the prefix cache that the arguments ask for, whose modules few engines need."""
    args = start.args
    routed = args.data_parallel_size > 1 and args.dp_routing_policy == "prefix"
    if not (routed or args.kv_events_config.enabled):
        return
    from headrace.processes.kv_events import RoutingReports, publish_events

    publish_events(core, args, start.replica)
    if routed:
        core.listen(RoutingReports(core.scheduler.kv, send))


def _lacks_resources(error: Exception) -> bool:
    """True if the same start may succeed once files, descriptors or memory are there again."""
    # Imported by then, unless importing it is what failed.
    torch = sys.modules.get("torch")
    return isinstance(error, (OSError, MemoryError)) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def main(client: Parent) -> int:
    begin(sys.argv[1:])
    # Hardly anything that imports make is garbage, and looking for it would take a tenth of their time.
    gc.disable()
    from headrace.processes.load import load_core

    gc.freeze()
    gc.enable()
    use_no_tokenizer_threads()
    switch_threads_often()
    return serve(load_core, client)


if __name__ == "__main__":
    run(main)
