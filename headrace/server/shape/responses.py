"""OpenAI's Responses: from a request to a chat's fields, and from deltas to a response and its events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.constrain.parameters import CUSTOM_INPUT
from headrace.errors import RequestError, unsupported
from headrace.server.body import Caller, num_values
from headrace.server.errors import ApiError, shown
from headrace.server.fields import applied_fields
from headrace.server.generation import Generation, Piece
from headrace.server.logprobs import chat_logprobs
from headrace.server.schema import ResponsesBody
from headrace.server.shape.items import (
    AdditionalTools,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputText,
    Item,
    ItemReference,
    JSONObject,
    JSONSchema,
    Message,
    OutputText,
    Reasoning,
    ReasoningConfig,
    Refusal,
    TextConfig,
    TextFormat,
)
from headrace.server.shape.parts import Part, PartialText, Parts, Step
from headrace.server.shape.seal import sealed, unsealed
from headrace.server.shape.toolset import Toolset, shown_name
from headrace.server.shape.turns import OBJECTS, ContentPart, Kind, Turns, image_part, json_text, whole_arguments
from headrace.server.sse import Answer
from headrace.server.state import Serving
from headrace.server.store import Stored, StoredItem
from headrace.text.transcript import Transcript

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "structured_outputs": "text.format",
    "structured_outputs.json": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice": "tool_choice",
    "tools": "tools",
}
"""Field of a chat request -> the field of a Responses request that sets it."""
NO_COMPACTION = (
    "this server compacts no conversations for its clients. Codex asks for it where the provider's name is OpenAI: with "
    "another name in its configuration, it compacts by itself"
)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_DECODER: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)
_ITEM, _ITEM_REFERENCE, _TEXT, _REASONING = map(Kind, (Item, ItemReference, TextConfig, ReasoningConfig))
_Given = dict[str, Any] | StoredItem
"""An item of the input, or the stored one that it refers to."""


class Conversation(NamedTuple):
    """A request, read."""

    chat: dict[str, Any]
    """The fields of a chat request."""
    tools: Toolset
    earlier: tuple[StoredItem, ...]
    """Items of the response that the request continues."""
    input_items: tuple[StoredItem, ...]
    """Items of this request, each with an id."""
    transcript: Transcript | None
    """Transcript of the response that the request continues."""


async def conversation(body: ResponsesBody, state: Serving, caller: Caller, late: bool) -> Conversation:
    """Reads a request, in a thread: what it refers to may be large. ``late``: as ``late_system`` says.

    Raises:
        ApiError, RequestError: 4xx, naming the place at fault.
    """
    given = body.input if isinstance(body.input, list) else []
    names = [item["id"] for item in given if isinstance(item, dict) and isinstance(item.get("id"), str)]
    known = {name: found for name in names if (found := state.responses.item(caller.tenant, name)) is not None}
    before = _earlier(body, state, caller.tenant)
    return await state.llm.inputs.in_thread(caller.turn, lambda: _read(body, state, known, before, late))


def _read(
    body: ResponsesBody, state: Serving, known: Mapping[str, StoredItem], before: Stored | None, late: bool
) -> Conversation:
    given = _given_items(body.input, known)
    earlier = before.items if before is not None else ()
    referenced = [item for item in given if isinstance(item, StoredItem)]
    _check_size([*earlier, *referenced], state, "input" if before is None else "previous_response_id")
    keeps = state.responses.on and body.store is not False
    turns, tools, own = Turns(late), Toolset(state.settings), []
    tools.add(body.tools, "tools")
    if body.instructions is not None:
        turns.instruct([body.instructions])
    for stored in earlier:
        _add(turns, tools, _DECODER.decode(stored.text), state, "previous_response_id")
    for index, new in enumerate(given):
        where = f"input[{index}]"
        read: Item = _DECODER.decode(new.text) if isinstance(new, StoredItem) else _ITEM.checked(new, where)
        _add(turns, tools, read, state, where)
        if keeps:
            own.append(new if isinstance(new, StoredItem) else StoredItem.of({"id": new_id(new["type"]), **new}))
    if not earlier and not given:
        # Agents probe a model so.
        turns.say("user", [""])
    tools.skipped.log()
    text: TextConfig = _TEXT.checked(body.text or {}, "text")
    if text.verbosity is not None:
        applied_fields("chat", {"verbosity": text.verbosity})
    fields: dict[str, Any] = {
        **body.sampling,
        "model": body.model,
        "messages": turns.messages,
        "max_tokens": body.max_output_tokens,
        "tools": tools.functions or None,
        "tool_choice": tools.choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": _REASONING.checked(body.reasoning or {}, "reasoning").effort,
        "response_format": _response_format(text.format),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "chat_template_kwargs": body.chat_template_kwargs or None,
    }
    if LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise RequestError(f"top_logprobs needs include: {LOGPROBS}", "top_logprobs")
    return Conversation(
        {name: value for name, value in fields.items() if value is not None},
        tools,
        earlier,
        tuple(own),
        before.transcript if before is not None else None,
    )


def _given_items(given: Any, known: Mapping[str, StoredItem]) -> list[_Given]:
    """The input as items of the types that they may leave out, and those of the store that it refers to."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: list[_Given] = []
    for index, item in enumerate(OBJECTS.checked(given, "input")):
        item = {name: value for name, value in item.items() if value is not None}
        kind = item.setdefault("type", "message" if "role" in item else "item_reference")
        if kind in ("compaction_trigger", "compaction"):
            raise unsupported(f"input[{index}].type", f"input[{index}].type: {NO_COMPACTION}")
        if kind == "item_reference":
            identity = _ITEM_REFERENCE.checked(item, f"input[{index}]").id
            if identity not in known:
                message = f"input[{index}].id: there is no item {shown(identity)}"
                raise ApiError(404, message, param=f"input[{index}].id", code="item_not_found")
            items.append(known[identity])
            continue
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
        items.append(item)
    return items


