"""POST /v1/chat/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.outputs import OutputDelta
from headrace.server.errors import JSON
from headrace.server.generation import Generation, engine_request, unless_gone
from headrace.server.logprobs import chat_logprobs, prompt_logprobs
from headrace.server.messages import render, template_messages
from headrace.server.prompts import encode, need_tokenizer
from headrace.server.request import body_schema, checked_body
from headrace.server.sampling import chat_params
from headrace.server.schema import ChatBody
from headrace.server.sse import EventStream
from headrace.server.state import ModelFacts, serving

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    state = serving(request)
    body = await checked_body(request, state, ChatBody, "chat")
    model = state.model
    model.check_name(body.model)
    params = chat_params(body, state.settings, model.defaults, model.has_tokenizer)
    text = render(
        need_tokenizer(state, "messages"),
        template_messages(body.messages, state.settings.max_messages),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    tokens = await encode(state, text, body.add_special_tokens, "messages")
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    request.scope["headrace.engine_id"] = request_id
    engine = await engine_request(
        state,
        tokens,
        params,
        request_id=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        names=_names(body),
    )
    generation = Generation(state, [engine])
    answer = ChatAnswer(body, model, generation, request_id)
    if not body.stream:
        return JSON(await unless_gone(state, request.receive, answer.collect()))
    await unless_gone(state, request.receive, generation.begin())
    return EventStream(state, generation, answer.events())


def _names(body: ChatBody) -> dict[str, str]:
    """What chat calls the engine's parameters."""
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


class ChatAnswer:
    """Shapes the deltas of one request as OpenAI's ``chat.completion`` or its chunks."""

    def __init__(self, body: ChatBody, model: ModelFacts, generation: Generation, request_id: str) -> None:
        self._body = body
        self._model = model
        self._generation = generation
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not self._body.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(self._model.texts, delta.token_ids, delta.logprobs, self._body.top_logprobs or 0)

    async def collect(self) -> dict[str, Any]:
        """The whole answer at once."""
        body = self._body
        choices = [_Choice(index) for index in range(self._generation.num_choices)]
        answer: dict[str, Any] = dict(self._head)
        async with aclosing(self._generation):
            async for _, delta in self._generation:
                choices[delta.index].add(delta, self._logprobs(delta))
                if delta.prompt_logprobs is not None and body.prompt_logprobs is not None:
                    answer["prompt_logprobs"] = prompt_logprobs(self._model.texts, delta.prompt_logprobs)
        answer["choices"] = [choice.shape(body.logprobs, body.return_token_ids) for choice in choices]
        answer["usage"] = self._generation.usage
        if body.return_token_ids:
            answer["prompt_token_ids"] = self._generation.requests[0].prompt_token_ids
        return answer

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks: the role of each choice with its first delta, then text, then its finish; usage last, if asked for."""
        body = self._body
        options = body.stream_options
        started: set[int] = set()
        async for _, delta in self._generation:
            if delta.index not in started:
                first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
                if body.return_token_ids:
                    first["prompt_token_ids"] = self._generation.requests[0].prompt_token_ids
                yield self._chunk(delta.index, first)
                started.add(delta.index)
            logprobs = self._logprobs(delta)
            if delta.text or (logprobs and delta.token_ids) or (body.return_token_ids and delta.token_ids):
                piece: dict[str, Any] = {"delta": {"content": delta.text}, "logprobs": logprobs}
                if body.return_token_ids:
                    piece["token_ids"] = delta.token_ids
                yield self._chunk(delta.index, piece)
            if delta.finish_reason is not None:
                finish: dict[str, Any] = {"delta": {}, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                yield self._chunk(delta.index, finish)
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._generation.usage}

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        chunk = {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._generation.usage
        elif options is not None and options.include_usage:
            chunk["usage"] = None
        return chunk


class _Choice:
    """One sample, gathered."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish: OutputDelta | None = None

    def add(self, delta: OutputDelta, logprobs: dict[str, Any] | None) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        if logprobs is not None:
            self._logprobs.extend(logprobs["content"])
        if delta.finish_reason is not None:
            self._finish = delta

    def shape(self, with_logprobs: bool, with_token_ids: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._index,
            "message": {"role": "assistant", "content": "".join(self._texts), "refusal": None},
            "logprobs": {"content": self._logprobs, "refusal": None} if with_logprobs else None,
            "finish_reason": self._finish.finish_reason if self._finish else None,
            "stop_reason": self._finish.stop_reason if self._finish else None,
        }
        if with_token_ids:
            choice["token_ids"] = self._token_ids
        return choice
