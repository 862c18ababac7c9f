"""Anthropic's Messages: from a request to a chat's fields, and from deltas to a message and its events."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headrace.errors import RequestError
from headrace.options import shown
from headrace.server.errors import ApiError
from headrace.server.generation import Generation, Piece
from headrace.server.schema import CountTokensBody, MessagesBody
from headrace.server.settings import ServerSettings
from headrace.server.shape.parts import Part, Parts, Step
from headrace.server.shape.toolset import SkippedTools, check_callers
from headrace.server.shape.turns import (
    OBJECTS,
    ContentPart,
    Kind,
    Strict,
    Turns,
    function_tool,
    image_part,
    json_text,
    late_system,
    partial_object,
)
from headrace.server.sse import Answer, named_event
from headrace.server.state import Serving

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs.enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice": "tool_choice",
    "tools": "tools",
}
"""Field of a chat request -> the field of a Messages request that sets it."""
_CLIENT_HEADER = "x-anthropic-billing-header:"


class _Block(Strict, tag_field="type", kw_only=True):
    cache_control: dict[str, Any] | None = None


class Text(_Block, tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class Base64Source(Strict, tag_field="type", tag="base64", kw_only=True):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp"]
    data: str


class URLSource(Strict, tag_field="type", tag="url", kw_only=True):
    url: str


class Image(_Block, tag="image", kw_only=True):
    source: Base64Source | URLSource


class ToolUse(_Block, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolReference(_Block, tag="tool_reference", kw_only=True):
    tool_name: str


class ToolResult(_Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[Text | Image | ToolReference] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class Thinking(_Block, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class RedactedThinking(_Block, tag="redacted_thinking", kw_only=True):
    data: str


class _Turn(Strict, tag_field="role", kw_only=True):
    pass


class UserTurn(_Turn, tag="user", kw_only=True):
    content: str | list[Text | Image | ToolResult]


class AssistantTurn(_Turn, tag="assistant", kw_only=True):
    content: str | list[Text | ToolUse | Thinking | RedactedThinking]


class SystemTurn(_Turn, tag="system", kw_only=True):
    content: str | list[Text]


class DeveloperTurn(SystemTurn, tag="developer", kw_only=True):
    pass


class ContextTurn(SystemTurn, tag="ctx", kw_only=True):
    pass


class MessageTurn(SystemTurn, tag="msg", kw_only=True):
    pass


Turn = UserTurn | AssistantTurn | SystemTurn | DeveloperTurn | ContextTurn | MessageTurn


class Tool(Strict, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    """Accepted for a tool search, which this server does not have: the model is shown all tools."""
    allowed_callers: list[str] | None = None


class ToolChoice(Strict, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


Display = Literal["summarized"]


class ThinkingEnabled(Strict, tag_field="type", tag="enabled", kw_only=True):
    budget_tokens: int
    display: Display | None = None


class ThinkingAdaptive(Strict, tag_field="type", tag="adaptive", kw_only=True):
    display: Display | None = None


class ThinkingDisabled(Strict, tag_field="type", tag="disabled", kw_only=True):
    pass


ThinkingConfig = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JSONFormat(Strict, tag_field="type", tag="json_schema", kw_only=True):
    schema: dict[str, Any]


class OutputConfig(Strict, kw_only=True):
    effort: str | None = None
    format: JSONFormat | None = None


_SYSTEM, _TURNS, _TOOL = map(Kind, (str | list[Text] | None, list[Turn], Tool))
_TOOL_CHOICE, _THINKING, _OUTPUT_CONFIG = map(Kind, (ToolChoice, ThinkingConfig, OutputConfig))


class ChatRequest(NamedTuple):
    """The chat request that a Messages request is."""

    fields: dict[str, Any]
    tools: list[str]
    """Place in the request of each tool of the chat."""


async def chat_request(body: CountTokensBody, state: Serving, turn: str) -> ChatRequest:
    """Reads a request, in a thread. ``turn``: as in ``Caller``.

    Raises:
        RequestError: 400, naming the place at fault.
    """
    late = await late_system(state, turn)
    return await state.llm.inputs.in_thread(turn, lambda: _chat_request(body, state, late))


def _chat_request(body: CountTokensBody, state: Serving, late: bool) -> ChatRequest:
    """``late``: as ``late_system`` says."""
    tools = _tools(body.tools, state.settings)
    conversation = _Conversation(Turns(late), {tool.name: tool for tool in tools.values()})
    turns = conversation.read(body, state.settings.keep_client_headers)
    fields: dict[str, Any] = {"model": body.model, "messages": turns}
    # A last turn of the assistant is the beginning of the answer.
    if turns and turns[-1]["role"] == "assistant":
        if turns[-1].get("tool_calls"):
            raise RequestError("messages: a tool_use of the last turn has no tool_result", "messages")
        fields["continue_final_message"] = True
    if tools:
        fields["tools"] = [_function(tool) for tool in tools.values()]
    if body.tool_choice is not None:
        fields |= _choice(_TOOL_CHOICE.checked(body.tool_choice, "tool_choice"))
    variables = dict(body.chat_template_kwargs)
    if body.thinking is not None:
        thinking = _THINKING.checked(body.thinking, "thinking")
        answers = state.llm.inputs.answers
        switch = answers.efforts.switch if answers is not None else None
        variables[switch or "enable_thinking"] = not isinstance(thinking, ThinkingDisabled)
        if isinstance(thinking, ThinkingEnabled):
            fields["thinking_token_budget"] = _budget(thinking, body)
    config: OutputConfig = _OUTPUT_CONFIG.checked(body.output_config or {}, "output_config")
    fields["reasoning_effort"] = config.effort
    if config.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": config.format.schema}}
    if variables:
        fields["chat_template_kwargs"] = variables
    if isinstance(body, MessagesBody):
        fields |= body.sampling | {"stop": body.stop_sequences or None, "cache_salt": body.cache_salt}
        fields["priority"] = body.priority
    return ChatRequest({name: value for name, value in fields.items() if value is not None}, list(tools))


def _tools(given: Any, settings: ServerSettings) -> dict[str, Tool]:
    """The tools that the client runs, by their places."""
    skipped, kept = SkippedTools(settings), {}
    for index, tool in enumerate(OBJECTS.checked([] if given is None else given, "tools")):
        place = f"tools[{index}]"
        if tool.get("type", "custom") in ("custom", None):
            kept[place] = _TOOL.checked(tool, place)
            check_callers(kept[place].allowed_callers, place)
        else:
            skipped.add(tool, place)
    skipped.log()
    return kept


def _budget(thinking: ThinkingEnabled, body: CountTokensBody) -> int | None:
    """None: max_tokens ends the answer before the budget does."""
    most = body.max_tokens if isinstance(body, MessagesBody) else 0
    return thinking.budget_tokens if thinking.budget_tokens < most else None


class _Conversation:
    """Reads the turns of a request."""

    def __init__(self, turns: Turns, tools: Mapping[str, Tool]) -> None:
        self._turns = turns
        self._tools = tools

    def read(self, body: CountTokensBody, keep_client_headers: bool) -> list[dict[str, Any]]:
        """The messages of the chat."""
        system = _texts(_SYSTEM.checked(body.system, "system"))
        if not keep_client_headers and system and system[0].startswith(_CLIENT_HEADER):
            # It changes with every request, and no prefix would be found in the cache.
            system[0] = system[0].partition("\n")[2]
        if system := [text for text in system if text]:
            self._turns.instruct(system)
        given: list[Turn] = _TURNS.checked(body.messages, "messages")
        if not given:
            raise RequestError("messages must have at least one message", "messages")
        for index, turn in enumerate(given):
            if isinstance(turn, SystemTurn):
                self._turns.instruct(_texts(turn.content))
                continue
            role = "user" if isinstance(turn, UserTurn) else "assistant"
            if isinstance(turn.content, str):
                self._turns.say(role, [turn.content])
                continue
            for place, block in enumerate(turn.content):
                self._add(role, block, f"messages[{index}].content[{place}]")
        return self._turns.messages

    def _add(self, role: str, block: Text | Image | ToolUse | ToolResult | Thinking | RedactedThinking, where: str) -> None:
        turns = self._turns
        match block:
            case Text():
                turns.say(role, [block.text])
            case Image():
                turns.say(role, [_image(block, where)])
            case ToolUse():
                turns.call(block.id, block.name, json_text(block.input))
            case Thinking():
                turns.think(block.thinking)
            case ToolResult():
                given = [block.content or ""] if not isinstance(block.content, list) else block.content
                parts = [self._content(part, f"{where}.content[{index}]") for index, part in enumerate(given)]
                if block.is_error:
                    parts = [f"Error: {parts[0]}", *parts[1:]] if parts and isinstance(parts[0], str) else ["Error: ", *parts]
                turns.result(block.tool_use_id, parts, f"{where}.tool_use_id")
            case RedactedThinking():
                pass  # Only its author can read it.

    def _content(self, part: str | Text | Image | ToolReference, where: str) -> ContentPart:
        if isinstance(part, Image):
            return _image(part, where)
        if isinstance(part, ToolReference):
            if (tool := self._tools.get(part.tool_name)) is None:
                path = f"{where}.tool_name"
                raise RequestError(f"{path} {shown(part.tool_name)} is none of the tools that the request offers", path)
            return json_text(_function(tool)["function"])
        return part if isinstance(part, str) else part.text


def _image(block: Image, where: str) -> ContentPart:
    source = block.source
    url = source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"
    return image_part(url, f"{where}.source")


def _texts(content: str | list[Text] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [block.text for block in content]


def _function(tool: Tool) -> dict[str, Any]:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = parameters | {"examples": tool.input_examples}
    return function_tool(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice.name belongs to the type tool, which needs it", "tool_choice.name")
    named = function_tool(name=choice.name)
    fields: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


class MessagesAnswer(Answer):
    """Shapes deltas as a message or its events."""

    ping = named_event({"type": "ping"})

    def __init__(self, body: MessagesBody, state: Serving, generation: Generation, message_id: str) -> None:
        self._generation = generation
        self._secret = state.secret
        self._streams = body.stream
        # The context ends the answer before max_tokens does.
        self._clipped = generation.requests[0].max_tokens < body.max_tokens
        self._parts = Parts()
        self._started = False
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": state.model.called(body.model)}

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if not self._started:
            self._started = True
            if self._streams:
                yield {"type": "message_start", "message": self._message([], None, {**self._usage, "output_tokens": 1})}
                yield {"type": "ping"}
        yield from self._shaped(self._parts.add(piece.delta))

    def _shaped(self, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
        for what, part, text in steps:
            if not self._streams:
                continue
            place = {"index": part.index}
            if what == "start":
                empty = Part(index=part.index, kind=part.kind, id=part.id, name=part.name)
                block = self._block(empty) | ({"signature": ""} if part.kind == "reasoning" else {})
                yield {"type": "content_block_start", **place, "content_block": block}
            elif what == "gain":
                kind, field = _DELTAS[part.kind]
                yield {"type": "content_block_delta", **place, "delta": {"type": kind, field: text}}
            else:
                if part.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": self._signature(part.text)}
                    yield {"type": "content_block_delta", **place, "delta": signature}
                yield {"type": "content_block_stop", **place}

    def last(self) -> Sequence[dict[str, Any]]:
        return [{"type": "message_delta", "delta": self._stop, "usage": self._usage}, {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        return self._message([self._block(part) for part in self._parts.all], self._stop, self._usage)

    def failed(self, error: ApiError) -> bytes:
        return named_event(error.messages_body(None))

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any] | None, usage: dict[str, Any]) -> dict[str, Any]:
        stop = stop or {"stop_reason": None, "stop_sequence": None}
        return {**self._head, "content": content, **stop, "usage": usage}

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": self._signature(part.text)}
        if part.kind == "content":
            return {"type": "text", "text": part.text}
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": partial_object(part.text)}

    def _signature(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()

    @property
    def _stop(self) -> dict[str, Any]:
        finish, sequence = self._parts.finish, None
        if finish is None or self._parts.cut:
            reason = "model_context_window_exceeded" if self._clipped else "max_tokens"
        elif self._parts.has_call:
            reason = "tool_use"
        elif isinstance(finish.stop_reason, str):
            reason, sequence = "stop_sequence", finish.stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def _usage(self) -> dict[str, Any]:
        usage, stored = self._generation.usage, self._generation.stored_tokens
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached - stored,
            "cache_creation_input_tokens": stored,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
