"""Ollama's API: from a request to the fields of a chat or a completion, and from deltas to an answer and its lines."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.errors import RequestError, did_you_mean, unknown, unsupported
from headrace.options import is_one_of, options, shown
from headrace.server.errors import ApiError
from headrace.server.generation import Generation, Piece
from headrace.server.logprobs import chat_logprobs
from headrace.server.schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from headrace.server.shape.parts import Part, Parts
from headrace.server.shape.turns import ContentPart, Kind, Strict, Turns, image_part, json_text, partial_object
from headrace.server.sse import Answer
from headrace.server.state import Serving

_encode = msgspec.json.Encoder().encode
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Option of a request -> sampling parameter."""
_AT_START = "it is decided when the server starts"
REFUSED: Mapping[str, tuple[str, list[Any]]] = {
    "typical_p": ("there is no such filter", [1, 1.0]),
    "tfs_z": ("there is no such filter", [1, 1.0]),
    "mirostat": ("there is no such sampler", [0]),
    "mirostat_tau": ("there is no such sampler", []),
    "mirostat_eta": ("there is no such sampler", []),
    "penalize_newline": ("newlines are penalised like other tokens", [True]),
    "num_keep": ("no part of a conversation is dropped: an answer ends where the context is full", []),
    **dict.fromkeys(
        ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "vocab_only", "logits_all"),
        (_AT_START, []),
    ),
    "use_mmap": (_AT_START, []),
    "use_mlock": (_AT_START, []),
}
"""Option that is not served -> the reason, and the values that ask for nothing."""
_REFUSED_FIELDS = ("truncate", "shift", "context", "template")
OPTIONS: Mapping[str, str] = {
    **{option: f"sampling parameter `{parameter}`" for option, parameter in SAMPLING.items()},
    "seed": "sampling parameter `seed`; -1: a random one",
    "num_predict": "most tokens to generate, fewer where the context ends before; -1 and -2: no limit",
    "num_ctx": "context that the client expects; refused above that of the server (`--max-model-len`)",
    "repeat_last_n": "refused with a `repeat_penalty` unless it is -1: penalties look at the whole context",
}
"""Option that is served -> its meaning."""
NAMES = {
    **{parameter: f"options.{option}" for option, parameter in SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "response_format.json_schema": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs.enable_thinking": "think",
}
"""Field of a chat request -> the field of an Ollama request that sets it."""
_DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+(\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAGIC = {"iVBOR": "png", "/9j/": "jpeg", "R0lG": "gif", "UklG": "webp", "Qk": "bmp"}
"""Beginnings of pictures in base64."""


class _Function(Strict, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class _Call(Strict, kw_only=True):
    function: _Function
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(Strict, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


_OBJECT, _INTEGER, _THINK, _MESSAGES = map(Kind, (dict[str, Any], int, bool | str | None, list[_Message]))


def is_load(body: OllamaChatBody | OllamaGenerateBody) -> bool:
    """Whether the request has no prompt, and so is about the model being loaded.

    Raises:
        RequestError: a field asks for what is not served.
    """
    for name in _REFUSED_FIELDS:
        if getattr(body, name, None):
            rule = options(type(body))[name].help.rstrip(".")  # May only be so.
            raise unsupported(name, f"{name} {rule[0].lower()}{rule[1:]}")
    return not body.messages if isinstance(body, OllamaChatBody) else not (body.prompt or body.suffix or body.images)


def duration(keep_alive: Any) -> float | None:
    """keep_alive in seconds; infinity where it is negative. None: it is not given.

    Raises:
        RequestError: it is not a duration.
    """
    if keep_alive is None:
        return None
    text = str(keep_alive)
    if isinstance(keep_alive, bool) or not _DURATION.fullmatch(text):
        message = f"keep_alive must be a duration such as 5m or a number of seconds, not {shown(keep_alive)}"
        raise RequestError(message, "keep_alive")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    return math.inf if text.startswith("-") and seconds else seconds


def nothing_generated(model: str, reason: Literal["load", "unload"], *, chat: bool) -> dict[str, Any]:
    """The answer to a request without a prompt."""
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": model, "created_at": now()} | said | {"done": True, "done_reason": reason}


def _given(value: Any) -> dict[str, Any]:
    """The options that are set."""
    found: dict[str, Any] = _OBJECT.checked({} if value is None else value, "options")
    return {name: option for name, option in found.items() if option is not None}


def check_context(value: Any, state: Serving) -> None:
    """Checks the options of a request that samples nothing.

    Raises:
        RequestError: there are others than num_ctx, or the server's context is shorter than the client expects.
    """
    given = _given(value)
    if (other := next((name for name in given if name != "num_ctx"), None)) is not None:
        raise unsupported(f"options.{other}", f"options.{shown(other)[1:-1]} is not supported: nothing is sampled")
    _check_context(given, state)


def _check_context(given: Mapping[str, Any], state: Serving) -> None:
    most = state.model.max_model_len
    if (context := given.get("num_ctx")) is not None and _INTEGER.checked(context, "options.num_ctx") > most:
        message = f"options.num_ctx {context} is above the context of {most} tokens that the server has (--max-model-len)"
        raise RequestError(message, "options.num_ctx")


def common_fields(body: OllamaBody, state: Serving) -> tuple[dict[str, Any], int | None]:
    """The fields of a chat or a completion that sample, and the most tokens to generate.

    Raises:
        RequestError: names the field at fault.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    given = _given(body.options)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in SAMPLING:
            fields[SAMPLING[name]] = value
        elif name in REFUSED:
            why, passing = REFUSED[name]
            if not is_one_of(value, passing):
                may = f" (it may be left out, or be {passing[0]})" if passing else ""
                raise unsupported(f"options.{name}", f"options.{name} is not supported: {why}{may}")
        elif name not in OPTIONS:
            raise unknown(f"options.{shown(name)[1:-1]}", did_you_mean(name, (*OPTIONS, *REFUSED)))
    if fields.get("seed") == -1:
        del fields["seed"]  # A random one.
    _check_context(given, state)
    if given.get("repeat_penalty", 1) != 1 and given.get("repeat_last_n", -1) != -1:
        message = "options.repeat_last_n is not supported: penalties look at the whole context (it may be left out, or be -1)"
        raise unsupported("options.repeat_last_n", message)
    limit = _INTEGER.checked(given.get("num_predict", -1), "options.num_predict")
    if limit < -2 or limit == 0:
        raise RequestError(f"options.num_predict must be at least 1, -1 or -2 (no limit), not {limit}", "options.num_predict")
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format not in (None, ""):
        schema = _OBJECT.checked(body.format, "format")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return fields, limit if limit > 0 else None


def thinking_fields(body: OllamaBody, state: Serving) -> dict[str, Any]:
    """The fields of a chat that ``think`` sets.

    Raises:
        RequestError: the model does not reason, or not in this way.
    """
    think = _THINK.checked(body.think, "think")
    answers = state.llm.inputs.answers
    if think is None or think == "":
        return {}
    if think is not False and not (answers is not None and answers.reasons):
        raise unsupported("think", "think is not supported: this model does not reason (it may be left out, or be false)")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    switch = answers.efforts.switch if answers is not None else None
    return {"chat_template_kwargs": {switch or "enable_thinking": think}}


def chat_messages(body: OllamaChatBody | OllamaGenerateBody, late_system: bool) -> list[dict[str, Any]]:
    """The messages of a chat request.

    Raises:
        RequestError: names the part at fault.
    """
    turns = Turns(late_system)
    if isinstance(body, OllamaGenerateBody):
        if body.system:
            turns.instruct([body.system])
        turns.say("user", [*_images(body.images, "images"), body.prompt])
        return turns.messages
    conversation = _Conversation(turns)
    for index, message in enumerate(_MESSAGES.checked(body.messages, "messages")):
        conversation.add(message, f"messages[{index}]")
    return turns.messages


class _Conversation:
    """Gives each tool's call an id, and each result that of its call: Ollama's have none, or names alone."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._count = 0
        self._open: list[tuple[str, str]] = []
        """Id and name of each call without a result."""

    def add(self, message: _Message, where: str) -> None:
        turns, content = self._turns, message.content or ""
        if message.role != "user" and message.images:
            raise unsupported(f"{where}.images", f"{where}.images: pictures belong to messages of the user")
        match message.role:
            case "system":
                turns.instruct([content])
            case "user":
                turns.say("user", [*_images(message.images or [], f"{where}.images"), content])
            case "assistant":
                turns.say("assistant", [content] if content else [])
                if message.thinking:
                    turns.think(message.thinking)
                for call in message.tool_calls or []:
                    self._count += 1
                    identity = call.id or f"call_{self._count}"
                    self._open.append((identity, call.function.name))
                    turns.call(identity, call.function.name, json_text(call.function.arguments))
            case "tool":
                turns.result(self._call(message, where), [content], f"{where}.tool_call_id")

    def _call(self, message: _Message, where: str) -> str:
        """The id of the call whose result a message is: the one it names, or the first without a result."""
        wanted, name = message.tool_call_id, message.tool_name
        meant = [one for one in self._open if wanted in (None, one[0]) and (wanted is not None or name in (None, one[1]))]
        if not meant:
            what = f" of {shown(wanted or name)}" if wanted or name else ""
            raise RequestError(f"{where} is the result of no call before it{what}", where)
        self._open.remove(meant[0])
        return meant[0][0]


def _images(images: Sequence[str], where: str) -> list[ContentPart]:
    def url(data: str) -> str:
        kind = next((kind for begin, kind in _MAGIC.items() if data.startswith(begin)), "png")
        return f"data:image/{kind};base64,{data}"

    return [image_part(url(data), f"{where}[{index}]") for index, data in enumerate(images)]


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(Answer):
    """Shapes deltas as an answer of /api/chat or /api/generate, or its lines."""

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaBody, state: Serving, generation: Generation) -> None:
        self._generation = generation
        self._chat = isinstance(body, OllamaChatBody)
        self._streams = body.stream
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._texts = state.model.texts
        self._logprobs: list[Any] = []
        self._parts = Parts()
        self._model = body.model

    def encode(self, event: dict[str, Any]) -> bytes:
        return _encode(event) + b"\n"

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        logprobs = self._taken(piece)
        shapes = []
        for what, part, text in self._parts.add(piece.delta):
            if part.kind != "call" and what == "gain":
                shapes.append(self._text(text) if part.kind == "content" else self._text(reasoning=text))
            elif part.kind == "call" and what == "end" and part.ended:
                shapes.append(self._text(calls=[part]))
        if not self._streams:
            self._logprobs += logprobs.get("logprobs", ())
            return
        if logprobs and not shapes:
            shapes = [self._text()]
        for place, shape in enumerate(shapes):
            # All of the delta's tokens go with its first part.
            yield self._head | shape | ({} if place else logprobs) | {"done": False}

    def last(self) -> Sequence[dict[str, Any]]:
        return [self._head | self._text() | self._end]

    def whole(self) -> dict[str, Any]:
        content, reasoning = (
            "".join(part.text for part in self._parts.all if part.kind == kind) for kind in ("content", "reasoning")
        )
        calls = [part for part in self._parts.all if part.kind == "call" and part.ended]
        logprobs = {"logprobs": self._logprobs} if self._top is not None else {}
        return self._head | self._text(content, reasoning, calls) | logprobs | self._end

    def failed(self, error: ApiError) -> bytes:
        return self.encode(error.ollama_body)

    @property
    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _text(self, content: str = "", reasoning: str = "", calls: Sequence[Part] = ()) -> dict[str, Any]:
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._chat:
            return {"response": content, **thinking}
        message: dict[str, Any] = {"role": "assistant", "content": content, **thinking}
        if calls:
            places = [part for part in self._parts.all if part.kind == "call"]
            message["tool_calls"] = [_call(part, places.index(part)) for part in calls]
        return {"message": message}

    def _taken(self, piece: Piece) -> dict[str, list[Any]]:
        if self._top is None or piece.delta.logprobs is None:
            return {}
        return {"logprobs": chat_logprobs(self._texts, piece.delta.logprobs, self._top)["content"]}

    @property
    def _end(self) -> dict[str, Any]:
        usage, timing = self._generation.usage, self._generation.timing or {}
        wait, first, rest = (
            int(1e6 * (timing.get(name) or 0.0)) for name in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
        )
        return {
            "done": True,
            "done_reason": "length" if self._parts.cut else "stop",
            "total_duration": wait + first + rest,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first,
            "eval_count": usage["completion_tokens"],
            "eval_duration": rest,
        }


def _call(part: Part, index: int) -> dict[str, Any]:
    return {"id": part.id, "function": {"index": index, "name": part.name, "arguments": partial_object(part.text)}}
