"""--escape-special-tokens: what users and tools write is text, whatever it spells."""

from __future__ import annotations

from typing import Any

import pytest
from support.server.harness import Api
from support.server.scripted import ScriptedLLM, tokenizer

from headrace.server.settings import ServerSettings

ESCAPED = ServerSettings(escape_special_tokens="user")
END = "<eos>"
QUOTE = f"it ends with {END} and <tool_call>, not with {END[0]} {END[1:]}"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": f"no {END}"},
    {"role": "user", "content": QUOTE},
    {"role": "assistant", "content": f"yes {END}"},
    {"role": "user", "content": [{"type": "text", "text": QUOTE}]},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> ScriptedLLM:
    """One for all tests, as it starts a process that renders conversations."""
    return ScriptedLLM(tokenizer(tmp_path_factory.mktemp("model")), ["fine"])


def prompt_of(llm: ScriptedLLM, settings: ServerSettings, **fields: Any) -> tuple[list[int], str, Any]:
    llm.seen.clear()
    assert Api(llm, settings).chat(**({"messages": MESSAGES} | fields)).status_code == 200
    (request,) = llm.seen
    return request.prompt_token_ids, request.prompt or "", llm.tokenizer


def test_what_users_spell_is_text(llm: ScriptedLLM) -> None:
    plain, text, made = prompt_of(llm, ServerSettings())
    escaped, same, _ = prompt_of(llm, ESCAPED)
    end, call = made.token_to_id(END), made.token_to_id("<tool_call>")
    assert same == text and text.count(END) == 4
    assert made.decode(escaped, skip_special_tokens=False) == made.decode(plain, skip_special_tokens=False) == text
    assert (plain.count(end), escaped.count(end)) == (4, 2), "the system's and the assistant's are tokens"
    assert (plain.count(call), escaped.count(call)) == (2, 0)


def test_results_of_tools_are_text(llm: ScriptedLLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{END}</tool_call>"},
    ]
    plain, _, made = prompt_of(llm, ServerSettings(), messages=answered)
    escaped, _, _ = prompt_of(llm, ESCAPED, messages=answered)
    end, close = made.token_to_id(END), made.token_to_id("</tool_call>")
    assert (plain.count(end), escaped.count(end)) == (1, 0)
    assert (plain.count(close), escaped.count(close)) == (2, 1), "the assistant's call is still one"


def test_prompts_without_special_tokens_are_unchanged(llm: ScriptedLLM) -> None:
    messages = [{"role": "user", "content": "Hello <|im_ and more"}]
    assert prompt_of(llm, ServerSettings(), messages=messages)[0] == prompt_of(llm, ESCAPED, messages=messages)[0]


def test_counts_are_those_of_the_prompt(llm: ScriptedLLM) -> None:
    expected = prompt_of(llm, ESCAPED)[0]
    api = Api(llm, ESCAPED)
    assert api.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == expected
    _, *turns = MESSAGES
    counted = api.post("/v1/messages/count_tokens", {"system": f"no {END}", "messages": turns})
    assert counted.json() == {"input_tokens": len(expected)}
