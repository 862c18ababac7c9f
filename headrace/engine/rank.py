"""One rank's process: ``python -m headrace.engine.rank FD``. It ends when the connection of that file descriptor closes."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from headrace.core.plan import StepPlan, decode_plan
from headrace.engine.executor import Executor
from headrace.engine.loader import load_executor
from headrace.engine.multiprocess import PipeAgreement, digest
from headrace.engine.source import FileSource
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError


def serve(connection: Connection) -> None:
    """Loads the model of the first message, then executes each message. Raises EOFError when the connection closes."""
    args, rank, size = connection.recv()
    source = FileSource(args, PipeAgreement(connection, size))
    loaded = load_executor(source, source.frontend(), Timeline())
    connection.send(("done", (loaded.config, loaded.device, loaded.weights, loaded.profile)))
    handles: dict[int, Any] = {}
    try:
        while True:
            name, payload = connection.recv()
            _handle(connection, rank, loaded.executor, handles, name, payload)
    finally:
        loaded.executor.close()


def _handle(
    connection: Connection, rank: int, executor: Executor[Any], handles: dict[int, Any], name: str, payload: Any
) -> None:
    match name:
        case "plan":
            plan = decode_plan(payload)
            if isinstance(plan, StepPlan):
                handles[plan.step] = executor.execute(plan)
            else:
                executor.sample(handles[plan.step], plan)
        case "collect":
            result = executor.collect(handles.pop(payload))
            connection.send(("done", (digest(result), b"" if rank else msgspec.msgpack.encode(result))))
        case "update_weights":
            try:
                connection.send(("done", executor.update_weights(payload)))
            except ConfigError as error:
                connection.send(("config", (error.message, error.param)))
        case "memory" | "capture_next" | "graphs":
            connection.send(("done", getattr(executor, name)()))
        case _:
            raise ValueError(f"unknown message {name}")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
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
