"""POST /v1/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.outputs import OutputDelta, PositionLogprobs
from headrace.server.errors import JSON, ApiError
from headrace.server.generation import Generation, engine_request, unless_gone
from headrace.server.logprobs import CompletionLogprobs, prompt_logprobs
from headrace.server.prompts import encode, parse_prompts
from headrace.server.request import body_schema, checked_body
from headrace.server.sampling import completion_params
from headrace.server.schema import CompletionBody
from headrace.server.sse import EventStream
from headrace.server.state import ModelFacts, Serving, serving

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
async def completions(request: Request) -> Response:
    """Continues one or more texts."""
    state = serving(request)
    body = await checked_body(request, state, CompletionBody, "completions")
    model = state.model
    model.check_name(body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    request.scope["headrace.engine_id"] = request_id
    prompts = parse_prompts(body.prompt, state.settings.max_prompts)
    engine_requests = await _engine_requests(state, body, prompts, request_id)
    generation = Generation(state, engine_requests)
    echoes = [_echo_text(state, prompt) if body.echo else "" for prompt in prompts]
    answer = CompletionAnswer(body, model, generation, request_id, echoes)
    if not body.stream:
        return JSON(await unless_gone(state, request.receive, answer.collect()))
    await unless_gone(state, request.receive, generation.begin())
    return EventStream(state, generation, answer.events())


async def _engine_requests(
    state: Serving, body: CompletionBody, prompts: list[str | list[int]], request_id: str
) -> list[EngineRequest]:
    """Every prompt is checked before the first one starts."""
    model, limit = state.model, state.settings.max_choices
    params = completion_params(body, state.settings, model.defaults, model.has_tokenizer)
    if len(prompts) * params.n > limit:
        raise ApiError(400, f"{len(prompts)} prompts with n = {params.n} make more than {limit} choices", param="n")
    requests = []
    for index, prompt in enumerate(prompts):
        tokens = await encode(state, prompt, body.add_special_tokens, "prompt") if isinstance(prompt, str) else prompt
        engine_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        request = await engine_request(
            state,
            tokens,
            params,
            request_id=engine_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            names={"prompt_token_ids": "prompt"},
        )
        requests.append(request)
    return requests


def _echo_text(state: Serving, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if state.llm.tokenizer is None:
        return ""
    text: str = state.llm.tokenizer.decode(prompt, skip_special_tokens=False)
    return text


class CompletionAnswer:
    """Shapes the deltas of one request as OpenAI's ``text_completion``; choice ``prompt * n + sample``."""

    def __init__(
        self, body: CompletionBody, model: ModelFacts, generation: Generation, request_id: str, echoes: list[str]
    ) -> None:
        self._body = body
        self._model = model
        self._generation = generation
        self._choices = [
            _Choice(index, body, model, generation.requests[index // body.n].prompt_token_ids, echoes[index // body.n])
            for index in range(generation.num_choices)
        ]
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    async def collect(self) -> dict[str, Any]:
        """The whole answer at once."""
        shapes: list[dict[str, Any]] = [choice.empty() for choice in self._choices]
        async for index, piece in self._pieces():
            _append(shapes[index], piece)
        return {**self._head, "choices": shapes, "usage": self._usage()}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Chunks of the same shape as the answer; usage last, if asked for."""
        options = self._body.stream_options
        async for _, piece in self._pieces():
            chunk = {**self._head, "choices": [piece]}
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = self._usage()
            elif options is not None and options.include_usage:
                chunk["usage"] = None
            yield chunk
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def _pieces(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """What each delta adds to its choice."""
        n = self._body.n
        async with aclosing(self._generation):
            async for prompt, delta in self._generation:
                choices = self._choices[prompt * n : (prompt + 1) * n]
                gained = [choices[delta.index]]
                gained[0].held.append(delta)
                if delta.prompt_logprobs is not None:
                    # They come once, and all samples of the prompt share them.
                    gained = choices
                    for choice in choices:
                        choice.prompt_logprobs = delta.prompt_logprobs
                for choice in gained:
                    for piece in choice.ready():
                        yield choice.index, piece

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        if self._body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class _Choice:
    """One sample of one prompt. Deltas wait in ``held`` until the prompt's logprobs are known, if they are needed."""

    def __init__(self, index: int, body: CompletionBody, model: ModelFacts, prompt_token_ids: list[int], echo: str) -> None:
        self.index = index
        self.held: list[OutputDelta] = []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._body = body
        self._model = model
        self._prompt_token_ids = prompt_token_ids
        self._echo = echo
        self._started = False
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            special_text = not body.skip_special_tokens
            self._logprobs = CompletionLogprobs(model.texts, body.logprobs, model.special, special_text)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)

    def empty(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        if self._body.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self._prompt_token_ids}
        return choice

    def ready(self) -> list[dict[str, Any]]:
        """The pieces that can be sent now, in order."""
        if not self.held or (self._wants_prompt_logprobs and self.prompt_logprobs is None):
            return []
        pieces = [piece for delta in self.held if (piece := self._piece(delta)) is not None]
        self.held.clear()
        return pieces

    def _piece(self, delta: OutputDelta) -> dict[str, Any] | None:
        piece: dict[str, Any] = {"index": self.index, "text": "", "logprobs": None}
        piece |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        text, tokens, positions = delta.text, delta.token_ids, delta.logprobs
        if self._body.max_tokens == 0:
            text, tokens, positions = "", [], None
            piece |= {"finish_reason": delta.finish_reason and "length", "stop_reason": None}
        first = not self._started
        if first:
            self._started = True
            self._begin(piece)
        piece["text"] += text
        if self._logprobs is not None and positions:
            _append(piece, {"logprobs": self._logprobs.add(tokens, positions)})
        if self._body.return_token_ids:
            piece["token_ids"] = tokens
        worth = piece["text"] or piece["logprobs"] or piece.get("token_ids") or piece["finish_reason"]
        return piece if worth or first else None

    def _begin(self, piece: dict[str, Any]) -> None:
        """What stands before the first token: the echoed prompt and what is known of it."""
        body, known = self._body, self.prompt_logprobs
        piece["text"] = self._echo
        if body.echo and self._logprobs is not None and known is not None:
            piece["logprobs"] = self._logprobs.echo(self._prompt_token_ids, known, self._echo)
        if body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt_token_ids
        if body.prompt_logprobs is not None and known is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._model.texts, known)


def _append(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Adds a piece to what a choice has so far."""
    for name, value in piece.items():
        if name == "index" or value is None:
            continue
        if name == "text":
            choice["text"] += value
        elif name == "token_ids":
            choice[name].extend(value)
        elif name == "logprobs" and choice["logprobs"] is not None:
            for key, entries in value.items():
                if entries is not None:
                    choice["logprobs"][key].extend(entries)
        else:
            choice[name] = value
