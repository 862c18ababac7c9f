"""Runs the server: listens at once, loads the engine meanwhile, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from headrace.config import EngineArgs
from headrace.server.app import build_app
from headrace.server.settings import ServerSettings
from headrace.server.state import Serving

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

logger = logging.getLogger("headrace.server")

_CLEANUP_SECONDS = 5
"""What ended requests get to send their last words."""


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT, refuses new requests (503) and lets those in flight finish, up to a time limit.

    On the second, ends them at once. Ends by itself when the engine cannot start.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Runs between any two bytecodes: it only leaves a mark, which on_tick reads ten times a second.
        timeout = self._serving.settings.drain_timeout if self._deadline is None else 0.0
        self._deadline = time.monotonic() + timeout
        self._serving.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._serving.failure is not None:
            return True
        if self._deadline is None:
            return await super().on_tick(counter)
        if self._serving.num_in_flight and time.monotonic() < self._deadline:
            return False
        if self._serving.num_in_flight:
            logger.warning("shutting down with %d requests in flight", self._serving.num_in_flight)
        self._serving.stop()
        return True


def serve(args: EngineArgs, settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT, and returns when the last request is answered.

    Raises:
        ConfigError: the engine cannot be built from these arguments.
        OSError: the address cannot be listened on.
    """
    # Not needed by those who bring a client of their own.
    from headrace.engine.async_llm import AsyncLLM

    run(AsyncLLM(args), settings)


def run(llm: AsyncLLM, settings: ServerSettings) -> None:
    """``serve`` for an engine client that was made already, and not started."""
    app = build_app(llm, settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=_CLEANUP_SECONDS,
    )
    serving: Serving = app.state.serving
    server = DrainingServer(config, serving)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve())
    if serving.failure is not None:
        raise serving.failure
