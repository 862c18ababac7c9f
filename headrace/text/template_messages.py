"""Messages between ``TemplateRenderer`` and its process: a length of eight bytes, then msgpack."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

_LENGTH_BYTES = 8


class TemplateJob(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render, and with what."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text of a conversation, or why there is none."""

    text: str = ""
    error: str | None = None


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little"))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytes | None:
    """None: the other end has closed the connection."""
    head = _read(connection, _LENGTH_BYTES)
    return None if head is None else _read(connection, int.from_bytes(head, "little"))


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < size:
        count = connection.recv_into(view[read:])
        if not count:
            return None
        read += count
    return bytes(data)
