"""Chat templates: normalises the messages of a conversation and renders them as a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ConfigError, RequestError, missing, unsupported, wrong_type
from headrace.host.user_files import is_stream, read_text
from headrace.options import shown
from headrace.text.content import ConversationMedia, content_of, no_others
from headrace.text.fast_tokenizer import FastTokenizer
from headrace.text.spelled_tools import spelled_calls, spelled_tools, told
from headrace.text.template_messages import TemplateJob
from headrace.text.templates import TemplateRenderer

if TYPE_CHECKING:
    from jinja2.nodes import Template
    from transformers import PreTrainedTokenizerFast

_MAX_TEMPLATE_BYTES = 1 << 20
_RESERVED = frozenset(
    {
        *("self", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "messages", "conversations"),
    }
)
"""Variables that ``chat_template_kwargs`` may not set: the renderer sets them, or they have a parameter."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # the older name
}
"""Role of OpenAI's API -> role that chat templates know."""
_FUNCTION_CALL = "function0"
"""Id of a call in the older form, which has none. It has 9 letters and digits, since some templates take no others."""
_REASONING = ("reasoning_content", "reasoning")
_OF_ASSISTANT = ("tool_calls", "function_call", *_REASONING)
_FIELDS = frozenset({"role", "content", "name", "tool_call_id", *_OF_ASSISTANT})
_UNSERVED = {
    "audio": "the model reads text",
    "refusal": "the model does not mark refusals",
}


def read_template(source: str) -> str:
    """A chat template given by the operator: the template itself, or the path of a small text file that holds it.

    What holds Jinja's braces or a line break is a template; anything else is a path.

    Raises:
        ConfigError: the path does not exist, or is not a small text file; or the template is not valid Jinja.
    """
    return read_text(Path(source), "chat_template", _MAX_TEMPLATE_BYTES) if _is_path(source) else source


def check_template(source: str) -> None:
    """Checks what ``read_template`` will read, unless it is a pipe, which can be read once.

    Raises:
        ConfigError: as ``read_template``, or it is not valid Jinja.
    """
    if not (_is_path(source) and is_stream(Path(source))):
        parsed_template(read_template(source))


def _is_path(source: str) -> bool:
    return not any(mark in source for mark in ("{%", "{{", "\n"))


