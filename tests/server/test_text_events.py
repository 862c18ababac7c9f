"""Events that differ in their text alone are sent as if each were encoded whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.server import scripted
from support.server.fakes import FakeLLM
from support.server.harness import Api

from headrace.server.routes.chat import ChatAnswer
from headrace.server.routes.completions import CompletionAnswer
from headrace.server.settings import ServerSettings
from headrace.server.sse import Answer, ChunkAnswer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
REASONED = '<think>\nsums, ü "\\\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
_VARYING = re.compile(rb'"(id|created)":("[^"]*"|\d+)')


def streamed(api: Api, body: dict[str, Any]) -> bytes:
    """All events, without what differs from request to request."""
    answer = api.post("/v1/chat/completions" if "messages" in body else "/v1/completions", body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return _VARYING.sub(b"", answer.content)


def compared(api: Api, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how many events were encoded around their text."""
    made: list[bytes] = []
    text_event = ChunkAnswer.text_event

    def counted(*args: Any) -> bytes:
        made.append(text_event(*args))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(ChunkAnswer, "text_event", counted)
        sent = streamed(api, body)
    with monkeypatch.context() as patched:
        for kind in (ChatAnswer, CompletionAnswer):
            patched.setattr(kind, "sent", Answer.sent)
        assert streamed(api, body) == sent
    return len(made)


@pytest.mark.parametrize(
    "body",
    [
        CHAT,
        CHAT | {"n": 2, "stream_options": {"include_usage": True}},
        CHAT | {"stop": "seed"},
        TEXT,
        TEXT | {"prompt": ["Hi", "Ho"], "n": 2, "echo": True},
        TEXT | {"stream_options": {"include_usage": True}},
    ],
)
def test_texts(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(Api(FakeLLM()), body, monkeypatch) > 10


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"logprobs": True},
        CHAT | {"return_token_ids": True},
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        TEXT | {"logprobs": 1},
        TEXT | {"prompt": ["Hi", "Ho"], "n": 2, "echo": True, "logprobs": 1},
    ],
)
def test_events_that_differ_in_more_are_encoded_whole(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(Api(FakeLLM()), body, monkeypatch) == 0


@pytest.mark.parametrize("field", ["both", "reasoning"])
@pytest.mark.parametrize("shown", [True, False])
def test_reasoning_and_calls(field: Any, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm: Any = scripted.ScriptedLLM(scripted.tokenizer(tmp_path), [REASONED], tools="hermes", reasoning="think")
    api = Api(llm, ServerSettings(reasoning_field=field))
    made = compared(api, CHAT | {"tools": TOOLS, "include_reasoning": shown}, monkeypatch)
    assert made > (15 if shown else 5)
