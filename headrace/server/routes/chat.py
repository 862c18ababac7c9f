"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import APIRouter

from headrace.constrain.compose import TextGrammar
from headrace.outputs import Event, Message, OutputDelta
from headrace.server.answers import Begun, answers
from headrace.server.body import Caller
from headrace.server.generation import Generation, Piece, named
from headrace.server.logprobs import IDS, JSONArray, chat_logprobs, prompt_logprobs
from headrace.server.prompts import RenderedChat, check_prompt_logprobs, render_messages
from headrace.server.sampling import chat_names, chat_params, thinking_budget
from headrace.server.schema import ChatBody
from headrace.server.shape.parts import events_of
from headrace.server.sse import ChunkAnswer
from headrace.server.state import Serving
from headrace.server.tools import Tools, names_function, offered, parallel_calls
from headrace.text.transcript import Transcript

router = APIRouter()


@answers(router, "/v1/chat/completions", "chatcmpl-", ChatBody, "chat")
async def chat_completions(state: Serving, body: ChatBody, request_id: str, caller: Caller) -> Begun:
    """Answers a conversation."""
    generation = await chat_generation(state, body, request_id, caller)
    return generation, ChatAnswer(body, state, generation, request_id)


async def chat_generation(
    state: Serving,
    body: ChatBody,
    request_id: str,
    caller: Caller,
    *,
    room: int | None = None,
    grammars: Mapping[str, TextGrammar] = MappingProxyType({}),
    transcript: Transcript | None = None,
) -> Generation:
    """The generation of a conversation.

    Args:
        room: most tokens to generate, fewer where the context ends before.
        grammars: of tools whose calls have a text, by name.
        transcript: of earlier turns.

    Raises:
        ApiError, RequestError: 4xx, naming the field of the chat request.
    """
    adapter = state.adapter(body.model, body.lora_name)
    with named(chat_names(body)):
        params = await state.llm.inputs.in_thread(caller.turn, lambda: chat_params(body, state))
        answers = state.llm.inputs.answers

        def read() -> tuple[Tools, RenderedChat]:
            tools = offered(body, answers, state.settings, grammars)
            return tools, render_messages(state, body, tools.schemas)._replace(transcript=transcript)

        tools, rendered = await state.llm.inputs.in_thread(caller.turn, read)
        prompt = rendered.text
        parse = answers and answers.options(
            prompt,
            tools.schemas,
            calls=tools.calls,
            separate_reasoning=body.separate_reasoning,
            parallel=parallel_calls(body),
            stop_in_reasoning=body.stop_in_reasoning,
        )
        plan = state.llm.inputs.answer_plan(prompt, params, tools.rules, budget=thinking_budget(body))
        find = state.features.finder(caller.tenant) if caller.uploads else None
        async with rendered.prompt(state, caller, find, add_special_tokens=body.add_special_tokens) as full:
            engine_request = await state.llm.inputs.request_async(
                full,
                params,
                parse=parse,
                plan=plan,
                add_special_tokens=body.add_special_tokens,
                request_id=request_id,
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=adapter,
                tenant=caller.tenant,
                turn=caller.turn,
            )
    check_prompt_logprobs(state, [engine_request], copies=1)
    if room is not None:
        engine_request = msgspec.structs.replace(engine_request, max_tokens=min(engine_request.max_tokens, room))
    return Generation(state, [engine_request], keeps_aborted=state.settings.enable_rl_api)