def parsed_template(template: str) -> Template:
    """The syntax tree of a template. Nothing is compiled: Jinja's compiler computes the constants in it.

    Raises:
        ConfigError: it is not valid Jinja.
    """
    import jinja2
    from jinja2.ext import Extension
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser

    class Generation(Extension):
        """The block ``{% generation %}`` of transformers, as far as the syntax goes."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    if len(template) > _MAX_TEMPLATE_BYTES:
        raise ConfigError(f"the chat template has more than {_MAX_TEMPLATE_BYTES} characters", "chat_template")
    try:
        return jinja2.Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", "chat_template"
        ) from error
    except RecursionError as error:
        raise ConfigError("the chat template is not valid Jinja: it is nested too deeply", "chat_template") from error


def render(
    renderer: TemplateRenderer,
    tokenizer: FastTokenizer | PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
    media: ConversationMedia | None = None,
    spell_tools: bool = False,
    template: str | None = None,
) -> str:
    """Render messages with a chat template, in Jinja's sandbox and within the renderer's limits.

    Args:
        template: a client's; None: the tokenizer's.
        add_generation_prompt: None: unless the final message is continued.
        chat_template_kwargs: further variables for the template.
        strict, media: as in ``normalize``.
        spell_tools: the template gets tools, calls and results as text of other messages.

    Raises:
        RequestError: there is no template, it refuses these messages, or they are malformed; the parameter is
            ``tools``, ``continue_final_message``, ``chat_template_kwargs.NAME`` or the field of the message at fault.
    """
    templates = tokenizer.chat_template if template is None else _checked(template)
    if templates is None:
        raise RequestError("this model has no chat template: give the server one, or send a plain prompt", "messages")
    variables = chat_template_kwargs or {}
    for name in variables:
        if name in _RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise unsupported(path, f"{path} is not supported: the server sets it")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", "tools")
    normalized = normalize(messages, strict=strict, media=media)
    if media is not None:
        tools, variables = media.neutralised(tools), media.neutralised(variables)
    last = normalized[-1]
    if continue_final_message and _ROLES.get(last["role"], "assistant") != "assistant":
        message = (
            f"continue_final_message continues a message of the assistant, and the last one has the role {shown(last['role'])}"
        )
        raise RequestError(message, "continue_final_message")
    if continue_final_message and last["content"] in ("", [], [{"type": "text", "text": ""}]):
        raise RequestError("continue_final_message needs text in the last message", "continue_final_message")
    job = TemplateJob(
        template=_template(templates, bool(tools) and not spell_tools),
        # Templates take a key that is not there for what it is, and may print None.
        messages=[{name: value for name, value in message.items() if value is not None} for message in normalized],
        tools=[dict(tool) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables={**tokenizer.special_tokens_map, **variables},
    )
    if spell_tools:
        return _spelled(renderer, msgspec.structs.replace(job, messages=spelled_calls(_with_text_arguments(job.messages))))
    try:
        return renderer.render(job)
    except RequestError as error:
        # Some templates concatenate the arguments of calls as text.
        if 'concatenate str (not "dict")' not in error.message:
            raise
    return renderer.render(msgspec.structs.replace(job, messages=_with_text_arguments(job.messages)))


def _checked(template: str) -> str:
    """A client's template. Raises RequestError if it is not valid Jinja."""
    try:
        parsed_template(template)
    except ConfigError as error:
        raise RequestError(str(error), "chat_template") from None
    return template


def _spelled(renderer: TemplateRenderer, job: TemplateJob) -> str:
    """Renders a conversation with its tools in a system message, or in the user's first one where the template shows none."""
    tools, job = job.tools, msgspec.structs.replace(job, tools=None)
    if not tools:
        return renderer.render(job)
    text = spelled_tools(tools)
    try:
        prompt = renderer.render(msgspec.structs.replace(job, messages=told(job.messages, "system", text)))
        if text in prompt:
            return prompt
    except RequestError:
        pass
    return renderer.render(msgspec.structs.replace(job, messages=told(job.messages, "user", text)))


def _template(templates: str | dict[str, str], tools: bool) -> str:
    """The template of a model that may have several.

    Raises:
        RequestError: there is none that is used by default.
    """
    if isinstance(templates, str):
        return templates
    found = templates.get("tool_use") if tools else None
    found = found or templates.get("default")
    if found is None:
        names = ", ".join(sorted(templates))
        raise RequestError(f"the model has chat templates named {names} and no default", "messages")
    return found


def normalize(messages: Any, *, strict: bool = False, media: ConversationMedia | None = None) -> list[dict[str, Any]]:
    """Check messages and convert them to what templates take: content as in ``content_of``, tool call arguments are objects.

    An assistant's message may lack content.

    Args:
        media: gets the media; no text of the result spells a placeholder. None: the model reads text alone.
        strict: accept the roles and fields of OpenAI's API that this server documents, and no others. Otherwise any role and
            field is handed to the template.

    Raises:
        RequestError: names the message and its field at fault, such as ``messages[1].content[0].type``.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    found = [_message(f"messages[{index}]", message, strict, media) for index, message in enumerate(messages)]
    if strict:
        _check_results(found)
    return found


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises: RequestError: the result of a tool answers no call of an earlier message."""
    calls: set[str] = set()
    for index, message in enumerate(messages):
        calls.update(call.get("id", "") for call in message.get("tool_calls") or ())
        if message["role"] != "tool":
            continue
        where = f"messages[{index}].tool_call_id"
        if "tool_call_id" not in message:
            raise missing(where)
        if message["tool_call_id"] not in calls:
            raise RequestError(f"{where} {shown(message['tool_call_id'])} is the id of no call before it", where)


