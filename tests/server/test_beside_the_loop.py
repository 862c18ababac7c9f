"""What a request brings is read beside the event loop, in time that grows with its length alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.server.routes import chat, messages, tokens
from headrace.server.settings import ServerSettings
from headrace.server.shape import messages as message_shape
from headrace.server.shape import responses as response_shape
from headrace.server.shape.turns import Turns
from headrace.text.tokenizer import Tokenizer
from server import scripted
from server.harness import Api, error
from server.scripted import ScriptedLLM

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return scripted.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("module", "name", "url", "body"),
    [
        (chat, "offered", "/v1/chat/completions", {"messages": [USER]}),
        (chat, "render_messages", "/v1/chat/completions", {"messages": [USER]}),
        (message_shape, "_chat_request", "/v1/messages", {"messages": [USER], "max_tokens": 3, "tools": [TOOL]}),
        (message_shape, "_chat_request", "/v1/messages/count_tokens", {"messages": [USER], "tools": [TOOL]}),
        (messages, "offered", "/v1/messages/count_tokens", {"messages": [USER], "tools": [TOOL]}),
        (response_shape, "_read", "/v1/responses", {"input": [USER]}),
        (tokens, "render_messages", "/tokenize", {"messages": [USER]}),
    ],
)
def test_conversations_and_tools_are_read_in_threads(
    monkeypatch: pytest.MonkeyPatch, made: Tokenizer, module: Any, name: str, url: str, body: dict[str, Any]
) -> None:
    work: Callable[..., Any] = getattr(module, name)
    threads: list[threading.Thread] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return work(*args, **kwargs)

    monkeypatch.setattr(module, name, watched)
    answer = Api(ScriptedLLM(made, ["Hi"])).post(url, body)
    assert answer.status_code == 200, answer.text
    assert threads and threading.main_thread() not in threads


def test_thoughts_are_joined_once() -> None:
    """15 MiB in pieces, which took seconds while each piece made a copy of those before it."""
    turns, piece = Turns(late_system=False), "x" * 750
    began = time.thread_time()
    for _ in range(20_000):
        turns.think(piece)
    turns.say("assistant", ["y"])
    [message] = turns.messages
    assert time.thread_time() - began < 1
    assert message["reasoning_content"] == piece * 20_000 and message["content"] == [{"type": "text", "text": "y"}]


def test_errors_name_the_fields_that_clients_sent(made: Tokenizer) -> None:
    llm = ScriptedLLM(made, ["Hi"])
    turns = 2 * [USER, {"role": "assistant", "content": "Hi"}]
    answer = error(Api(llm, ServerSettings(max_messages=3)).post("/v1/responses", {"input": turns}))
    assert answer["message"] == "input: 4 is above the limit of 3 (max_messages)"
    assert error(Api(llm).post("/v1/responses", {"input": "x", "include": ["a", "b"]}))["param"] == "include[0]"
