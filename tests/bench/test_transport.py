"""The load generator's connections and its events: every split of the bytes gives the same, and a broken answer an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from headrace.bench.client import _EventParser, chat_events
from headrace.bench.transport import StreamTransport
from headrace.errors import EngineError

LINES = [
    ": ping",
    'data: {"choices": [{"delta": {"content": "a\u2028\u00e9"}}]}',
    'data:{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}',
    "event: x",
    'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}',
    "data: [DONE]",
    "data: not read",
]


def text_of(events: list[Any]) -> str:
    return "".join(choice.delta.content for event in events for choice in event.choices)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_every_split_gives_the_same_events(end: str, size: int) -> None:
    data = "".join(line + 2 * end for line in LINES).encode()
    parser = _EventParser()
    reads = [[*parser.feed(data[at : at + size])] for at in range(0, len(data), size)]
    events = [event for lists in reads for events in lists for event in events]
    assert text_of(events) == "a\u2028\u00e9b"
    assert events[-1].usage.completion_tokens == 2 and len(events) == 3 and parser.finished
    assert all(len(lists) <= 1 for lists in reads)


@pytest.mark.parametrize("last", ['data: {"error": {"message": "died"}}', "data: {", "x" * (2**24 + 1)])
def test_events_before_an_error_are_given(last: str) -> None:
    given: list[Any] = []
    with pytest.raises(EngineError):
        for events in _EventParser().feed("\n".join([*LINES[:2], last, "x" * len(last)]).encode()):
            given += events
    assert text_of(given) == "a\u2028\u00e9"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
BODY = "".join(line + "\n\n" for line in LINES).encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(BODY), BODY)
WHOLE = CHUNKED + b"0\r\n\r\n"
SIZED = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Server:
    """Answers each request with the same bytes, some at a time; None: not at all."""

    def __init__(self, answer: bytes | None, *, size: int = 2**20, close: bool = False) -> None:
        self.answer, self.size, self.close = answer, size, close
        self.connections = 0
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                length = next(line for line in self.heads[-1].lower().split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                if self.answer is None:
                    continue
                for at in range(0, len(self.answer), self.size):
                    writer.write(self.answer[at : at + self.size])
                    await asyncio.sleep(0)
                if self.close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def run(self, work: Callable[[httpx.AsyncClient, str], Awaitable[Any]], **settings: Any) -> Any:
        async def main() -> Any:
            handle = await asyncio.start_server(self, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{handle.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(transport=StreamTransport(), **settings) as client:
                found = await work(client, url)
            handle.close()
            return found

        return asyncio.run(main())


async def answer(client: httpx.AsyncClient, url: str) -> str:
    return text_of([event async for events in chat_events(client, url, {"model": "m"}) for event in events])


@pytest.mark.parametrize(
    "server",
    [
        *(Server(WHOLE, size=size) for size in (1, 3, 2**20)),
        Server(SIZED),
        Server(HEAD + b"\r\n" + BODY, close=True),
        Server(WHOLE.replace(b"\r\nContent", b"\r\nConnection: close\r\nContent", 1)),
        Server(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" + WHOLE),
    ],
    ids=["by 1", "by 3", "whole", "sized", "to the end", "closed", "interim"],
)
def test_answers_are_read_whole(server: Server) -> None:
    assert server.run(answer) == "a\u2028\u00e9b"
    head = server.heads[0].lower()
    assert head.startswith(b"post /v1/chat/completions http/1.1\r\n") and b"\r\nhost: 127.0.0.1:" in head


@pytest.mark.parametrize(("keeps", "connections"), [(WHOLE, 1), (HEAD + b"Connection: close\r\n" + SIZED[len(HEAD) :], 3)])
def test_connections_are_used_again(keeps: bytes, connections: int) -> None:
    async def thrice(client: httpx.AsyncClient, url: str) -> list[str]:
        return [await answer(client, url) for _ in range(3)]

    server = Server(keeps)
    assert server.run(thrice) == 3 * ["a\u2028\u00e9b"]
    assert server.connections == connections


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server(CHUNKED[:-20], close=True), "closed the connection"),
        (Server(SIZED[:-20], close=True), "closed the connection"),
        (Server(HEAD[:-20], close=True), "closed the connection"),
        (Server(b"SSH-2.0-x\r\n\r\n"), "not an HTTP"),
        (Server(CHUNKED + b"zz\r\n"), "not an HTTP"),
        (Server(None), "in time"),
        (Server(CHUNKED), "in time"),
    ],
)
def test_broken_answers(server: Server, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        server.run(answer, timeout=0.3)


def test_a_stream_that_is_left_is_closed() -> None:
    async def leave(client: httpx.AsyncClient, url: str) -> None:
        async with client.stream("POST", url, content=b"x"):
            pass
        assert await answer(client, url)

    server = Server(WHOLE, size=40)
    server.run(leave)
    assert server.connections == 2
