"""Tools, calls and results as text, for chat templates that know none: as the format ``generic`` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

_INSTRUCTION = """\
You can call functions. These are their JSON Schemas, one in each line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments, as a JSON object, in this form, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}
</tool_call>
Write nothing behind the calls: their results come in the next message, each in <tool_response>.
If no function is needed, answer in words."""


def spelled_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns instructions that tell the model of its tools."""
    return _INSTRUCTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def told(messages: Sequence[Mapping[str, Any]], role: Literal["system", "user"], text: str) -> list[Mapping[str, Any]]:
    """Messages of which one says ``text`` too: the system's, made where the first is none, or the user's first."""
    place = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if place is None or (role == "system" and place > 0):
        return [{"role": role, "content": text}, *messages]
    content = messages[place]["content"]
    both = _joined(content, text, between="\n\n") if role == "system" else _joined(text, content, between="\n\n")
    return [*messages[:place], {**messages[place], "content": both}, *messages[place + 1 :]]


def spelled_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls, with arguments as JSON text, are content of the assistant, and whose results are the user's.

    Results in a row, and what the user says behind them, are one message: many templates take no two of one role in a row.
    """
    found: list[dict[str, Any]] = []
    has_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": _joined("<tool_response>", message["content"], "</tool_response>")}
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            message = {**message, "content": _joined(message["content"], *calls)}
            del message["tool_calls"]
        if has_results and message["role"] == "user":
            found[-1]["content"] = _joined(found[-1]["content"], message["content"])
        else:
            found.append(dict(message))
            has_results = is_result
    return found


def _call(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'


def _joined(*contents: Any, between: str = "\n") -> Any:
    """Contents in a row, as text where all of them are."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] != "text" or not parts or parts[-1]["type"] != "text":
                parts.append(part)
            elif part["text"]:
                parts[-1] = {**part, "text": between.join(filter(None, (parts[-1]["text"], part["text"])))}
    if all(isinstance(content, str) for content in contents):
        return parts[0]["text"]
    return parts
