"""Connections: pipelined and half-closed ones, offers of an upgrade, HEAD."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import httpx
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Running, running, wait_for
from support.server.raw import RawClient, get, post

from headrace.server.settings import ServerSettings

LONG = [97] * 400
GENERATE = b'{"prompt": "Hi", "max_tokens": 400}'
STREAM = b'{"prompt": "Hi", "max_tokens": 400, "stream": true}'
H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.fixture
def slow() -> Iterator[Running]:
    with running(FakeLLM(step=0.02, script=lambda request, index: LONG)) as server:
        yield server


def test_a_request_may_arrive_in_any_pieces_with_or_without_an_upgrade_offer(server: Running) -> None:
    chunked = post(b'6\r\n{"prom\r\na\r\npt": "Hi"}\r\n0\r\nx-trailer: 1\r\n\r\n', "transfer-encoding: chunked", *H2C)
    for request in (post(), post(b'{"prompt": "Hi"}', *H2C), chunked):
        whole = request + get()
        for cut in (*range(0, len(whole), 5), len(request) - 1, len(request), len(request) + 1):
            with RawClient(server.url) as client:
                client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.send(whole[:cut])
                client.send(whole[cut:])
                answer = client.answer()
                assert answer.status == 200 and "Hello 0" in answer.json()["choices"][0]["text"], (cut, answer)
                assert client.answer("GET").json() == {"status": "ok"}


def test_upgrade_offers_without_a_body_are_ignored(server: Running) -> None:
    for headers in (H2C, ("connection: upgrade", "upgrade: websocket"), ("connection: upgrade", "upgrade: TLS/1.0, h2c")):
        with RawClient(server.url) as client:
            client.send(get("/health", *headers) * 2)
            assert [client.answer("GET").status for _ in range(2)] == [200, 200]
    with RawClient(server.url) as client:
        client.send(b"CONNECT example.com:80 HTTP/1.1\r\nhost: example.com\r\n\r\n")
        assert client.answer("CONNECT").status == 405


def test_trailers_are_no_headers(server: Running) -> None:
    with RawClient(server.url) as client:
        client.send(post(b"", "transfer-encoding: chunked") + b'10\r\n{"prompt": "Hi"}\r\n0\r\nx-request-id: forged\r\n\r\n')
        assert client.answer().headers["x-request-id"] != "forged"


def test_head_is_get_without_a_body(server: Running) -> None:
    schema = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    paths = [path.replace("{name}", "fake-model") for path, methods in schema.items() if "get" in methods]
    assert {"/health", "/v1/models/fake-model"} <= {*paths}
    for path in (*paths, "/openapi.json"):
        with RawClient(server.url) as client:
            client.send(get(path).replace(b"GET", b"HEAD") + get("/version"))
            answer = client.answer("HEAD")
            usual = httpx.get(server.url + path)
            assert (answer.status, answer.body) == (usual.status_code, b"")
            assert (int(answer.headers["content-length"]) > 0) == bool(usual.content)
            assert client.answer("GET").status == 200
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    requests = [get("/version"), post(), get(), post(b"{"), get("/nowhere"), get()]
    for pieces in ([b"".join(requests)], requests):
        with RawClient(server.url) as client:
            for piece in pieces:
                client.send(piece)
            assert [client.answer().status for _ in requests] == [200, 200, 200, 400, 404, 200]


def test_clients_that_pipeline_and_leave_are_noticed(slow: Running, caplog: pytest.LogCaptureFixture) -> None:
    behind = [get(), post(GENERATE), post()[:-3], get()[:-3], b"\x00garbage", b"x" * 200_000]
    cases = [(body, rest, together) for body in (GENERATE, STREAM) for rest in behind for together in (True, False)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(slow.url)) for _ in cases]
        for client, (body, rest, together) in zip(clients, cases, strict=True):
            client.send(post(body) + rest if together else post(body))
        wait_for(lambda: len(slow.llm.running) == len(cases))
        for client, (_, rest, together) in zip(clients, cases, strict=True):
            if not together:
                client.send(rest)
    wait_for(lambda: not slow.llm.running and not slow.app.state.serving.num_in_flight, 6)
    assert len(slow.llm.aborted) == len(slow.llm.seen) == len(cases)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_too_much_behind_a_request_ends_the_connection_after_its_answer() -> None:
    with running(FakeLLM(step=0.02), ServerSettings(max_header_bytes=2000)) as server, RawClient(server.url) as client:
        client.send(post())
        wait_for(lambda: len(server.llm.running) == 1)
        client.send(get() * 100)
        assert client.answer().status == 200
        assert client.rest() == b""


def test_garbage_behind_a_request_waits_for_its_answer(server: Running) -> None:
    with RawClient(server.url) as client:
        client.send(post() + b"\x00garbage")
        assert client.answer().status == 200
        assert b"200 OK" not in client.rest()


@pytest.mark.parametrize("num_tokens", [1, 30])
@pytest.mark.parametrize("stream", ["", ', "stream": true'])
def test_a_half_closed_client_gets_its_answer(slow: Running, num_tokens: int, stream: str) -> None:
    """Also one that takes longer than the first probes."""
    with RawClient(slow.url) as client:
        client.send(post(f'{{"prompt": "Hi", "max_tokens": {num_tokens}{stream}}}'.encode()) + get())
        client.socket.shutdown(socket.SHUT_WR)
        first = client.answer()
        assert first.status == 200 and first.body.count(b"a" if stream else b"a" * num_tokens) >= 1
        assert client.answer("GET").status == 200
        assert client.rest() == b""
    assert not slow.llm.aborted


@pytest.mark.parametrize("sent", [post(GENERATE)[:-3], post(GENERATE)[:20]])
def test_a_client_that_half_closes_within_a_request_is_closed(server: Running, sent: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(sent)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
