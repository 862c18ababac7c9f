"""One tensor-parallel rank's process: ``python -m headrace.processes.rank FD``.

It ends when the connection of that file descriptor closes, also while it waits for a rank that is gone.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.plan import SamplePlan, StepPlan, StepResult, decode_plan
from headrace.engine.executor import LocalExecutor
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError
from headrace.host.garbage import freeze_gc
from headrace.parallel.group import join_group
from headrace.processes.multiprocess import PipeAgreement, RankStart, digest
from headrace.processes.process import kill_with_parent, outlive_terminal_signals
from headrace.startup import environment
from headrace.startup.loader import load_executor
from headrace.startup.source import FileSource

_GRACE_SECONDS = 0.5
"""In which the main thread may end by itself once the connection has closed."""
_KEPT = 32
"""Results that are kept for the question which row differs."""


class Rank:
    """Executes the messages of the process that started it, in their order. Each rank gets the same."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        start = connection.recv()
        if not isinstance(start, RankStart):
            raise TypeError(f"the first message was {type(start).__name__}, not RankStart")
        if start.by_main_thread:
            kill_with_parent()
        self._rank = start.rank
        self._agreement = PipeAgreement(connection, start.size)
        device = environment.probe(start.args.device).device
        ordered, peers = start.args.deterministic, not start.args.disable_custom_all_reduce
        self._group = join_group(start.rank, start.size, Path(start.store), device, ordered=ordered, peers=peers)
        source = FileSource(start.args, self._agreement, self._group)
        loaded = load_executor(source, source.text(), Timeline())
        if not isinstance(loaded.executor, LocalExecutor):
            raise TypeError(f"a rank has one runner, not a {type(loaded.executor).__name__}")
        self._executor = loaded.executor
        self._handles: dict[int, Any] = {}
        self._results: deque[StepResult] = deque(maxlen=_KEPT)
        connection.send(("done", (loaded.config, loaded.device, loaded.weights, loaded.profile)))

    def run(self) -> None:
        """Raises EOFError when the connection closes."""
        freeze_gc()  # A rank whose collector stops it holds up all others.
        try:
            while True:
                self._handle(*self._connection.recv())
        finally:
            self._executor.close()

    def _handle(self, name: str, payload: Any) -> None:
        match name:
            case "plan":
                plan = decode_plan(payload)
                if isinstance(plan, StepPlan):
                    self._handles[plan.step] = self._executor.execute(plan)
                elif isinstance(plan, SamplePlan):
                    self._executor.sample(self._handles[plan.step], plan)
            case "collect":
                result = self._executor.collect(self._handles.pop(payload))
                self._group.check()
                self._results.append(result)
                self._done((digest(result), b"" if self._rank else msgspec.msgpack.encode(result)))
            case "tokens":
                kept = next((result for result in self._results if result.step == payload), None)
                self._done(None if kept is None else (kept.seq_ids, kept.token_ids, sorted(kept.errors)))
            case "update_weights":
                try:
                    self._done(self._executor.update_weights(payload))
                except ConfigError as error:
                    self._connection.send(("config", (error.message, error.param)))
            case "capture_next":
                count = self._executor.capture_next()
                if self._agreement.any(bool(count.failure)):
                    self._executor.stop_capturing("another rank could not capture a CUDA graph")
                self._done(self._executor.graphs())
            case "memory" | "graphs":
                self._done(getattr(self._executor, name)())
            case _:
                raise ValueError(f"unknown message {name}")

    def _done(self, value: object) -> None:
        self._connection.send(("done", value))


def _end_with(descriptor: int) -> None:
    """Ends this process once the other end of the connection is closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # Hang-ups are reported in any case.
        poll.poll()
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    outlive_terminal_signals()
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s rank {os.getpid()} %(name)s: %(message)s")
    descriptor = int(sys.argv[1])
    connection = Connection(descriptor)
    _end_with(descriptor)
    try:
        Rank(connection).run()
    except EOFError:
        return
    except ConfigError as error:
        connection.send(("config", (error.message, error.param)))
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
    # Threads of libraries must not hold up the end.
    os._exit(0)
