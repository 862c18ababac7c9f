"""--escape-special-tokens: what users and tools write is text, whatever it spells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def prompt_of(folder: Path, settings: ServerSettings, **fields: Any) -> tuple[list[int], str, Any]:
    made = tokenizer(folder)
    llm = ScriptedLLM(made, ["fine"])
    assert Api(llm, settings).chat(**({"messages": MESSAGES} | fields)).status_code == 200
    (request,) = llm.seen
    return request.prompt_token_ids, request.prompt or "", made


def test_what_users_spell_is_text(tmp_path: Path) -> None:
    plain, text, made = prompt_of(tmp_path, ServerSettings())
    escaped, same, _ = prompt_of(tmp_path, ESCAPED)
    end, call = made.token_to_id(END), made.token_to_id("<tool_call>")
    assert same == text and text.count(END) == 4
    assert made.decode(escaped, skip_special_tokens=False) == made.decode(plain, skip_special_tokens=False) == text
    assert (plain.count(end), escaped.count(end)) == (4, 2), "the system's and the assistant's are tokens"
    assert (plain.count(call), escaped.count(call)) == (2, 0)


def test_results_of_tools_are_text(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{END}</tool_call>"},
    ]
    plain, _, made = prompt_of(tmp_path, ServerSettings(), messages=answered)
    escaped, _, _ = prompt_of(tmp_path, ESCAPED, messages=answered)
    end, close = made.token_to_id(END), made.token_to_id("</tool_call>")
    assert (plain.count(end), escaped.count(end)) == (1, 0)
    assert (plain.count(close), escaped.count(close)) == (2, 1), "the assistant's call is still one"


def test_prompts_without_special_tokens_are_unchanged(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello <|im_ and more"}]
    assert prompt_of(tmp_path, ServerSettings(), messages=messages)[0] == prompt_of(tmp_path, ESCAPED, messages=messages)[0]


def test_counts_are_those_of_the_prompt(tmp_path: Path) -> None:
    expected = prompt_of(tmp_path, ESCAPED)[0]
    api = Api(ScriptedLLM(tokenizer(tmp_path), ["fine"]), ESCAPED)
    assert api.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == expected
    _, *turns = MESSAGES
    counted = api.post("/v1/messages/count_tokens", {"system": f"no {END}", "messages": turns})
    assert counted.json() == {"input_tokens": len(expected)}
