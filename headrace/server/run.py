"""Runs the server: listens at once, loads the engine meanwhile, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from headrace.errors import ConfigError
from headrace.server.app import build_app
from headrace.server.protocol import LimitedProtocol
from headrace.server.settings import ServerSettings
from headrace.server.state import Serving
from headrace.worker_threads import switch_threads_often, use_no_tokenizer_threads

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

logger = logging.getLogger("headrace.server")

_BACKLOG = 2048
_OTHER_FILES = 128
"""Files that the server opens beside its connections: listeners, the engine's sockets, logs, modules."""
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


def run(llm: AsyncLLM, settings: ServerSettings) -> None:
    """Serves an engine client that has not been started. Returns after SIGTERM or SIGINT, when the last request is answered.

    Raises:
        ConfigError: the engine cannot be built from its arguments, or the address cannot be listened on.
        EngineError: the engine did not start.
    """
    use_no_tokenizer_threads()
    switch_threads_often()
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_certificate(settings.tls_cert, settings.tls_key)
    sockets = listen(settings)
    app = build_app(llm, settings)
    config = uvicorn_config(app, within_open_files(settings), timeout_graceful_shutdown=_CLEANUP_SECONDS)
    serving: Serving = app.state.serving
    serving.owns_process = True
    server = DrainingServer(config, serving)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets))
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)
    if serving.failure is not None:
        raise serving.failure


def uvicorn_config(app: FastAPI, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """How uvicorn serves the app. ``LimitedProtocol`` enforces the limits of the settings."""
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


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Listening sockets: one for each address that the host's name has, or the Unix domain socket.

    Raises:
        ConfigError: the address is in use, not ours, or not an address.
    """
    if settings.uds is not None:
        return [_unix_socket(settings.uds)]
    port = settings.port
    try:
        addresses = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = _tcp_sockets(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in addresses), port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{port}: {error.strerror or error}", "port") from error
    port = sockets[0].getsockname()[1]
    scheme = "http" if settings.tls_cert is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("listening on %s://%s:%d", scheme, host, port)
    return sockets


def _tcp_sockets(addresses: Iterable[tuple[int, str]], port: int) -> list[socket.socket]:
    """All on one port. A name may have addresses that this machine lacks (IPv6 of localhost): one that works is enough."""
    sockets: list[socket.socket] = []
    missing = OSError("the name has no address")
    for family, address in addresses:
        try:
            sockets.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for opened in sockets:
                    opened.close()
                raise
            missing = error
        port = sockets[0].getsockname()[1] if sockets else port
    if not sockets:
        raise missing
    return sockets


def _unix_socket(path: str) -> socket.socket:
    """A socket file left by a server that is gone is replaced; one that somebody answers on is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError("another server answers there")
            Path(path).unlink()
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}", "uds") from error
    logger.info("listening on unix:%s", path)
    return listener


def _check_certificate(certificate: Path, key: Path) -> None:
    """Raises ConfigError if a server cannot use them."""
    try:
        # A key with a password is refused, where OpenSSL would ask the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"{certificate} and {key} are no PEM certificate and its unencrypted key: {why or error}", "tls_cert"
        ) from None
