"""A client on a bare socket, for requests that no HTTP library would send."""

from __future__ import annotations

import http.client
import io
import json
import socket
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class _Reader(io.BufferedReader):
    """One for all answers of a connection: each may come with the beginning of the next."""

    def close(self) -> None:
        pass


class RawClient:
    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        self.socket.settimeout(60)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((address.hostname, address.port))
        self._reader = _Reader(socket.SocketIO(self.socket, "rb"))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """A server that has answered may have closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def answer(self, method: str = "POST") -> Answer:
        response = http.client.HTTPResponse(SimpleNamespace(makefile=lambda mode: self._reader), method=method)
        response.begin()
        body = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        data = b""
        try:
            while chunk := self._reader.read1():
                data += chunk
        except ConnectionResetError:
            pass
        return data


def post(body: bytes = b'{"prompt": "Hi"}', *headers: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A POST as it goes over the wire. ``length`` lies about the body's."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    if not any(header.lower().startswith("transfer-encoding") for header in headers):
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str = "/health", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()
