"""Deltas that wait for the server are sent at once, in order, and none is lost to an error behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.request import Request
from headrace.errors import EngineError
from headrace.outputs import OutputDelta
from headrace.sampling_params import SamplingParams
from headrace.server.generation import Piece
from headrace.server.sse import EventStream


class Waiting:
    """A generation of which some deltas have arrived already; an exception among them is raised in its place."""

    def __init__(self, *arrived: str | Exception) -> None:
        self._arrived = deque(arrived)
        self.requests: list[Any] = []

    async def more(self) -> bool:
        return bool(self._arrived)

    async def each(self, take: Callable[[], bool]) -> None:
        while self._arrived and take():
            pass

    def ready(self) -> Piece | None:
        if not self._arrived:
            return None
        found = self._arrived.popleft()
        if isinstance(found, Exception):
            raise found
        return Piece(0, OutputDelta(request_id="r", index=0, text=found))


class Answer:
    media_type = "text/event-stream"
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

    made: Any = EventStream(None, Waiting(*arrived), Answer())
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


def written(*arrived: str | Exception, room: int, prompt_logprobs: int | None = None) -> list[tuple[str, bytes]]:
    """Returns the bodies as they went out, where the client takes ``room`` bodies and is slow from then on. An error is the
    last."""
    bodies: list[tuple[str, bytes]] = []

    async def send(message: Any) -> None:
        bodies.append(("send", message["body"]))

    def write(body: bytes) -> bool:
        bodies.append(("write", body))
        return len(bodies) <= room

    generation = Waiting(*arrived)
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    generation.requests = [Request(request_id="r", prompt_token_ids=[1], sampling=sampling, max_tokens=9, seed=0)]
    made: Any = EventStream(None, generation, Answer())
    try:
        asyncio.run(made._send_all(send, write))
    except EngineError as error:
        bodies.append(("error", str(error).encode()))
    return bodies


LARGE = "x" * 2**16
SENT = [("send", LARGE.encode())]
WRITTEN = [("write", LARGE.encode())]


def test_events_are_written_at_once_from_the_third_on() -> None:
    assert written(*[LARGE] * 5, room=9) == [*SENT * 2, *WRITTEN * 3, ("send", b"end")]


def test_a_slow_client_is_waited_for() -> None:
    assert written(*[LARGE] * 5, room=2) == [*SENT * 2, *WRITTEN, *SENT, *WRITTEN, ("send", b"end")]


def test_what_came_before_an_error_is_written() -> None:
    assert written(LARGE, LARGE, "a", "b", EngineError("broken"), room=9)[2:] == [("write", b"ab"), ("error", b"broken")]


def test_a_stream_with_prompt_logprobs_waits_for_their_preparation() -> None:
    assert written(*[LARGE] * 4, room=9, prompt_logprobs=1) == [*SENT * 4, ("send", b"end")]