def _earlier(body: ResponsesBody, state: Serving, tenant: str) -> Stored | None:
    identity = body.previous_response_id
    if identity is None:
        return None
    entry = state.responses.get(tenant, identity)
    if entry is None:
        message = f"previous_response_id: there is no response {shown(identity)}; it was not stored, or is forgotten"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return entry


def _check_size(stored: Sequence[StoredItem], state: Serving, param: str) -> None:
    """Bounds what a request refers to as if it were in its body: a reference takes 60 bytes, and an item any number.

    Raises:
        ApiError: 413.
    """
    size, most = sum(len(item.text) for item in stored), state.settings.max_body_bytes
    if size > most:
        message = f"{param}: the stored items that the request refers to have {size} bytes, above {most} (max_body_bytes)"
        raise ApiError(413, message, param=param, code="body_too_large")
    if sum(num_values(item.text) for item in stored) > state.max_json_values:
        message = f"{param}: the stored items that the request refers to have more than {state.max_json_values} JSON values"
        raise ApiError(413, f"{message} (max_json_values)", param=param, code="too_many_values")


def _add(turns: Turns, tools: Toolset, item: Item, state: Serving, where: str) -> None:
    match item:
        case AdditionalTools():
            tools.add(item.tools, f"{where}.tools")
        case Message():
            content = _content(item.content, f"{where}.content")
            if item.role in ("system", "developer"):
                turns.instruct(content)
            else:
                turns.say(item.role, content)
        case FunctionCall():
            arguments = whole_arguments(item.arguments, f"{where}.arguments")
            turns.call(item.call_id, shown_name(item.namespace, item.name), arguments)
        case CustomToolCall():
            turns.call(item.call_id, shown_name(item.namespace, item.name), json_text({CUSTOM_INPUT: item.input}))
        case FunctionCallOutput() | CustomToolCallOutput():
            turns.result(item.call_id, _content(item.output, f"{where}.output"), f"{where}.call_id")
        case Reasoning():
            if item.content:
                turns.think("".join(part.text for part in item.content))
            elif item.encrypted_content is not None:
                turns.think(unsealed(item.encrypted_content, state.secret))


