"""POST /v1/completions"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.outputs import OutputDelta, TokenLogprobs
from headrace.server.errors import ApiError
from headrace.server.generation import Generation, Piece, named
from headrace.server.logprobs import CompletionLogprobs, prompt_logprobs
from headrace.server.prompts import need_tokenizer, parse_prompts
from headrace.server.request import body_schema, checked_body
from headrace.server.sampling import completion_names, completion_params
from headrace.server.schema import CompletionBody
from headrace.server.sse import Answer, respond
from headrace.server.state import ServedModel, Serving, serving

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
    return await respond(request, state, generation, answer, stream=body.stream)


async def _engine_requests(
    state: Serving, body: CompletionBody, prompts: list[str | list[int]], request_id: str
) -> list[EngineRequest]:
    """Checks every prompt before the first one starts."""
    requests = []
    with named(completion_names(body)):
        params = completion_params(body, state)
        if len(prompts) * params.n > (most := state.settings.max_choices):
            raise ApiError(400, f"{len(prompts)} prompts with n = {params.n} make more than {most} choices", param="n")
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                need_tokenizer(state, "prompt")
            request = await state.llm.inputs.request_async(
                prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
                params,
                add_special_tokens=body.add_special_tokens,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                priority=body.priority,
                cache_salt=body.cache_salt,
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


class CompletionAnswer(Answer):
    """Shapes the deltas of one request as OpenAI's ``text_completion``; choice ``prompt * n + sample``."""

    def __init__(
        self, body: CompletionBody, model: ServedModel, generation: Generation, request_id: str, echoes: list[str]
    ) -> None:
        super().__init__(body, model, generation, request_id, "text_completion")
        self._body = body
        self._n = generation.requests[0].sampling.n
        self._choices = [
            _CompletionChoice(index, body, model, generation.requests[index // self._n], echoes[index // self._n])
            for index in range(generation.num_choices)
        ]
        self._shapes = [choice.empty() for choice in self._choices]

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Chunks of the same shape as the answer."""
        for index, gained in self._gained(piece):
            if self._body.stream:
                yield self.chunk(gained)
            else:
                _append(self._shapes[index], gained)

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        return {**self._head, "choices": self._shapes, "usage": self.usage()}

    def _gained(self, piece: Piece) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (index of choice, piece) for a delta."""
        prompt, delta = piece
        choices = self._choices[prompt * self._n : (prompt + 1) * self._n]
        gained = [choices[delta.index]]
        gained[0].held.append(delta)
        if delta.prompt_logprobs is not None:
            # They arrive once, and all samples of the prompt share them.
            gained = choices
            for choice in choices:
                choice.prompt_logprobs = delta.prompt_logprobs
        for choice in gained:
            for shape in choice.ready():
                yield choice.index, shape

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class _CompletionChoice:
    """One sample of one prompt. Deltas wait in ``held`` until the prompt's logprobs are known, if they are needed."""

    def __init__(self, index: int, body: CompletionBody, model: ServedModel, request: EngineRequest, echo: str) -> None:
        self.index = index
        self.held: list[OutputDelta] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._body = body
        self._model = model
        self._prompt_token_ids = request.prompt_token_ids
        self._echo = echo
        self._started = False
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            special_text = not request.sampling.skip_special_tokens
            self._logprobs = CompletionLogprobs(model.texts, body.logprobs, model.special, special_text)
        self._waits_for_prompt = request.sampling.prompt_logprobs is not None
        self._shows_prompt = "prompt_logprobs" in body.sampling

    def empty(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        if self._body.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self._prompt_token_ids}
        return choice

    def ready(self) -> list[dict[str, Any]]:
        """The pieces that can be sent now, in order."""
        if not self.held or (self._waits_for_prompt and self.prompt_logprobs is None):
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
        """Adds the echoed prompt with its token ids and logprobs to the first piece."""
        body, known = self._body, self.prompt_logprobs
        piece["text"] = self._echo
        if body.echo and self._logprobs is not None and known is not None:
            piece["logprobs"] = self._logprobs.echo(self._prompt_token_ids, known, self._echo)
        if body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt_token_ids
        if self._shows_prompt and known is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._model.texts, known)


def _append(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Appends a piece to a choice."""
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
