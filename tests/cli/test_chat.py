"""``headrace chat``: commands, lines that go on, stopped replies, and a server at the other end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headrace.cli import talk
from headrace.cli.chat import Conversation, LoopThread
from headrace.cli.main import app
from headrace.cli.talk import ServerTalker
from headrace.errors import ConfigError, EngineError, RequestError


class Echo:
    """Replies with what was said last, in pieces."""

    name = "echo"

    def __init__(self, *, hang: bool = False, error: Exception | None = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.left = False
        self._hang, self._error = hang, error

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        self.asked.append(messages)
        if self._error:
            raise self._error
        try:
            for letter in messages[-1]["content"]:
                yield letter
            if self._hang:
                await asyncio.sleep(60)
        finally:
            self.left = True


def converse(lines: list[str], monkeypatch: pytest.MonkeyPatch, talker: Echo, system: str | None = None) -> Conversation:
    feed = iter(lines)

    def read(prompt: str = "") -> str:
        for line in feed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    with LoopThread() as loop:
        conversation = Conversation(talker, loop, Console(stderr=True), system)
        conversation.run()
    return conversation


def test_a_conversation_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Echo()
    converse(["one", "", "two"], monkeypatch, talker, system="be brief")
    assert talker.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_lines_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = Echo()
    converse(["one\\", "two\\", "three", "last\\"], monkeypatch, talker)
    assert [messages[-1]["content"] for messages in talker.asked] == ["one\ntwo\nthree", "last"]


def test_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Echo()
    saved = tmp_path / "talk.json"
    lines = ["one", "/system be kind", "two", "/reset", "three", f"/save {saved}", "/save", "/nonsense", "/help", "/quit", "x"]
    converse(lines, monkeypatch, talker)
    assert [len(messages) for messages in talker.asked] == [1, 2, 2]
    assert json.loads(saved.read_text())[0] == {"role": "system", "content": "be kind"}
    said = capsys.readouterr().err
    assert "name of a file" in said and "there is no /nonsense" in said and "/reset" in said


def test_a_stopped_reply_is_kept_as_far_as_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    talker = Echo(hang=True)
    printed: list[str] = []

    def interrupting(*words: str, **more: Any) -> None:
        printed.extend(words)
        if words == ("i",):
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupting)
    conversation = converse(["hi"], monkeypatch, talker)
    assert conversation.messages[-1] == {"role": "assistant", "content": "hi"}
    assert talker.left


def test_a_refused_message_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(["one"], monkeypatch, Echo(error=RequestError("too long", "messages")))
    assert conversation.messages == []
    assert "error: messages: too long" in capsys.readouterr().err


def server(handler: Any, **settings: Any) -> ServerTalker:
    talker = ServerTalker("http://127.0.0.1:1/", settings.get("model"), "key", settings.get("sampling", {}))
    headers = talker._client.headers
    talker._client = httpx.AsyncClient(transport=httpx.MockTransport(handler), headers=headers)
    return talker


def ask(talker: ServerTalker) -> str:
    async def main() -> str:
        await talker.start()
        return "".join([piece async for piece in talker.reply([{"role": "user", "content": "hi"}])])

    return asyncio.run(main())


def test_a_server_is_asked_for_its_first_model() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        deltas = [{"role": "assistant"}, {"content": "he"}, {"content": "llo"}, {}]
        events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]", "not read"])
        return httpx.Response(200, text=": ping\n\n" + text)

    assert ask(server(handler, sampling={"top_k": 3})) == "hello"
    body = json.loads(seen[1].content)
    assert body == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "top_k": 3}
    assert seen[1].headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("response", "error", "said"),
    [
        (httpx.Response(400, json={"error": {"message": "bad top_k", "param": "top_k"}}), RequestError, "bad top_k"),
        (httpx.Response(503, json={"error": {"message": "restarting"}}), EngineError, "restarting"),
        (httpx.Response(404, text="<html>"), RequestError, "404"),
        (httpx.Response(200, text='data: {"error": {"message": "died"}}\n\n'), EngineError, "died"),
    ],
)
def test_a_server_that_refuses(response: httpx.Response, error: type[Exception], said: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "tiny"}]}) if request.url.path == "/v1/models" else response

    with pytest.raises(error, match=said):
        ask(server(handler))


def test_a_server_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9"], input="hi\n")
    assert result.exit_code == 1
    assert "cannot reach" in result.stderr


def test_engine_options_mean_nothing_to_a_server() -> None:
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", "--block-size", "32"], input="hi\n")
    assert result.exit_code == 2
    assert "block_size" in result.stderr
    with pytest.raises(ConfigError):
        talk.ServerTalker("localhost:8000", None, None, {})