class ChatAnswer(ChunkAnswer):
    """Shapes deltas as OpenAI's ``chat.completion`` or its chunks."""

    def __init__(self, body: ChatBody, state: Serving, generation: Generation, request_id: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, state.model, generation, request_id, kind)
        self._body = body
        field = state.settings.reasoning_field
        self._reasoning = ("reasoning_content", "reasoning") if field == "both" else (field,)
        """Fields that have the reasoning."""
        self._choices = [_ChatChoice(index, body) for index in range(generation.num_choices)]
        self._texts = ("content", "reasoning") if body.include_reasoning else ("content",)
        """Kinds of events that are nothing but a text."""
        self._names = IDS if body.return_tokens_as_token_ids else state.model.texts
        self._prompt_logprobs: dict[str, Any] = {}
        self._prompt_token_ids: dict[str, Any] = {}
        if body.return_token_ids:
            self._prompt_token_ids["prompt_token_ids"] = generation.requests[0].prompt_token_ids

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not self._body.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(self._names, delta.logprobs, self._body.top_logprobs or 0)

    async def prepare(self, piece: Piece) -> None:
        entries = piece.delta.prompt_logprobs
        if entries is not None and "prompt_logprobs" in self._body.sampling:
            shaped = await self._generation.in_thread(lambda: prompt_logprobs(self._model.texts, entries).json)
            self._prompt_logprobs = {"prompt_logprobs": shaped}

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Chunks: the role of each choice with its first delta, then text, then its finish."""
        delta, body = piece.delta, self._body
        choice = self._choices[delta.index]
        first, logprobs = not choice.started, self._logprobs(delta)
        choice.add(delta)
        if not body.stream:
            choice.keep(delta, logprobs)
            return
        if first:
            yield self.chunk(self._choice(delta.index, {"role": "assistant", "content": ""}, **self._prompt_token_ids))
        shapes = [shape for event in events_of(delta) if (shape := self._shape(event)) is not None]
        if not shapes and delta.token_ids and (logprobs or body.return_token_ids):
            shapes = [{"content": ""}]
        for place, shape in enumerate(shapes):
            # All of the delta's tokens go with its first part.
            chunk: dict[str, Any] = {"logprobs": None if place else logprobs}
            if body.return_token_ids:
                chunk["token_ids"] = [] if place else delta.token_ids
            yield self.chunk(self._choice(delta.index, shape, **chunk))
        if delta.finish_reason is not None:
            finish: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": delta.stop_reason}
            if body.return_weight_versions:
                finish["weight_versions"] = choice.weight_versions
            yield self.chunk(self._choice(delta.index, {}, **finish))

    def sent(self, piece: Piece) -> bytes:
        delta = piece.delta
        if self.varies_in_text and delta.finish_reason is None and self._choices[delta.index].started:
            events, index = events_of(delta), delta.index
            if len(events) == 1 and (text := events[0].text) and (kind := events[0].kind) in self._texts:
                return self.text_event((index, kind), text, lambda text: self._choice(index, self._shape(Event(kind, text))))
        return super().sent(piece)

    def _shape(self, event: Event) -> dict[str, Any] | None:
        """One event as OpenAI's delta."""
        match event.kind:
            case "content":
                return {"content": event.text}
            case "reasoning":
                shown = event.text and self._body.include_reasoning
                return dict.fromkeys(self._reasoning, event.text) if shown else None
            case "call_started":
                function = {"name": event.name, "arguments": ""}
                if self._body.functions is not None:
                    return {"function_call": function}
                return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
            case "arguments" if self._body.functions is not None:
                return {"function_call": {"arguments": event.text}}
            case "arguments":
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
            case "call_ended":
                return None

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        body = self._body
        reasoning = self._reasoning if body.include_reasoning else ()
        choices = [choice.shape(body.logprobs, body.return_token_ids, reasoning) for choice in self._choices]
        if body.return_weight_versions:
            for shape, choice in zip(choices, self._choices, strict=True):
                shape["weight_versions"] = choice.weight_versions
        shared = {**self._prompt_logprobs, **self._prompt_token_ids, **self.metrics()}
        return {**self._head, "choices": choices, "usage": self.usage(), **shared}

    def _choice(self, index: int, delta: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": None, "delta": delta, **fields}


class _ChatChoice:
    """One sample so far."""

    def __init__(self, index: int, body: ChatBody) -> None:
        self.started = False
        self._named = names_function(body)
        self._older = body.functions is not None
        """Whether calls have their older form."""
        self._called = False
        """A call is complete."""
        self._index = index
        self._message = Message()
        self._token_ids: list[int] = []
        self._logprobs = JSONArray()
        self._finish: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        self.started = True
        for event in delta.events:
            self._called |= event.kind == "call_ended"
        if delta.finish_reason is not None:
            self._finish = delta

    def keep(self, delta: OutputDelta, logprobs: dict[str, Any] | None) -> None:
        """Keeps a delta for ``shape``."""
        self._message.add(events_of(delta))
        self._token_ids.extend(delta.token_ids)
        if logprobs is not None:
            self._logprobs.extend(logprobs["content"])

    @property
    def finish_reason(self) -> str | None:
        if self._finish is None:
            return None
        # A call that max_tokens cut off must not be executed: length stays length.
        # Whoever names the function gets its call as the answer, which stop ends.
        called = self._finish.finish_reason == "stop" and self._called and not self._named
        if not called:
            return self._finish.finish_reason
        return "function_call" if self._older else "tool_calls"

    @property
    def weight_versions(self) -> list[dict[str, Any]]:
        return [] if self._finish is None else [dict(span.json) for span in self._finish.weight_versions]

    def shape(self, with_logprobs: bool, with_token_ids: bool, reasoning: Sequence[str]) -> dict[str, Any]:
        """``reasoning``: the fields that have the reasoning."""
        found = self._message
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning:
            message |= dict.fromkeys(reasoning, found.reasoning)
        if found.calls:
            message["content"] = found.content or None
            functions = [{"name": call.name, "arguments": call.arguments} for call in found.calls]
            if self._older:
                (message["function_call"],) = functions
            else:
                calls = zip(found.calls, functions, strict=True)
                message["tool_calls"] = [{"id": call.id, "type": "function", "function": function} for call, function in calls]
        choice: dict[str, Any] = {
            "index": self._index,
            "message": message,
            "logprobs": {"content": self._logprobs.json, "refusal": None} if with_logprobs else None,
            "finish_reason": self.finish_reason,
            "stop_reason": self._finish.stop_reason if self._finish else None,
        }
        if with_token_ids:
            choice["token_ids"] = self._token_ids
        return choice
