"""Chat messages: from OpenAI's shape to what a chat template takes, and on to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from headrace.server.errors import ApiError, field_path, shown, validation_error
from headrace.server.schema import ChatMessage

# What chat templates know as system, OpenAI's newer models call developer.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSERVED = {
    "tool_calls": "tool calling is not served by this version",
    "function_call": "tool calling is not served by this version",
    "audio": "the model reads text",
    "refusal": "the model does not mark refusals",
}
# Python names of the renderer's own arguments; what else a request may not set, the renderer refuses.
_RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


def template_messages(messages: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Checks messages and brings them to the template's shape: a role, and content that is one string.

    Text parts of one message are joined by newlines. ``name`` and ``tool_call_id`` are handed on to the template.

    Raises:
        ApiError: 400, naming the message and the field of it that is at fault.
    """
    if len(messages) > limit:
        raise ApiError(400, f"messages holds {len(messages)} messages, and the limit is {limit}", param="messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    given = {name: value for name, value in message.items() if value is not None}
    for name, why in _UNSERVED.items():
        if given.pop(name, None):
            raise _unsupported(f"{where}.{name}", why)
    try:
        checked = ChatMessage.model_validate(given)
    except ValidationError as error:
        found = validation_error(error)
        path = field_path(("messages", index)) + f".{found.param}"
        raise ApiError(400, f"{where}.{found.message}", param=path, code=found.code) from None
    if checked.role not in _ROLES:
        allowed = ", ".join(_ROLES)
        message_text = f"{where}.role is {shown(checked.role)!r}, and must be one of {allowed}"
        raise ApiError(400, message_text, param=f"{where}.role", code="invalid_value")
    rendered: dict[str, Any] = {"role": _ROLES[checked.role], "content": _content(where, checked.content)}
    if checked.name is not None:
        rendered["name"] = checked.name
    if checked.tool_call_id is not None:
        if checked.role != "tool":
            raise ApiError(400, f"{where}.tool_call_id belongs to the role tool", param=f"{where}.tool_call_id")
        rendered["tool_call_id"] = checked.tool_call_id
    return rendered


def _content(where: str, content: Any) -> str:
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        raise ApiError(400, f"{where} is missing", param=where, code="missing_required_parameter")
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of content parts", param=where, code="invalid_type")
    return "\n".join(_text_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _text_part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise ApiError(400, f"{where} must be an object", param=where, code="invalid_type")
    kind = part.get("type")
    if kind != "text":
        if not isinstance(kind, str):
            raise ApiError(400, f"{where}.type must be a string", param=f"{where}.type", code="invalid_type")
        raise _unsupported(f"{where}.type", f"the model reads text, not {shown(kind)!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.text must be a string", param=f"{where}.text", code="invalid_type")
    # A cache breakpoint says what may be cached, and here everything is.
    unknown = sorted(part.keys() - {"type", "text", "prompt_cache_breakpoint"})
    if unknown:
        path = f"{where}.{shown(unknown[0])}"
        raise ApiError(400, f"{path} is not a parameter that this server knows", param=path, code="unknown_parameter")
    return text


def _unsupported(path: str, why: str) -> ApiError:
    return ApiError(400, f"{path} is not supported: {why}", param=path, code="unsupported_parameter")


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    template_kwargs: dict[str, Any],
) -> str:
    """The prompt text of a conversation.

    Raises:
        ApiError, RequestError: 400 if the template cannot render it (roles out of order, for example).
    """
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    for name in template_kwargs:
        if name in _RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{path} cannot be set by a request", param=path, code="unsupported_parameter")
    rendered: str = tokenizer.render_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **template_kwargs,
    )
    return rendered
