"""Runs the server: takes connections at once, loads the engine meanwhile, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from headrace.host.worker_threads import switch_threads_often, use_no_tokenizer_threads
from headrace.server.protocol import LimitedProtocol
from headrace.server.settings import ServerSettings
from headrace.server.state import ServerState

logger = logging.getLogger("headrace.server")

_OTHER_FILES = 128
"""Files that the server opens beside its connections: listeners, the engine's sockets, logs, modules."""
_CLEANUP_SECONDS = 5
"""Time in which requests that were ended send the rest of their answers."""


class DrainingServer(uvicorn.Server):
    """Refuses new requests (503) on the first SIGTERM or SIGINT, and lets those in flight finish, up to a time limit.

    On the second, ends them at once. Ends by itself when the engine cannot start.
    """

    def __init__(self, config: uvicorn.Config, server: ServerState) -> None:
        super().__init__(config)
        self._server = server
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Runs between any two bytecodes: it only leaves a mark, which on_tick reads ten times a second.
        timeout = self._server.settings.drain_timeout if self._deadline is None else 0.0
        self._deadline = time.monotonic() + timeout
        self._server.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._server.failure is not None:
            return True
        if self._deadline is None:
            return await super().on_tick(counter)
        if self._server.num_in_flight and time.monotonic() < self._deadline:
            return False
        if self._server.num_in_flight:
            logger.warning("shutting down with %d requests in flight", self._server.num_in_flight)
        self._server.stop()
        return True


def run_app(app: FastAPI, sockets: Sequence[socket.socket], on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves an app of ``assemble``. Returns after SIGTERM or SIGINT, when the last request is answered.

    Args:
        sockets: of ``listen``.
        on_ready: called when requests are taken.

    Raises:
        ConfigError: an engine cannot be built from its arguments.
        EngineError: the engine did not start.
    """
    use_no_tokenizer_threads()
    switch_threads_often()
    state: ServerState = app.state.serving
    settings = state.settings
    config = uvicorn_config(app, within_open_files(settings), timeout_graceful_shutdown=_CLEANUP_SECONDS)
    state.owns_process = True
    state.on_ready = on_ready
    server = DrainingServer(config, state)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve([*sockets]))
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)
    if state.failure is not None:
        raise state.failure


def uvicorn_config(app: FastAPI, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration. ``LimitedProtocol`` enforces the limits of the settings."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(LimitedProtocol, settings),  # type: ignore[arg-type]  # uvicorn calls it, whatever it is
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        **options,
    )


def within_open_files(settings: ServerSettings) -> ServerSettings:
    """Raise the process's limit of open files as far as it may; lower the number of connections to what it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _OTHER_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = wanted if soft == resource.RLIM_INFINITY else max(soft, limit)
    if room >= wanted:
        return settings
    most = max(1, room - _OTHER_FILES)
    logger.warning(
        "max_connections is %d, not %d: the system lets a process open %d files", most, settings.max_connections, room
    )
    return dataclasses.replace(settings, max_connections=most)
