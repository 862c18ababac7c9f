"""The engine's own process: ``python -m headrace.processes.process FOLDER``.

FOLDER is private to this process and its client; the socket and the stack dumps are in it. The process lives as long as
its standard input stays open: when the client dies, however it dies, the engine goes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import zmq

from headrace.config import EngineArgs
from headrace.engine.core import EngineCore
from headrace.engine.info import EngineInfo
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError, EngineError, QueueFullError, RankKilledError, RankLostError, RequestError
from headrace.host.clock import process_start
from headrace.host.garbage import freeze_gc
from headrace.host.worker_threads import switch_threads_often, use_no_tokenizer_threads
from headrace.outputs import OutputDelta
from headrace.processes.kv_events import RoutingReports, publish_events
from headrace.processes.messages import (
    STATS_SECONDS,
    Abort,
    Accepted,
    AddRequest,
    Control,
    ControlReply,
    Fatal,
    FromEngine,
    Ready,
    Rejected,
    Shutdown,
    Start,
    Starting,
    Stats,
    StepDeltas,
    ToEngine,
    decode_to_engine,
    encode,
)
from headrace.processes.spawn import remove_abandoned_folders

logger = logging.getLogger("headrace.engine")

SOCKET_FILE = "engine.sock"
STACKS_FILE = "stacks.txt"
STACK_SIGNAL, STACKS_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
"""Ask for the stack of the thread that gets the signal, the main one as a rule, and for every thread's, in the stacks file. The
frames of threads that run meanwhile are read as they change, which can end the process: what is wanted most comes first."""
_LINGER_MS = 2000
_IDLE_SECONDS = 5.0
"""Most time that an engine of several processes waits for a message before it asks whether they all still answer."""

Load = Callable[[EngineArgs, Timeline], tuple[EngineCore, EngineInfo]]


class Channel:
    """The engine's end of the socket."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # Sending must never hold up the engine; what a slow client leaves unread is bounded by its requests' lengths.
        self._socket.set_hwm(0)
        self._socket.bind(f"ipc://{folder / SOCKET_FILE}")

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def receive(self) -> ToEngine:
        """Waits for a message."""
        return decode_to_engine(self._socket.recv())

    def wait(self, descriptors: Sequence[int]) -> None:
        """Waits for a message, or until one of the file descriptors can be read; ``_IDLE_SECONDS`` at most."""
        poller = zmq.Poller()
        for source in (self._socket, *descriptors):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(_IDLE_SECONDS * 1e3))

    def waiting(self) -> bool:
        """Whether a message can be received at once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


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
        """Until Shutdown. Whatever ``core.step`` raises leaves from here."""
        core, channel = self._core, self._channel
        while self._running:
            ended: list[OutputDelta] = []
            while self._running and (channel.waiting() or not core.has_work()):
                # Asks all ranks: one that was stopped by a signal does not answer.
                if not channel.waiting() and core.idle():
                    self._report()
                    continue
                if not channel.waiting() and (sentinels := core.executor.sentinels()):
                    channel.wait(sentinels)
                    core.executor.check()
                    continue
                ended += self._handle(channel.receive())
                if ended and not core.has_work():
                    break
            if not self._running:
                return
            deltas = ended + core.step() if core.has_work() else ended
            self._report()
            channel.send(StepDeltas(deltas))
            if self._drains and not core.has_work():
                self._answer_drains()

    def _report(self) -> None:
        """Send statistics if they are due: at the first step after idling, on a timer, and at the last step before idling."""
        now, busy = time.monotonic(), self._core.has_work()
        if now >= self._report_at or not busy:
            self._report_at = now + STATS_SECONDS if busy else 0.0
            self._channel.send(Stats(self._core.stats()))

    def _handle(self, message: ToEngine) -> list[OutputDelta]:
        """Takes one message in; returns the deltas of sequences that it ended."""
        match message:
            case AddRequest():
                self._add(message)
            case Abort(request_ids):
                logger.debug("abort %s", " ".join(request_ids))
                return [delta for request_id in request_ids for delta in self._core.abort(request_id)]
            case Control():
                self._control(message)
            case Shutdown():
                self._running = False
            case Start():
                logger.error("a second Start message arrived")
        return []

    def _add(self, message: AddRequest) -> None:
        request = message.request
        try:
            self._core.add(request)
        except RequestError as error:
            kind: Literal["queue_full", "request"] = "queue_full" if isinstance(error, QueueFullError) else "request"
            self._channel.send(Rejected(request.request_id, kind, error.message, error.param))
            return
        except EngineError as error:
            self._channel.send(Rejected(request.request_id, "engine", str(error), None))
            return
        logger.debug("request %s: %d prompt tokens", request.request_id, len(request.prompt_token_ids))
        self._channel.send(Accepted(request.request_id))

    def _control(self, message: Control) -> None:
        if message.name == "drain":
            self._drains.append(message.call)
            if not self._core.has_work():
                self._answer_drains()
            return
        try:
            if message.name == "reset_prefix_cache":
                value = self._core.reset_prefix_cache()
            else:
                self._core.check_integrity()
                value = True
        except Exception as error:
            logger.exception("%s failed", message.name)
            self._channel.send(ControlReply(message.call, False, f"{type(error).__name__}: {error}"))
            return
        self._channel.send(ControlReply(message.call, value))

    def _answer_drains(self) -> None:
        for call in self._drains:
            self._channel.send(ControlReply(call))
        self._drains.clear()


def serve(folder: Path, load: Load) -> int:
    """Builds the engine that the first message specifies, and runs it. Returns the exit status."""
    outlive_terminal_signals()
    _die_with_parent(folder)
    remove_abandoned_folders()
    try:
        stacks = (folder / STACKS_FILE).open("w")
        channel = Channel(folder)
    except (OSError, zmq.ZMQError) as error:
        with contextlib.suppress(OSError):  # Standard error may be a file on the same full disk.
            print(f"the engine's process has no room to start: {error}", file=sys.stderr, flush=True)
        return os.EX_TEMPFAIL
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    try:
        start = channel.receive()
        if not isinstance(start, Start):
            raise TypeError(f"the first message was {type(start).__name__}, not Start")
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("headrace").setLevel(start.log_level)
        timeline = Timeline(lambda progress: channel.send(Starting(progress)), start.origin)
        timeline.mark("command", "interpreter and options", at=process_start())
        timeline.mark("imports", "the engine's process")
        if start.args.data_parallel_size > 1:
            from headrace.startup.environment import take_device

            take_device(start.args, start.replica)
        core, info = load(start.args, timeline)
        publish_events(core, start.args, start.replica)
        if start.args.data_parallel_size > 1 and start.args.dp_routing_policy == "prefix":
            core.listen(RoutingReports(core.scheduler.kv, channel.send))
        freeze_gc()
        channel.send(Ready(info, core.stats()))
        EngineLoop(core, channel).run()
        core.close()
        return 0
    except ConfigError as error:
        channel.send(Fatal("config", error.message, error.param, traceback.format_exc()))
        return 2
    except RankLostError as error:
        channel.send(Fatal("killed" if isinstance(error, RankKilledError) else "engine", str(error), None, ""))
        return 1
    except Exception as error:
        kind: Literal["resources", "engine"] = "resources" if _lacks_resources(error) else "engine"
        channel.send(Fatal(kind, f"{type(error).__name__}: {error}", None, traceback.format_exc()))
        return 1
    finally:
        channel.close()


def _lacks_resources(error: Exception) -> bool:
    """True if the same start may succeed once files, descriptors or memory are there again."""
    # Imported by then, unless importing it is what failed.
    torch = sys.modules.get("torch")
    return isinstance(error, (OSError, MemoryError)) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def kill_with_parent() -> None:
    """Lets the system kill this process when the thread that started it ends, also while it is stopped (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def outlive_terminal_signals() -> None:
    """The client decides when the engine ends: a signal to the whole group must not cut the requests it still drains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _die_with_parent(folder: Path) -> None:
    """Ends this process when the client is gone, also when the interpreter is stuck in a kernel (Linux)."""
    kill_with_parent()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    from headrace.processes.load import load_core

    use_no_tokenizer_threads()
    switch_threads_often()
    return serve(Path(sys.argv[1]), load_core)


if __name__ == "__main__":
    status = main()
    # Libraries' threads must not hold up the end; everything was sent and closed.
    logging.shutdown()
    os._exit(status)
