"""Parts of an application of Ray Serve, without Ray."""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.server.fakes import FakeLLM

from headrace.deploy import build_openai_app
from headrace.deploy.book import ReplicaBook, routed_request
from headrace.deploy.call import HttpCall, HttpStart, answered
from headrace.deploy.config import DeployConfig
from headrace.errors import ConfigError
from headrace.server.app import build_app


def call(path: str = "/v1/completions", headers: dict[str, str] | None = None, /, **body: Any) -> HttpCall:
    lines = [(name.encode(), value.encode()) for name, value in {"content-type": "application/json", **(headers or {})}.items()]
    return HttpCall("POST" if body else "GET", path, b"", lines, json.dumps(body).encode() if body else b"", ("127.0.0.1", 1))


async def collected(parts: AsyncIterator[HttpStart | bytes]) -> list[HttpStart | bytes]:
    return [part async for part in parts]


def test_an_application_answers_calls() -> None:
    async def work() -> None:
        app = build_app(FakeLLM())
        await app.state.serving.start()
        (start,) = await collected(answered(app, call("/health")))
        assert isinstance(start, HttpStart) and (start.status, json.loads(start.body)) == (200, {"status": "ok"})
        (start,) = await collected(answered(app, call(prompt="x", temperature=-1)))
        assert isinstance(start, HttpStart) and start.status == 400
        start, *parts = await collected(answered(app, call(prompt="x", stream=True)))
        assert isinstance(start, HttpStart) and (b"content-type", b"text/event-stream; charset=utf-8") in start.headers
        assert (start.body + b"".join(parts)).endswith(b"data: [DONE]\n\n")

    asyncio.run(asyncio.wait_for(work(), 60))


def test_parts_that_are_there_at_once_are_one_and_leaving_tells_the_application() -> None:
    gone: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b'{"prompt": "x"}'
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.01)
        for part in (b"a", b"b"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        gone.append((await receive())["type"])

    async def work() -> None:
        parts = answered(app, call(prompt="x"))
        assert await anext(parts) == HttpStart(200, [], b"ab"), "nothing is promised before there is a body"
        await parts.aclose()
        assert gone in ([], ["http.disconnect"])

    asyncio.run(asyncio.wait_for(work(), 60))


def test_requests_are_routed_by_their_prompts() -> None:
    book: ReplicaBook[str] = ReplicaBook("prefix", 4)
    assert book.choose("0", call(prompt="x"), 0.0) is None, "there is no replica"
    book.update({"a": {}, "b": {}})
    book.update({name: {"ready": True, "kv_tokens": 100_000} for name in "ab"})
    system = {"role": "system", "content": "You are a miller. " * 200}

    def chat(number: int) -> HttpCall:
        return call("/v1/chat/completions", messages=[system, {"role": "user", "content": f"Question {number}"}])

    first = book.choose("1", chat(1), 0.0)
    book.end("1")
    assert [book.choose(f"2{number}", chat(number), 0.0) for number in range(3)] == [first] * 3
    other = book.choose("3", call(prompt="unrelated " * 100), 0.0)
    assert other is not None and other != first, "load counts"
    book.update({name: {"ready": name == other, "kv_tokens": 100_000} for name in "ab"})
    assert book.choose("4", chat(4), 0.0) == other, "the engine of the first is being restarted"
    book.update({other: {"kv_tokens": 100_000}, "c": {}})
    for name in ("20", "21", "22", "3", "4", "unknown"):
        book.end(name)
    assert book._loads.rows == [0] * 4 and book._loads.prefill == [0] * 4 and not book._sent
    assert not any(book._index._pending)


def test_a_request_that_was_not_taken_counts_once() -> None:
    book: ReplicaBook[str] = ReplicaBook("least-tokens", 2)
    book.update({"a": {}, "b": {}})
    assert {book.choose("1", call(prompt="x" * 400), 0.0) for _ in range(4)} == {"a", "b"}
    assert sum(book._loads.rows) == 1
    book.end("1", computed=False)
    assert sum(book._loads.rows) == 0


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": [1, 2, 3]}', [1, 2, 3]),
        (b'{"prompt": "abcdefgh"}', [1684234849, 1751606885]),
        (b'{"prompt": [1, -2]}', None),
        (b'{"prompt": [1, 5000000000]}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": "many", "cache_salt": 7}', None),
        (b"[[" * 100_000, []),
        (b"\xff", []),
        (b"", []),
        (b"3", []),
    ],
)
def test_any_body_can_be_routed(body: bytes, tokens: list[int] | None) -> None:
    request = routed_request("x", call()._replace(body=body))
    assert tokens is None or request.prompt_token_ids == tokens
    assert request.sampling.n == 1 and request.cache_salt is None


def test_what_routing_reads_of_a_request() -> None:
    request = routed_request("x", call("/", {"x-session-id": "mine"}, prompt="x", n=3, cache_salt="salt"))
    assert (request.session, request.sampling.n, request.cache_salt) == ("mine", 3, "salt")
    assert routed_request("x", call("/", prompt="x", user="me")).session == "me"
    assert routed_request("x", call("/", prompt="x", user=7)).session is None
    with_tools = routed_request("x", call(messages=[], tools=[{"name": "f"}]))
    assert with_tools.prompt_token_ids != routed_request("x", call(messages=[])).prompt_token_ids


def test_the_configuration_has_defaults_and_names_what_is_wrong() -> None:
    config = DeployConfig.of(
        {
            "model_loading_config": {"model_id": "small", "model_source": "org/model"},
            "engine_kwargs": {"max_num_seqs": 32, "tensor_parallel_size": 2},
            "server_kwargs": {"api_keys": ["secret"], "drain_timeout": 5},
            "deployment_config": {"autoscaling_config": {"max_replicas": 3}},
        }
    )
    assert config.engine.model == "org/model" and config.settings.served_model_names == ("small",)
    assert config.settings.api_keys == ("secret",)
    assert config.deployment == {
        "max_ongoing_requests": 36,
        "graceful_shutdown_timeout_s": 5,
        "ray_actor_options": {"num_gpus": 2},
        "autoscaling_config": {"target_ongoing_requests": 24.0, "max_replicas": 3},
    }
    assert DeployConfig.of({"engine_kwargs": {"device": "cpu"}}).deployment["ray_actor_options"] == {}
    for wrong, param in [
        ({"engine_kwargs": {"data_parallel_size": 2}}, "engine_kwargs.data_parallel_size"),
        ({"engine_kwargs": {"max_num_seqs": 0}}, "engine_kwargs.max_num_seqs"),
        ({"engine_kwargs": {"nonsense": 1}}, "engine_kwargs.nonsense"),
        ({"server_kwargs": {"retry_after": -1}}, "server_kwargs.retry_after"),
        ({"model_loading_config": {"model": "x"}}, "model_loading_config.model"),
        ({"llm": {}}, "llm"),
    ]:
        with pytest.raises(ConfigError) as refused:
            DeployConfig.of(wrong)
        assert refused.value.param == param


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_ray)
    monkeypatch.delitem(__import__("sys").modules, "headrace.deploy.ray_serve", raising=False)
    with pytest.raises(ImportError, match=r"headrace\[ray\]"):
        build_openai_app({})
