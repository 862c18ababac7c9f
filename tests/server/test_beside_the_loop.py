"""Requests are read beside the event loop, in time that grows with their length alone."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from support.server.harness import Api, client, error
from support.server.scripted import ScriptedLLM

from headrace.host.turns import TenantThreads
from headrace.server.routes import chat, messages, tokens
from headrace.server.settings import ServerSettings
from headrace.server.shape import messages as message_shape
from headrace.server.shape import responses as response_shape
from headrace.server.shape.turns import Turns
from headrace.text.tokenizer import Tokenizer
from server.loop_turns import Turn, turns

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}


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


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "Hi " * 300, "max_tokens": 2, "bad_words": ["x"]}),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/v1/responses", {"input": [USER], "max_output_tokens": 2}),
        ("/tokenize", {"messages": [USER]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_threads_are_had_in_turns_by_the_keys(
    monkeypatch: pytest.MonkeyPatch, made: Tokenizer, url: str, body: dict[str, Any]
) -> None:
    tenants: list[str] = []
    run = TenantThreads.run

    async def watched(self: TenantThreads, tenant: str, work: Callable[[], Any]) -> Any:
        tenants.append(tenant)
        return await run(self, tenant, work)

    monkeypatch.setattr(TenantThreads, "run", watched)
    api = Api(ScriptedLLM(made, ["Hi"]), ServerSettings(api_keys=("a", "b")))
    answer = api.post(url, body, headers={"Authorization": "Bearer b", "User-Agent": "codex_cli_rs/1.0"})
    assert answer.status_code == 200, answer.text
    assert {*tenants} == {hashlib.sha256(b"b").hexdigest()}
    tenants.clear()
    answer = Api(ScriptedLLM(made, ["Hi"])).post(url, body, headers={"User-Agent": "codex_cli_rs/1.0"})
    assert answer.status_code == 200, answer.text
    assert {*tenants} == {"127.0.0.1"}, "without keys, addresses have turns"


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


LONGEST = 0.05
"""Seconds of processor time that a turn of the loop may use."""
SLOWNESS = 10
"""A slow processor may use so many times what it uses to decode ``VALUES`` numbers."""
VALUES = 380_000
"""JSON values, below the default of --max-json-values."""


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "Hi", "max_tokens": 2, **fields}


def chat_of(messages: list[Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2, **fields}


HEAVY: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens": completion(prompt=[5] * VALUES),
    "lists of tokens": completion(prompt=[[5] * 3000] * 125),
    "a long prompt": completion(prompt="ab " * 5_000_000),
    "stop tokens": completion(stop_token_ids=[9] * VALUES),
    "unknown fields": completion(**{f"x{number}": 1 for number in range(28_000)}),
    "a schema": completion(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [*range(300_000)]}}}
    ),
    "messages": chat_of([USER] * 4000),
    "parts": chat_of([{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]),
    "variables": chat_of([USER], chat_template_kwargs={"x": [0] * VALUES}),
    "tools": chat_of([USER], tools=[{"type": "function", "function": {"name": f"f{number}"}} for number in range(5000)]),
    "items": ("/v1/responses", {"input": [USER] * 9000, "max_output_tokens": 2}),
    "blocks": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}], "max_tokens": 2},
    ),
    "tokens to decode": ("/detokenize", {"tokens": [5] * VALUES}),
}


def test_no_body_holds_up_the_loop(monkeypatch: pytest.MonkeyPatch, made: Tokenizer) -> None:
    """Beside decoding JSON, whose time --max-json-values bounds: it holds the interpreter's lock in any thread."""

    async def longest(http: Any, path: str, body: dict[str, Any], seen: list[Turn]) -> float:
        data = json.dumps(body).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for place in range(0, len(data), 2**16):
                yield data[place : place + 2**16]
                await asyncio.sleep(0)

        await asyncio.sleep(0)
        seen.clear()
        answer = await http.post(path, content=pieces(), headers={"content-type": "application/json"})
        await asyncio.sleep(0)
        assert answer.status_code in (200, 400, 429), answer.text
        return max((turn.seconds for turn in seen), default=0.0)

    async def measured() -> dict[str, float]:
        async with client(ScriptedLLM(made, ["Hi"])) as http:
            await http.post(*HEAVY["messages"][:1], json={"messages": [USER]})
            with turns(monkeypatch) as seen:
                return {name: await longest(http, path, body, seen) for name, (path, body) in HEAVY.items()}

    gc.disable()  # which may run in any turn
    try:
        found = asyncio.run(measured())
    finally:
        gc.enable()
    text = json.dumps([5] * VALUES).encode()
    began = time.thread_time()
    msgspec.json.decode(text)
    most = max(LONGEST, SLOWNESS * (time.thread_time() - began))
    assert max(found.values()) > 0.001, "the clock of turns does not run"
    assert not {name: seconds for name, seconds in found.items() if seconds > most}, (found, most)


PARTS = """
import gc
from headrace.server.shape import messages, responses
from headrace.server.shape.turns import Strict

def parts(kind):
    below = kind.__subclasses__()
    return [part for one in below for part in parts(one)] if below else [kind]

for part in parts(Strict):
    print(part.__name__, any(type(held).__name__ == "StructInfo" for held in gc.get_referents(part)))
"""


def test_what_threads_convert_to_is_known_before_there_are_requests() -> None:
    """msgspec reads the fields of a struct at its first use; two threads that do so at once crash the process."""
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, check=True)
    known = dict(line.split() for line in done.stdout.splitlines())
    assert {"UserTurn", "ThinkingEnabled", "TextConfig", "AllowedTools"} <= set(known)
    assert {part for part, read in known.items() if read != "True"} == set()
