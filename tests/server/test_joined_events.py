"""Deltas that wait for the server are sent at once, in order, and none is lost to an error behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from headrace.errors import EngineError
from headrace.outputs import OutputDelta
from headrace.server.generation import Piece
from headrace.server.sse import EventStream


class Waiting:
    """A generation of which some deltas have arrived already; an exception among them is raised in its place."""

    def __init__(self, *arrived: str | Exception) -> None:
        self._arrived = deque(arrived)
        self.requests: list[Any] = []

    async def more(self) -> bool:
        return bool(self._arrived)

    def ready(self) -> Piece | None:
        if not self._arrived:
            return None
        found = self._arrived.popleft()
        if isinstance(found, Exception):
            raise found
        return Piece(0, OutputDelta(request_id="r", index=0, text=found))


class Answer:
    ping = b""

    def sent(self, piece: Piece) -> bytes:
        return piece.delta.text.encode()

    def encode(self, event: str) -> bytes:
        return event.encode()

    def last(self) -> list[str]:
        return ["end"]


def sent(*arrived: str | Exception) -> tuple[list[bytes], Exception | None]:
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message["body"])

    made: Any = EventStream(None, Waiting(*arrived), Answer())  # type: ignore[arg-type]
    try:
        asyncio.run(made._send_all(send))
    except EngineError as error:
        return bodies, error
    return bodies, None


def test_what_has_arrived_is_sent_at_once() -> None:
    assert sent("a", "b", "c") == ([b"abc", b"end"], None)


def test_what_came_before_an_error_is_sent() -> None:
    bodies, error = sent("a", "b", EngineError("broken"))
    assert bodies == [b"ab"] and isinstance(error, EngineError)


@pytest.mark.parametrize("size", [2**15, 2**16])
def test_joined_events_are_bounded(size: int) -> None:
    bodies, _ = sent(*["x" * size] * 8)
    assert len(bodies) == 8 * size // 2**16 + 1
