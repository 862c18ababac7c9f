"""Limits on the size and speed of requests: just below one passes, just above is refused, and the server serves on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server.fakes import FakeLLM
from support.server.harness import Api, Running, error, running, wait_for
from support.server.raw import RawClient, get, post

from headrace.options import options
from headrace.server.body import num_values
from headrace.server.protocol import LimitedProtocol
from headrace.server.settings import ServerSettings

LIMITS = ServerSettings(
    max_header_bytes=2000, max_url_bytes=500, max_body_bytes=1000, max_bytes_in_flight=4000, max_json_values=50
)
HEAD = len(get("/")) - len("GET / HTTP/1.1\r\n\r\n")
"""Bytes that ``get`` adds to its path and headers."""


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with running(FakeLLM(), LIMITS) as server:
        yield server


def one_header(size: int) -> bytes:
    return get("/health", "a: " + "x" * (size - HEAD - len("/health") - len("a: \r\n")))


def many_headers(size: int) -> bytes:
    free = size - HEAD - len("/health")
    return get("/health", *["a: x"] * (free // 6 - 1), "b: " + "x" * (6 + free % 6 - 5))


def url(size: int) -> bytes:
    return get("/health?" + "x" * (size - len("/health?")))


def body(size: int) -> bytes:
    return post(b'{"prompt": "a"}' + b" " * (size - len(b'{"prompt": "a"}')))


def chunked(size: int) -> bytes:
    text = b'{"prompt": "a"}'
    chunks = [text, *[b" "] * (size - len(text)), b""]
    return post(b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks), "transfer-encoding: chunked")


def numbers(size: int) -> bytes:
    free = size - 4 * len('{""[')  # each counts as four
    return post(b'{"prompt": [' + b"1," * free + b"1]}")


@pytest.mark.parametrize(
    ("make", "limit", "status", "code"),
    [
        (one_header, LIMITS.max_header_bytes, 431, "headers_too_large"),
        (many_headers, LIMITS.max_header_bytes, 431, "headers_too_large"),
        (url, LIMITS.max_url_bytes, 414, "url_too_large"),
        (body, LIMITS.max_body_bytes, 413, "body_too_large"),
        (chunked, LIMITS.max_body_bytes, 413, "body_too_large"),
        (numbers, LIMITS.max_json_values, 413, "too_many_values"),
    ],
)
def test_sizes(small: Running, make: Callable[[int], bytes], limit: int, status: int, code: str) -> None:
    for size, expected in ((limit, 200), (limit + 1, status)):
        with RawClient(small.url) as client:
            client.send(make(size))
            answer = client.answer()
            assert answer.status == expected, answer
            if expected != 200:
                assert answer.json()["error"]["code"] == code and str(limit) in answer.json()["error"]["message"]
    assert httpx.get(f"{small.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (b"GET /health HTTP/1.1\r\na: ", b"x" * 4096, 431),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n" * 700, 431),
        (b"GET /", b"x" * 4096, 414),
        (b"", b"G" * 4096, 400),
        (b"", b"\r\n" * 2048, 431),
        (post(b"1\r\n", "transfer-encoding: chunked")[:-2] + b";", b"x" * 4096, 431),
        (post(b"0\r\n", "transfer-encoding: chunked"), b"a: b\r\n" * 700, 431),
    ],
    ids=["header", "headers", "url", "method", "blank lines", "chunk extension", "trailers"],
)
def test_endless_parts_are_cut_off(small: Running, start: bytes, piece: bytes, status: int) -> None:
    """All of a part may come before any of it is parsed."""
    with RawClient(small.url) as client:
        client.send(start)
        for _ in range(200):
            client.send(piece)
        assert client.answer().status == status
        assert client.rest() == b""
    assert httpx.get(f"{small.url}/health").status_code == 200


class Transport:
    """Takes what a protocol writes."""

    def __init__(self) -> None:
        self.written = b""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: None

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> None:
        return None


def test_memory_of_a_flood_of_headers_is_bounded() -> None:
    config = SimpleNamespace(
        loaded=True, loaded_app=None, ws_protocol_class=None, root_path="", asgi_version="3.0", limit_concurrency=None,
        timeout_keep_alive=5, config=None,
    )  # fmt: skip
    state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[])
    for start, piece in ((b"a: ", b"x" * 65536), (b"", b"a: b\r\n" * 10_000)):
        loop = SimpleNamespace(call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
        protocol = LimitedProtocol(ServerSettings(), config=config, server_state=state, app_state={}, _loop=loop)
        transport = Transport()
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\n" + start)
        tracemalloc.start()
        for _ in range(2**25 // len(piece)):  # 32 MiB
            protocol.data_received(piece)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert b" 431 " in transport.written and peak < 4 * 2**20


def test_content_type_is_bounded(api: Api) -> None:
    for kind, status in [("application/json" + " " * 239 + ";", 200), ("application/json;" + ";" * 240, 415)]:
        assert len(kind) in (256, 257)
        headers = {"content-type": kind}
        assert api.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers).status_code == status


QUICK = ServerSettings(header_timeout=1.0, body_timeout=1.5, keep_alive_timeout=2.0, send_timeout=0.5)


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    with running(FakeLLM(), QUICK) as server:
        yield server


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nhost: x\r\n", get() + b"GET /health HTTP/1.1\r\n"])
def test_a_head_has_a_time_limit(quick: Running, sent: bytes) -> None:
    with RawClient(quick.url) as client:
        client.send(sent)
        if sent.startswith(get()):
            assert client.answer("GET").status == 200
            client.send(b"host: x\r\n")
        found = client.answer()
        assert (found.status, found.json()["error"]["code"]) == (408, "request_timeout")
        assert client.rest() == b""


def test_a_body_has_a_time_limit_and_a_slow_one_within_it_passes(quick: Running) -> None:
    whole = post()
    with RawClient(quick.url) as client:
        client.send(whole[:-5])
        assert client.answer().status == 408
        assert client.rest() == b""
    wait_for(lambda: quick.app.state.serving.num_in_flight == 0)
    assert not quick.llm.running


def test_connections_without_requests_are_closed_silently(quick: Running) -> None:
    with contextlib.ExitStack() as clients:
        nothing, an_empty_line, a_request = (clients.enter_context(RawClient(quick.url)) for _ in range(3))
        an_empty_line.send(b"\r\n")
        a_request.send(get())
        assert a_request.answer("GET").status == 200
        for client in (nothing, an_empty_line, a_request):
            assert client.rest() == b""


def test_time_limits_do_not_count_the_time_of_the_answer() -> None:
    with running(FakeLLM(step=0.05), QUICK) as server, RawClient(server.url) as client:
        client.send(post() + get()[:-2])
        assert client.answer().status == 200
        client.send(b"\r\n")
        assert client.answer("GET").status == 200


def test_a_client_that_does_not_read_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM(script=lambda request, index: [97] * 400)
    with running(llm, QUICK) as server, RawClient(server.url, receive_buffer=4096) as client:
        client.send(post(b'{"prompt": "Hi", "n": 64, "stream": true, "max_tokens": 400, "logprobs": 5}'))
        wait_for(lambda: bool(llm.seen))
        wait_for(lambda: not llm.running and not server.app.state.serving.num_in_flight)
        assert llm.aborted, "the answer is too large for the buffers between"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_connections() -> None:
    with running(FakeLLM(), ServerSettings(max_connections=3, retry_after=7)) as server:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawClient(server.url)) for _ in range(3)]
            for client in clients:
                client.send(get())
                assert client.answer("GET").status == 200
            with RawClient(server.url) as refused:
                found = refused.answer()
                assert (found.status, found.headers["retry-after"]) == (503, "7")
                assert refused.rest() == b""
            clients[0].send(get())
            assert clients[0].answer("GET").status == 200
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_bodies_in_flight_share_a_budget() -> None:
    size, limits = 2**20, ServerSettings(max_body_bytes=2**20, max_bytes_in_flight=3 * 2**20, retry_after=7)
    with running(FakeLLM(), limits) as server:
        bodies = server.app.state.serving.bodies
        with contextlib.ExitStack() as stack:
            for count in (1, 2, 3):
                client = stack.enter_context(RawClient(server.url))
                client.send(post(b"", length=size) + b" " * (size - 1))
                # Bodies that arrive at once may all be refused, and leave room.
                held = count * (size - 1 - 64 * 2**10)
                wait_for(lambda held=held: bodies.used == held)
            last = stack.enter_context(RawClient(server.url))
            last.send(post(b"", length=size) + b" " * (size - 1))
            found = last.answer()
            assert (found.status, found.headers["retry-after"]) == (503, "7")
            assert "(max_bytes_in_flight)" in found.json()["error"]["message"]
            assert bodies.used <= limits.max_bytes_in_flight
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 300})
            assert answer.status_code == 200, "small bodies pass beside the budget"
        wait_for(lambda: bodies.used == 0)
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * (size - 100)}).status_code == 200
        wait_for(lambda: bodies.used == 0)


def test_bodies_of_one_key_leave_room_for_those_of_another() -> None:
    size, limits = 2**20, ServerSettings(max_body_bytes=2**20, max_bytes_in_flight=4 * 2**20, api_keys=("one", "two"))
    with running(FakeLLM(), limits) as server, contextlib.ExitStack() as stack:
        bodies = server.app.state.serving.bodies

        def begun(key: str) -> RawClient:
            client = stack.enter_context(RawClient(server.url))
            client.send(post(b"", f"authorization: Bearer {key}", length=size) + b" " * (size - 1))
            return client

        for count in (1, 2):
            begun("one")
            wait_for(lambda count=count: bodies.used == count * (size - 1 - 64 * 2**10))
        assert begun("one").answer().status == 503
        begun("two")
        wait_for(lambda: bodies.used == 3 * (size - 1 - 64 * 2**10))


def test_bodies_that_wait_for_a_thread_count_until_their_clients_have_left() -> None:
    size, gate = 2**20, threading.Event()
    llm, limits = FakeLLM(), ServerSettings(max_bytes_in_flight=3 * 2**20)
    with running(llm, limits) as server, concurrent.futures.ThreadPoolExecutor(2) as threads:
        bodies = server.app.state.serving.bodies
        text = {"prompt": "x" * size}
        busy = [threads.submit(asyncio.run, llm.inputs.in_thread("", gate.wait)) for _ in range(2)]
        try:
            with contextlib.ExitStack() as clients:
                for count in (1, 2, 3):
                    client = clients.enter_context(RawClient(server.url))
                    client.send(post(json.dumps(text).encode(), path="/tokenize"))
                    wait_for(lambda count=count: bodies.used > count * (size - 64 * 2**10))
                assert httpx.post(f"{server.url}/tokenize", json=text, timeout=60).status_code == 503
            wait_for(lambda: bodies.used == 0)
        finally:
            gate.set()
        assert [job.result() for job in busy] == [True, True]
        assert httpx.post(f"{server.url}/tokenize", json=text, timeout=60).status_code in (200, 400)


def test_a_running_request_gives_its_body_back() -> None:
    with running(FakeLLM(step=0.02), ServerSettings()) as server:
        bodies = server.app.state.serving.bodies
        body = {"prompt": "Hi", "stream": True, "user": "x" * 2**18}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200 and bodies.used == 0


def test_one_body_alone_is_taken_whatever_the_budget() -> None:
    api = Api(FakeLLM(), ServerSettings(max_bytes_in_flight=1))
    assert api.post("/tokenize", {"prompt": "x" * 200_000}).json()["count"] == 200_001


def weight(value: Any) -> int:
    """A number counts once; a string, a key, a list or an object four times."""
    if isinstance(value, dict):
        return 4 + sum(4 + weight(item) for item in value.values())
    return 4 + sum(map(weight, value)) if isinstance(value, list) else 4 if isinstance(value, str) else 1


TEXTS = st.text(st.sampled_from('"\\[{, a'), max_size=5)


VALUES = st.recursive(
    st.integers() | st.none() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=10
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.data())
def test_the_estimate_of_json_values_is_never_too_low(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value).encode()
    assert num_values(text) >= weight(value) - 1
    cut = data.draw(st.integers(0, len(text)))
    assert num_values(text[:cut]) + num_values(text[cut:]) >= weight(value) - 1, "in whatever pieces it arrives"


@pytest.mark.parametrize(
    ("path", "start", "item", "end"),
    [
        ("/v1/chat/completions", b'{"messages": [', b"1", b"]}"),
        ("/v1/completions", b'{"prompt": [', b'"a"', b", 1]}"),
        ("/v1/completions", b'{"prompt": [1, ', b'"a"', b"]}"),
        ("/detokenize", b'{"tokens": [', b'"a"', b"]}"),
        ("/detokenize", b'{"tokens": [', b"-1", b"]}"),
        ("/v1/chat/completions", b'{"messages": [], "metadata": {', b'"%d": 1', b"}}"),
        ("/v1/chat/completions", b'{"messages": [], "tools": [', b"1", b"]}"),
        ("/v1/completions", b'{"prompt": "a", "stop": [', b"1", b"]}"),
        ("/v1/completions", b'{"prompt": "a", "allowed_token_ids": [', b'"a"', b"]}"),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {', b'"%d": "a"', b"}}"),
    ],
)
def test_the_cost_of_wrong_items_does_not_grow_with_their_number(
    api: Api, path: str, start: bytes, item: bytes, end: bytes
) -> None:
    """An error for each of them would take hundreds of bytes."""
    count = 20_000
    items = b",".join(item % i if b"%d" in item else item for i in range(count))
    tracemalloc.start()
    found = error(api.post(path, content=start + items + end, headers={"content-type": "application/json"}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found["message"]) < 500
    assert peak < 350 * count, peak


def test_a_prompt_of_the_whole_context_as_token_ids_is_never_too_many_values() -> None:
    llm = FakeLLM()
    body = {"prompt": [1] * 500_000, "max_tokens": 1}
    refused = Api(llm).complete(**body)
    assert "400000 JSON values" in error(refused, 413)["message"]
    llm.info = msgspec.structs.replace(llm.info, max_model_len=500_000)
    assert error(Api(llm).complete(**body))["code"] == "context_length_exceeded"


MESSAGE = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "option"),
    [
        ("/tokenize", {"prompt": "ab " * 400_000}, "max_prompt_chars"),
        ("/detokenize", {"tokens": [5] * 300_000}, "max_json_values"),
        ("/v1/completions", {"prompt": "a" * 2_000_000}, "max_body_bytes"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "max_prompts"),
        ("/v1/completions", {"prompt": "a", "n": 5}, "max_n"),
        ("/v1/completions", {"prompt": ["a"] * 4, "n": 4}, "max_choices"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 1001}, "max_stop_seqs_num"),
        ("/v1/completions", {"prompt": "a", "stop": ["a" * 65]}, "stop_seqs_max_len"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 1001}, "max_bad_words_num"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 2000}, "max_stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [1] * 70_000}, "max_allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 1, "2": 1}}, "max_logit_bias"),
        ("/v1/completions", {"prompt": "a" * 90, "prompt_logprobs": 20, "n": 4}, "max_prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "max_logprobs"),
        ("/v1/chat/completions", {"messages": [MESSAGE] * 5}, "max_messages"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "chat_template_kwargs": {"x": [0] * 99}}, "max_chat_values"),
    ],
)
def test_a_refusal_is_a_line_that_names_the_option(path: str, body: dict[str, Any], option: str) -> None:
    most = {"max_prompts": 4, "max_n": 4, "max_choices": 10, "max_logit_bias": 1, "max_messages": 4, "max_chat_values": 50}
    api = Api(FakeLLM(), ServerSettings(max_body_bytes=1_500_000, max_json_values=150_000, max_prompt_logprobs=5000, **most))
    message = api.post(path, body).json()["error"]["message"]
    assert f"({option})" in message, message
    assert "\n" not in message


def test_every_limit_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    table = page.split("## Limits\n")[1].split("\n## ")[0]
    names = [name for name in options(ServerSettings) if name.startswith("max_") or name.endswith("_timeout")]
    assert "max_connections" in names and "header_timeout" in names
    missing = [name for name in names if f"`--{name.replace('_', '-')}`" not in table]
    assert missing == ["drain_timeout", "pause_timeout"], "which limit no client"
