"""The sockets that the server listens on. Imports little: a process that only keeps them open needs no more."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.server.settings import ServerSettings

logger = logging.getLogger("headrace.server")

_BACKLOG = 2048


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Listening sockets: one for each address that the host's name has, or the Unix domain socket.

    Raises:
        ConfigError: the address is in use, not ours, or not an address; or there is no certificate at its path.
    """
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_certificate(settings.tls_cert, settings.tls_key)
    if settings.uds is not None:
        return [_unix_socket(settings.uds)]
    port = settings.port
    try:
        addresses = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = _tcp_sockets(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in addresses), port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{port}: {error.strerror or error}", "port") from error
    logger.info("listening on %s", address(settings, sockets))
    return sockets


def address(settings: ServerSettings, sockets: Sequence[socket.socket]) -> str:
    """The URL of the server, or the path of its Unix domain socket."""
    if settings.uds is not None:
        return settings.uds
    scheme = "http" if settings.tls_cert is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{sockets[0].getsockname()[1]}"


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
            f"{certificate} and {key} are not PEM certificate and its unencrypted key: {why or error}", "tls_cert"
        ) from None
