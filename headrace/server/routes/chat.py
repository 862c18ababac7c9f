"""POST /v1/chat/completions"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.outputs import OutputDelta
from headrace.server.generation import Generation, Piece, named
from headrace.server.logprobs import JSONArray, chat_logprobs, prompt_logprobs
from headrace.server.prompts import check_prompt_logprobs, render_messages
from headrace.server.request import body_schema, checked_body
from headrace.server.sampling import chat_names, chat_params
from headrace.server.schema import ChatBody
from headrace.server.sse import Answer, respond
from headrace.server.state import ServedModel, serving

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    state = serving(request)
    body = await checked_body(request, state, ChatBody, "chat")
    model = state.model
    model.check_name(body.model)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    request.scope["headrace.engine_id"] = request_id
    with named(chat_names(body)):
        params = chat_params(body, state)
        engine_request = await state.llm.inputs.request_async(
            await render_messages(state, body),
            params,
            add_special_tokens=body.add_special_tokens,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
    check_prompt_logprobs(state, [engine_request], copies=1)
    generation = Generation(state, [engine_request])
    return await respond(request, state, generation, ChatAnswer(body, model, generation, request_id), stream=body.stream)


class ChatAnswer(Answer):
    """Shapes deltas as OpenAI's ``chat.completion`` or its chunks."""

    def __init__(self, body: ChatBody, model: ServedModel, generation: Generation, request_id: str) -> None:
        super().__init__(body, model, generation, request_id, "chat.completion.chunk" if body.stream else "chat.completion")
        self._body = body
        self._choices = [_ChatChoice(index) for index in range(generation.num_choices)]
        self._prompt_logprobs: dict[str, Any] = {}
        self._prompt_token_ids: dict[str, Any] = {}
        if body.return_token_ids:
            self._prompt_token_ids["prompt_token_ids"] = generation.requests[0].prompt_token_ids

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not self._body.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(self._model.texts, delta.logprobs, self._body.top_logprobs or 0)

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
        choice.add(delta, logprobs)
        if not body.stream:
            return
        if first:
            yield self._chunk(delta.index, {"delta": {"role": "assistant", "content": ""}} | self._prompt_token_ids)
        if delta.text or (logprobs and delta.token_ids) or (body.return_token_ids and delta.token_ids):
            shape: dict[str, Any] = {"delta": {"content": delta.text}, "logprobs": logprobs}
            if body.return_token_ids:
                shape["token_ids"] = delta.token_ids
            yield self._chunk(delta.index, shape)
        if delta.finish_reason is not None:
            finish: dict[str, Any] = {"delta": {}, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield self._chunk(delta.index, finish)

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        body = self._body
        choices = [choice.shape(body.logprobs, body.return_token_ids) for choice in self._choices]
        return {**self._head, **self._prompt_logprobs, "choices": choices, "usage": self.usage(), **self._prompt_token_ids}

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return self.chunk({"index": index, "logprobs": None, "finish_reason": None, **choice})


class _ChatChoice:
    """One sample so far."""

    def __init__(self, index: int) -> None:
        self.started = False
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs = JSONArray()
        self._finish: OutputDelta | None = None

    def add(self, delta: OutputDelta, logprobs: dict[str, Any] | None) -> None:
        self.started = True
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
            "logprobs": {"content": self._logprobs.json, "refusal": None} if with_logprobs else None,
            "finish_reason": self._finish.finish_reason if self._finish else None,
            "stop_reason": self._finish.stop_reason if self._finish else None,
        }
        if with_token_ids:
            choice["token_ids"] = self._token_ids
        return choice
