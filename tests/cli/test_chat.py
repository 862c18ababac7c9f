"""``headrace chat``: commands, lines that go on, stopped replies, and a server at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from headrace.bench.client import Usage
from headrace.cli import talk
from headrace.cli.chat import Conversation, LoopThread
from headrace.cli.main import app
from headrace.cli.talk import ServerTalker
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError, RequestError


class Echo:
    """Replies with what was said last, in pieces."""

    name = "echo"
    usage: Usage | None = None

    def __init__(self, *, hang: bool = False, error: Exception | None = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.left = False
        self.sampling: dict[str, Any] = {}
        self._hang, self._error = hang, error

    def choose(self, name: str) -> None:
        raise ConfigError(f"there is no {name}")

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reply(self, messages: list[dict[str, Any]]) -> AsyncIterator[str]:
        self.asked.append(messages)
        if self._error:
            raise self._error
        try:
            content = messages[-1]["content"]
            for letter in content if isinstance(content, str) else content[-1]["text"]:
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
        conversation = Conversation(talker, loop, Console(stderr=True), system, 2**20)
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


def test_a_reply_is_tried_again_and_taken_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Echo()
    conversation = converse(["/undo", "one", "two", "/regenerate", "/undo", "three"], monkeypatch, talker)
    said = [[message["content"] for message in messages] for messages in talker.asked]
    assert said == [["one"], ["one", "one", "two"], ["one", "one", "two"], ["one", "one", "three"]]
    assert [message["content"] for message in conversation.messages] == ["one", "one", "three", "three"]
    assert capsys.readouterr().err.count("there is no message yet") == 1


def test_parameters_and_models_are_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    talker = Echo()
    lines = ["/set temperature 0.5", "/set stop x", "/set top_k -7", "/set nonsense 1", "/tokens", "/model other"]
    converse(lines, monkeypatch, talker)
    assert talker.sampling == {"temperature": 0.5, "stop": ["x"]}
    said = capsys.readouterr().err
    assert "temperature 0.5, stop ['x']" in said and "top_k must be" in said and "nonsense is not a parameter" in said
    assert "number of tokens is not known" in said and "there is no other" in said
    talker.usage = Usage(prompt_tokens=1200, completion_tokens=3)
    converse(["/set temperature", "/tokens"], monkeypatch, talker)
    assert talker.sampling == {"stop": ["x"]} and "1,200 tokens before" in capsys.readouterr().err
    converse(["/set top_p=0.5", "/set temprature"], monkeypatch, talker)
    assert talker.sampling == {"stop": ["x"], "top_p": 0.5} and "temprature is not set" in capsys.readouterr().err


def test_pictures_go_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talker = Echo()
    for name in ("a.png", "b.unknown"):
        (tmp_path / name).write_bytes(b"abc")
    lines = [f"/image {tmp_path}/a.png", f"/image {tmp_path}/b.unknown", "one", "two"]
    converse([*lines, "/image", f"/image {tmp_path}/c.png", f"/image {tmp_path}/a.png", "/reset", "three"], monkeypatch, talker)
    urls = ["data:image/png;base64,YWJj", "data:application/octet-stream;base64,YWJj"]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert talker.asked[0][0]["content"] == [*pictures, {"type": "text", "text": "one"}]
    assert talker.asked[1][-1]["content"] == "two"
    assert talker.asked[2] == [{"role": "user", "content": "three"}]
    said = capsys.readouterr().err
    assert "name of a file" in said and "there is no file" in said


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
    assert body == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "top_k": 3} | {
        "stream_options": {"include_usage": True}
    }
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


MODELS = b'{"data": [{"id": "tiny"}]}'
NONSENSE = [
    *(b"", b"[]", b"5", b"null", b"{}", b"<html>", b"\xff\xfe", b"[" * 100_000),
    *(b'{"data": 5}', b'{"data": []}', b'{"data": [{}]}'),
]
WHOLE = b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'
PIECE = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
EVENTS = [
    *(b"data: " + text + b"\n\n" for text in NONSENSE),
    *(b'data: {"choices": ' + text + b"}\n\n" for text in (b"5", b"[5]", b'[{"delta": 5}]')),
    *(b'data: {"choices": [{"delta": {"content": ' + text + b"}}]}\n\n" for text in (b"5", b'"\\ud800"')),
    *(b'data: {"error": ' + text + b"}\n\n" for text in (b"5", b'"died"', b"{}", b'{"message": 5}', b'"a\\u001b[2J"')),
    b"event: odd\nid: 1\nretry: x\n\n",
    PIECE[:-20],
]


class Answers:
    """A server that answers GET with one body and POST with another, whatever was asked."""

    def __init__(self, models: bytes, events: bytes, *, status: int = 200, length: int | None = None) -> None:
        answers = {b"G": (models, None), b"P": (events, length)}

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += self.request.recv(65536)
                body, length = answers[data[:1]]
                head = f"HTTP/1.1 {status} x\r\nconnection: close\r\n"
                head += "" if length is None else f"content-length: {length}\r\n"
                self.request.sendall(head.encode() + b"\r\n" + body)
                self.request.shutdown(socket.SHUT_WR)
                self.request.settimeout(5)
                with contextlib.suppress(OSError):
                    self.request.recv(65536)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Answers:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def piped(url: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", url], input="hi\n")


def fails_in_a_line(url: str, code: int = 1) -> Result:
    result = piped(url)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.exception
    assert len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("error: ")
    assert not any(ord(letter) < 32 and letter != "\n" for letter in result.output)
    return result


def test_a_server_that_answers_nonsense() -> None:
    for models in NONSENSE:
        with Answers(models, WHOLE) as server:
            fails_in_a_line(server.url)
    for status in (301, 418, 500, 999):
        with Answers(b"\x1b[2J", WHOLE, status=status) as server:
            assert piped(server.url).exit_code in (1, 2)


def test_events_that_are_none() -> None:
    for events in EVENTS:
        with Answers(MODELS, events) as server:
            fails_in_a_line(server.url)


def test_a_whole_stream_and_one_that_is_cut_off() -> None:
    for events in (WHOLE, PIECE + b"data: [DONE]\n\n"):
        with Answers(MODELS, events) as server:
            result = piped(server.url)
            assert (result.exit_code, result.stdout) == (0, "hi\n")
    with Answers(MODELS, PIECE) as server:
        result = fails_in_a_line(server.url)
        assert result.stdout == "hi\n" and "cut off" in result.stderr
    with Answers(MODELS, PIECE, length=1000) as server:
        fails_in_a_line(server.url)


def test_a_reply_does_not_steer_the_terminal() -> None:
    with Answers(MODELS, WHOLE.replace(b"hi", b"a\\u001b[2J\\u0007\\r\\u009bb\\n\\tc")) as server:
        assert piped(server.url).stdout == "a\\x1b[2J\\x07\\x0d\\x9bb\n\tc\n"


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:99999", "http://127.0.0.1:port", "http://127.0.0.1:-1", "http://[::1", "http://[zz]/", "http://"),
        *("http://127.0.0.1:0", "ftp://x", "", "http:/x", "http://\x1b[2J", "x" * 5000, "http://\x00"),
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    assert "is not an http:// or https:// address" in fails_in_a_line(url, 2).stderr


@pytest.mark.parametrize("url", ["http://" + "a" * 70 + ".invalid", "http://a..b", "http://a b", "http://xn--a.invalid"])
def test_an_address_of_nobody(url: str) -> None:
    result = piped(url)
    assert result.exit_code in (1, 2) and len(result.stderr.strip().splitlines()) == 1
    assert isinstance(result.exception, SystemExit)


def test_input_that_is_no_text_and_a_key_that_is_none() -> None:
    with Answers(MODELS, WHOLE) as server:
        result = CliRunner().invoke(app, ["chat", "--url", server.url], input=b"\xff\n")
        assert result.exit_code == 1 and "surrogates" in result.stderr
        result = CliRunner().invoke(app, ["chat", "--url", server.url, "--api-key", "k\u00e9y"], input="hi\n")
        assert result.exit_code == 2 and "--api-key" in result.stderr


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


def test_a_chat_template_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("headrace.cli.startup.AnnouncedLLM", lambda *_, **options: given.append(options))
    monkeypatch.setattr(talk, "spawn_checked", lambda args, sampling: None)
    talk.EngineTalker(EngineArgs(), Console(), {}, "{{ messages }}")
    assert given[0]["chat_template"] == "{{ messages }}"
    asked = ["chat", "--url", "http://127.0.0.1:9", "--chat-template", "{{ messages }}"]
    result = CliRunner().invoke(app, asked, input="hi\n")
    assert result.exit_code == 2 and "chat_template" in result.stderr