def _message(where: str, message: Any, strict: bool, media: ConversationMedia | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object")
    out = _documented(where, message) if strict else dict(message)
    if "role" not in out:
        raise missing(f"{where}.role")
    if not isinstance(out["role"], str):
        raise wrong_type(f"{where}.role", "a string")
    if strict:
        if out["role"] not in _ROLES:
            why = f"{where}.role is {shown(out['role'])}, and must be one of {', '.join(_ROLES)}"
            raise RequestError(why, f"{where}.role")
        if out["role"] == "function":
            out.setdefault("tool_call_id", _FUNCTION_CALL)
        out["role"] = _ROLES[out["role"]]
        if "tool_call_id" in out and out["role"] != "tool":
            raise RequestError(f"{where}.tool_call_id belongs to the role tool", f"{where}.tool_call_id")
        _check_answer(where, out)
    content = out.get("content")
    if content is None:
        if out["role"] != "assistant" or (strict and not out.get("tool_calls")):
            raise missing(f"{where}.content")
        content = ""
    out["content"] = content_of(f"{where}.content", content, strict, media)
    if media is not None:
        out = media.neutralised(out)
        out["content"] = media.placed(out["content"])
    if out.get("tool_calls"):
        out["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call, media) for i, call in enumerate(out["tool_calls"])]
    return out


def _check_answer(where: str, out: dict[str, Any]) -> None:
    """Checks the fields that answers have, and gives each its one form: reasoning by both names, old calls as tool calls."""
    for name in _OF_ASSISTANT:
        if name in out and out["role"] != "assistant":
            raise RequestError(f"{where}.{name} belongs to the role assistant", f"{where}.{name}")
    reasoning = next((out[name] for name in _REASONING if name in out), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise wrong_type(f"{where}.{next(name for name in _REASONING if name in out)}", "a string")
        out |= dict.fromkeys(_REASONING, reasoning)
    if (old := out.pop("function_call", None)) is not None:
        _check_function(f"{where}.function_call", old)
        out["tool_calls"] = [{"id": _FUNCTION_CALL, "type": "function", "function": old}]
    calls = out.get("tool_calls", [])
    if not isinstance(calls, list):
        raise wrong_type(f"{where}.tool_calls", "a list of tool calls")
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        _check_function(f"{place}.function", call.get("function") if isinstance(call, Mapping) else None)
        if not isinstance(call.get("id", ""), str):
            raise wrong_type(f"{place}.id", "a string")


def _check_function(where: str, function: Any) -> None:
    if not isinstance(function, Mapping):
        raise wrong_type(where, "an object with a name and arguments")
    for name in ("name", "arguments"):
        if not isinstance(function.get(name), str):
            raise wrong_type(f"{where}.{name}", "a string")


def _documented(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set, all of them documented."""
    out = {name: value for name, value in message.items() if value is not None}
    for name, why in _UNSERVED.items():
        if out.pop(name, None):
            raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported: {why}")
    no_others(where, out, _FIELDS)
    for name in ("name", "tool_call_id"):
        if not isinstance(out.get(name, ""), str):
            raise wrong_type(f"{where}.{name}", "a string")
    return out


def _tool_call(where: str, call: Any, media: ConversationMedia | None) -> dict[str, Any]:
    """A tool call with its arguments, which travel as JSON text, as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise wrong_type(where, "a tool call with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        path = f"{where}.function.arguments"
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is not JSON: {error}", path) from error
        if not isinstance(arguments, dict):
            raise RequestError(f"{path} is not a JSON object", path)
        if media is not None:  # JSON may spell a placeholder with escapes
            arguments = media.neutralised(arguments)
        arguments = _Arguments(arguments, function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


class _Arguments(dict[str, Any]):
    """Arguments of a call, which most templates take as an object, with the JSON text that the client sent."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = arguments.text if isinstance(arguments, _Arguments) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text or "{}"}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]} if message.get("tool_calls") else message
        for message in messages
    ]