def _content(
    content: str | Sequence[InputText | InputImage | OutputText] | Sequence[InputText | InputImage | OutputText | Refusal],
    where: str,
) -> list[ContentPart]:
    if isinstance(content, str):
        return [content]
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: InputText | InputImage | OutputText | Refusal, where: str) -> ContentPart:
    if isinstance(part, InputImage):
        return image_part(part.image_url, where)
    return part.refusal if isinstance(part, Refusal) else part.text


def _response_format(given: TextFormat | JSONObject | JSONSchema | None) -> dict[str, Any] | None:
    if isinstance(given, JSONObject):
        return {"type": "json_object"}
    if isinstance(given, JSONSchema):
        return {"type": "json_schema", "json_schema": msgspec.structs.asdict(given)}
    return None


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def new_id(kind: str) -> str:
    return f"{_PREFIX.get(kind, 'item')}_{uuid.uuid4().hex}"


_TEXTS = {
    "reasoning": ("reasoning_text", "text"),
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Type of an item -> what the events of its text are called, and the field that has it at the end."""


class _OutputItem:
    """One part as an item."""

    def __init__(self, part: Part, custom: bool) -> None:
        self.part = part
        self.custom = custom
        self.kind = {"reasoning": "reasoning", "content": "message", "call": "function_call"}[part.kind]
        if custom:
            self.kind = "custom_tool_call"
        self.events, self.field = _TEXTS[self.kind]
        self.id = new_id(self.kind)
        self.place = {"item_id": self.id, "output_index": part.index} | ({} if part.kind == "call" else {"content_index": 0})
        """Fields that place the item, in the events of its text."""
        self.logprobs: list[Any] = []
        self.input = PartialText(CUSTOM_INPUT)
        """Input of a custom tool's call."""
        self.status = "in_progress"

    @property
    def text(self) -> str:
        return self.input.text if self.custom else self.part.text


class ResponsesAnswer(Answer):
    """Shapes deltas as a response or its events."""

    def __init__(
        self,
        body: ResponsesBody,
        state: Serving,
        generation: Generation,
        response_id: str,
        read: Conversation,
        keep: Callable[[dict[str, Any], list[int]], None] | None,
    ) -> None:
        """``keep``: gets the finished response and its tokens, to be stored."""
        self._generation = generation
        self._read = read
        self._keep = keep
        self._streams = body.stream
        self._texts = state.model.texts
        self._top_logprobs = (body.top_logprobs or 0) if LOGPROBS in body.include else None
        self._secret = state.secret if ENCRYPTED in body.include else None
        self._parts = Parts()
        self._items: list[_OutputItem] = []
        self._token_ids: list[int] = []
        self._pending: list[Any] = []
        """Logprobs of tokens whose text is still to come."""
        self._sequence = 0
        self._head = _head(body, state, generation, response_id, read, keep is not None)

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        delta = piece.delta
        self._token_ids += delta.token_ids
        if not self._sequence and self._streams:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        if self._top_logprobs is not None and delta.logprobs:
            self._pending += chat_logprobs(self._texts, delta.logprobs, self._top_logprobs)["content"]
        yield from self._shaped(self._parts.add(delta))
        if any(event.kind != "content" for event in delta.events[-1:]):
            self._pending.clear()

    def _shaped(self, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
        for what, part, text in steps:
            if what == "start":
                self._items.append(_OutputItem(part, part.kind == "call" and part.name in self._read.tools.custom))
            item = self._items[part.index]
            logprobs, self._pending = (self._pending, []) if what == "gain" else ([], self._pending)
            if part.kind == "content":
                item.logprobs += logprobs
            if what == "end":
                item.status = self._ended(part)
            if item.custom:
                text = item.input.add(text) if what == "gain" else item.input.finish(part.text)
            if self._streams:
                yield from _EVENTS[what](self, item, text, logprobs)

    def _ended(self, part: Part) -> str:
        """The status of a part that has ended: the last one may have been cut off."""
        return "incomplete" if self._parts.cut or (part.kind == "call" and not part.ended) else "completed"

    def _started(self, item: _OutputItem, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        shape = self._shape(item, empty=True)
        yield self._event("response.output_item.added", output_index=item.part.index, item=shape)
        if item.part.kind != "call":
            yield self._event("response.content_part.added", **item.place, part=self._content(item, ""))

    def _gained(self, item: _OutputItem, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        if text:
            more = {"logprobs": logprobs} if item.kind == "message" else {}
            yield self._event(f"response.{item.events}.delta", **item.place, delta=text, **more)

    def _done(self, item: _OutputItem, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        yield from self._gained(item, text, logprobs)
        fields: dict[str, Any] = {item.field: item.text}
        if item.kind == "message":
            fields["logprobs"] = item.logprobs
        elif item.kind == "function_call":
            fields["name"] = self._read.tools.called(item.part.name)["name"]
        yield self._event(f"response.{item.events}.done", **item.place, **fields)
        if item.part.kind != "call":
            yield self._event("response.content_part.done", **item.place, part=self._content(item, item.text))
        yield self._event("response.output_item.done", output_index=item.part.index, item=self._shape(item))

    def last(self) -> Sequence[dict[str, Any]]:
        response = self.whole()
        return [self._event(f"response.{response['status']}", response=response)]

    def whole(self) -> dict[str, Any]:
        response = self._response("incomplete" if self._parts.cut else "completed")
        if self._keep is not None:
            self._keep(response, self._token_ids)
        return response

    def failed(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else (error.code or error.kind)
        failed = self._event("error", code=code, message=error.message, param=error.param)
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self.encode(failed) + self.encode(self._event("response.failed", response=response))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _response(self, status: str) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._shape(item) for item in self._items],
            "usage": self._usage() if ended else None,
        }

    def _shape(self, item: _OutputItem, *, empty: bool = False) -> dict[str, Any]:
        part = item.part
        head = {"id": item.id, "type": item.kind}
        if not item.custom:
            head["status"] = item.status
        if part.kind == "call":
            called = self._read.tools.called(part.name)
            return {**head, "call_id": part.id, **called, item.field: "" if empty else item.text}
        content = [] if empty else [self._content(item, part.text)]
        if part.kind == "content":
            return {**head, "role": "assistant", "content": content}
        seal = None if empty or self._secret is None else sealed(part.text, self._secret)
        return {**head, "summary": [], "content": content, "encrypted_content": seal}

    def _content(self, item: _OutputItem, text: str) -> dict[str, Any]:
        if item.part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(item.logprobs) if text else []}

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                **usage["prompt_tokens_details"],
                "cache_write_tokens": self._generation.stored_tokens,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


_EVENTS = {"start": ResponsesAnswer._started, "gain": ResponsesAnswer._gained, "end": ResponsesAnswer._done}


def _head(
    body: ResponsesBody, state: Serving, generation: Generation, response_id: str, read: Conversation, stored: bool
) -> dict[str, Any]:
    """Returns the fields of a response that repeat its request."""
    sampling = generation.requests[0].sampling
    types = dict.fromkeys(read.tools.skipped.types)
    added = {"skipped_tools": ", ".join(types)[:512]} if types else {}
    answers = state.llm.inputs.answers
    if read.tools.functions and answers is not None and answers.spells_tools:
        added["tool_call_format"] = "generic"
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": {**body.metadata, **added},
        "model": state.model.called(body.model),
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": read.tools.kept,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
