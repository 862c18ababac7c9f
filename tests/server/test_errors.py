"""What goes wrong is answered in OpenAI's shape: bodies, routes, engine errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, client, error
from support.tokenizers import PanicException

from headrace.config import EngineArgs
from headrace.core.request import Request
from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.outputs import OutputDelta
from headrace.server.app import build_app
from headrace.server.settings import ServerSettings

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b'{"prompt": "a"} trailing',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "top_k": ' + b"9" * 40 + b"}",
        b'{"prompt": "a", "top_k": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": 1e3}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud83d x"}',
        b'{"prompt": "\\udc00"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b"\xef\xbb\xbf{}",
        b"[" * 90_000,
        b'{"prompt":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"prompt": "a", "\x00": 1}',
        b'{"prompt": "a", "": 1}',
        json.dumps({"prompt": "a", "x" * 5000: 1}).encode(),
        '{"prompt": "a"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_malformed_bodies(api: Api, path: str, body: bytes) -> None:
    found = error(api.post(path, content=body, headers=JSON))
    assert found["type"] == "invalid_request_error"
    assert len(found["message"]) < 500, "a client's own bytes are not sent back at length"


def test_content_types(api: Api) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    for kind in ("application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
        assert api.post("/v1/completions", content=body, headers={"content-type": kind}).status_code == 200
    assert error(api.post("/v1/completions", content=body), 415)["param"] == "Content-Type"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "multipart/form-data"):
        assert error(api.post("/v1/completions", content=body, headers={"content-type": kind}), 415)["param"] == "Content-Type"
    found = error(api.post("/v1/completions", content=body, headers=JSON | {"content-encoding": "gzip"}), 415)
    assert found["param"] == "Content-Encoding"


def test_body_size_by_header_and_by_count() -> None:
    api = Api(FakeLLM(), ServerSettings(max_body_bytes=100))
    assert api.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=JSON).status_code == 200
    response = api.post("/v1/completions", content=b" " * 101, headers=JSON)
    assert error(response, 413)["code"] == "body_too_large"

    async def chunks() -> Any:
        for _ in range(1000):
            yield b" " * 10

    error(api.post("/v1/completions", content=chunks(), headers=JSON), 413)


def test_unknown_routes_and_methods(api: Api) -> None:
    assert error(api.get("/v2/x"), 404)["message"] == "there is no GET /v2/x"
    assert error(api.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = api.get(CHAT)
    assert error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error(api.get("/redoc"), 404)
    schema = api.get("/openapi.json").json()
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["temperature"] and "$ref" not in json.dumps(schema["paths"])


def test_queue_full() -> None:
    llm = FakeLLM(max_queue=0)
    for response in (Api(llm).chat(), Api(llm).chat(stream=True), Api(llm, ServerSettings(retry_after=7)).complete()):
        found = error(response, 429)
        assert (found["type"], found["code"]) == ("rate_limit_error", "queue_full")
    assert response.headers["retry-after"] == "7"


class GatedLLM(FakeLLM):
    """Generates nothing before ``opened`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.args = EngineArgs(max_queue_len=8)

    async def _stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        await self.opened.wait()
        async for delta in super()._stream(request):
            yield delta


def test_the_queue_is_shared_by_the_keys() -> None:
    """One key has no more in the engine than may run at once and its share of the queue, and leaves the rest to the others."""

    async def run() -> None:
        llm = GatedLLM()
        async with client(llm, ServerSettings(api_keys=("a", "b"))) as http:

            def ask(key: str, n: int) -> asyncio.Task[httpx.Response]:
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "Hi", "max_tokens": 3, "n": n}
                return asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))

            waiting = [ask("a", 6), ask("a", 6), ask("b", 6)]
            while len(llm.running) < 3:
                await asyncio.sleep(0.01)
            found = error(await ask("a", 1), 429)
            assert found["code"] == "queue_full" and "12 sequences of this API key" in found["message"]
            llm.opened.set()
            assert [(await task).status_code for task in waiting] == [200] * 3
            assert (await ask("a", 12)).status_code == (await ask("a", 40)).status_code == 200

    asyncio.run(run())


def test_queue_full_for_one_of_several_prompts_aborts_the_others() -> None:
    llm = FakeLLM(max_queue=1)
    error(Api(llm).complete(prompt=["a", "b", "c"]), 429)
    assert not llm.running


def broken(failure: Exception, after: int = 0) -> FakeLLM:
    return FakeLLM(script=lambda request, index: [*b"Hello"[:after], failure])


def test_a_sequence_that_fails() -> None:
    found = error(Api(broken(ValueError("its tensor was bad"), 2)).chat(), 500)
    assert (found["type"], found["message"]) == ("server_error", "its tensor was bad")
    error(Api(broken(ValueError("bad"))).chat(stream=True), 500)
    found = error(Api(broken(RequestError("its constraints leave no token"), 2)).chat(), 400)
    assert (found["type"], found["message"]) == ("invalid_request_error", "its constraints leave no token")


def test_errors_after_the_stream_began_are_its_last_event() -> None:
    for failure in (ValueError("bad"), EngineError("worse"), EngineDeadError("gone")):
        llm = broken(failure, 2)
        for response in (Api(llm).chat(stream=True), Api(llm).complete(stream=True), Api(llm).chat(stream=True, n=3)):
            assert response.status_code == 200
            lines = [line for line in response.text.split("\n") if line]
            last = json.loads(lines[-1].removeprefix("data: "))
            assert last["error"]["message"] == str(failure)
            assert set(last["error"]) == {"message", "type", "param", "code"}
            assert "[DONE]" not in response.text
            assert not llm.running


def test_stacks_stay_in_the_log() -> None:
    for kind, status in ((EngineError, 500), (EngineDeadError, 503)):
        found = error(Api(broken(kind("it broke\nTraceback (most recent call last):\n  File"))).chat(), status)
        assert found["message"] == "it broke"
    llm = FakeLLM()
    app = build_app(llm)
    app.state.serving.failure = EngineError("no weights\nTraceback (most recent call last)")
    assert app.state.serving.health() == (False, "no weights")


def test_unforeseen_errors_tell_the_client_nothing() -> None:
    llm = FakeLLM(script=lambda request, index: 1 / 0)
    for response in (Api(llm).chat(), Api(llm).chat(stream=True)):
        found = error(response, 500)
        assert found["code"] == "internal_error"
        assert "division" not in response.text and "Traceback" not in response.text
        assert response.headers["x-request-id"]


def test_not_ready() -> None:
    llm = FakeLLM()

    async def calls() -> list[Any]:
        async with client(llm, ServerSettings(ready_timeout=0.0)) as http:
            llm.die()
            body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
            posts = [CHAT, "/v1/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"]
            return [await http.post(path, json=body) for path in posts] + [
                await http.get(path) for path in ("/v1/models", "/v1/models/fake-model", "/health", "/ping")
            ]

    for response in asyncio.run(calls()):
        assert error(response, 503)["message"] == "the engine is restarting"
        assert response.headers["retry-after"] == "1"


def test_engine_death_answers_those_in_flight() -> None:
    async def call(stream: bool) -> Any:
        llm = FakeLLM(step=0.01)
        async with client(llm) as http:
            body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
            pending = asyncio.create_task(http.post(CHAT, json=body))
            while not llm.running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            llm.die()
            return await pending

    error(asyncio.run(call(False)), 503)
    streamed = asyncio.run(call(True))
    assert json.loads(streamed.text.strip().split("\n")[-1].removeprefix("data: "))["error"]["type"] == "server_error"


def test_an_abort_from_outside_is_an_error_not_a_finish() -> None:
    async def call() -> Any:
        llm = FakeLLM(step=0.01)
        async with client(llm) as http:
            pending = asyncio.create_task(http.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}]}))
            while not llm.running:
                await asyncio.sleep(0.001)
            await llm.abort(next(iter(llm.running)))
            return await pending

    assert error(asyncio.run(call()), 503)["code"] == "aborted"


def test_the_end_of_one_replica_may_be_tried_again_while_others_serve() -> None:
    api = Api(broken(EngineDeadError("replica 0 died"), 2))
    assert error(api.complete(max_tokens=5), 503)["message"] == "replica 0 died"
    assert api.llm.health().ok


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_panic_of_a_native_library_is_one_request_s_error(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    llm = FakeLLM()
    server = Api(llm)

    def panic(*args: Any, **kwargs: Any) -> Any:
        raise PanicException("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "encode", panic)
        assert error(server.post(path, {"prompt": "a"}), 500)["code"] == "internal_error"
    assert server.post(path, {"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("name", [[], {}, ["add"], None, 5])
def test_names_of_chosen_functions_that_are_no_names(api: Api, name: Any) -> None:
    add = {"name": "add"}
    choices: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": add}], "tool_choice": {"type": "function", "function": {"name": name}}},
        {"functions": [add], "function_call": {"name": name}},
    ]
    for fields in choices:
        wrong = error(api.chat(**fields))
        assert wrong["param"] in ("tool_choice.function.name", "function_call.name")
