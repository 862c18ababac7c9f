"""Chat messages, as a client sends them, to the text that a model's chat template makes of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.errors import ConfigError, RequestError

_MAX_TEMPLATE_BYTES = 1 << 20
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | {"messages", "conversations"}
"""What ``chat_template_kwargs`` may not set: it is the renderer's, or has a parameter of its own."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text part -> its field."""


def read_template(source: str) -> str:
    """A chat template given by the operator: the template itself, or the path of a small text file that holds it.

    What holds Jinja's braces or a line break is a template; anything else is a path.

    Raises:
        ConfigError: the path does not exist, or is not a small text file; or the template is not valid Jinja.
    """
    template = source
    if not any(mark in source for mark in ("{%", "{{", "\n")):
        path = Path(source).expanduser()
        if not path.is_file():
            raise ConfigError(f"chat_template: there is no file {source}, and it is not a template either", "chat_template")
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat_template: {source} has more than {_MAX_TEMPLATE_BYTES} bytes", "chat_template")
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {source} is not a text file: {error}", "chat_template") from error
    return template


def check_template(template: str) -> None:
    """Compiles a template, which the renderer then keeps. Raises ConfigError if it is not valid Jinja."""
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", "chat_template"
        ) from error
    except ImportError as error:
        raise ConfigError(f"chat templates cannot be rendered: {error}", "chat_template") from error
    except Exception:
        # It compiles; that this stand-in for a conversation does not please it says nothing.
        return


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Messages through the tokenizer's chat template, in Jinja's sandbox.

    Raises:
        RequestError: there is no template, it refuses these messages, or they are malformed; the parameter is
            ``messages``, ``tools``, ``continue_final_message`` or ``chat_template_kwargs``.
    """
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template: give the server one, or send a plain prompt", "messages")
    reserved = sorted(_RESERVED & template_kwargs.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs cannot set {', '.join(reserved)}", "chat_template_kwargs")
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", "tools")
    prepared = prepare(messages)
    if continue_final_message and not prepared[-1]["content"]:
        raise RequestError("continue_final_message needs text in the last message", "continue_final_message")
    try:
        text = tokenizer.apply_chat_template(
            prepared,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_kwargs,
        )
    except Exception as error:
        # A template is a program over the request's values: whatever it raises, this request made it raise.
        raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error
    return str(text)


def prepare(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates want them: content one string, arguments of tool calls objects.

    Text parts are joined by line breaks. An assistant's message may lack content.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{i}] must be an object with a role", "messages")
    out = dict(message)
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise RequestError(f"messages[{i}] has no content", "messages")
        out["content"] = ""
    elif not isinstance(content, str):
        out["content"] = _flatten(i, content)
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(i, call) for call in message["tool_calls"]]
    return out


def _flatten(i: int, content: Any) -> str:
    """A list of text parts as one string."""
    if not isinstance(content, Sequence):
        raise RequestError(f"messages[{i}].content must be a string or a list of parts", "messages")
    texts = []
    for j, part in enumerate(content):
        where = f"messages[{i}].content[{j}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(f"{where} is of type {kind!r}; this model takes text only", "messages")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise RequestError(f"{where} has no {_TEXT_PARTS[kind]} that is a string", "messages")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(i: int, call: Any) -> dict[str, Any]:
    """A tool call whose arguments, which travel as JSON text, are an object again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"messages[{i}] has a tool call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"messages[{i}] has a tool call whose arguments are not JSON: {error}", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
