"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter

from headrace.core.request import AdapterRef
from headrace.core.request import Request as EngineRequest
from headrace.errors import RequestError
from headrace.outputs import OutputDelta, TokenLogprobs
from headrace.server.answers import Begun, answers
from headrace.server.body import Caller
from headrace.server.generation import Generation, Piece, named
from headrace.server.logprobs import IDS, CompletionLogprobs, JSONColumns, prompt_logprobs
from headrace.server.prompts import check_prompt_logprobs, engine_prompt, parse_prompts
from headrace.server.sampling import completion_names, completion_params
from headrace.server.schema import CompletionBody
from headrace.server.sse import ChunkAnswer
from headrace.server.state import ServedModel, Serving

router = APIRouter()


@answers(router, "/v1/completions", "cmpl-", CompletionBody, "completions")
async def completions(state: Serving, body: CompletionBody, request_id: str, caller: Caller) -> Begun:
    """Continues one or more texts."""
    adapter = state.adapter(body.model, body.lora_name)
    prompts = await state.llm.inputs.in_thread(caller.turn, lambda: parse_prompts(body.prompt, state.settings.max_prompts))
    engine_requests = await _engine_requests(state, body, prompts, request_id, caller, adapter)
    generation = Generation(state, engine_requests, keeps_aborted=state.settings.enable_rl_api)
    echoes = [_echo_text(state, prompt) if body.echo else "" for prompt in prompts]
    return generation, CompletionAnswer(body, state.model, generation, request_id, echoes)


async def _engine_requests(
    state: Serving,
    body: CompletionBody,
    prompts: list[str | list[int]],
    request_id: str,
    caller: Caller,
    adapter: AdapterRef | None,
) -> list[EngineRequest]:
    """Checks every prompt before the first one starts."""
    requests = []
    with named(completion_names(body)):
        params = await state.llm.inputs.in_thread(caller.turn, lambda: completion_params(body, state))
        if len(prompts) * params.n > (most := state.settings.max_choices):
            message = f"{len(prompts)} prompts with n = {params.n} make more than {most} choices (max_choices)"
            raise RequestError(message, "n")
        for index, prompt in enumerate(prompts):
            request = await state.llm.inputs.request_async(
                await state.llm.inputs.in_thread(caller.turn, partial(engine_prompt, state, prompt, body))
                if body.suffix
                else engine_prompt(state, prompt, body),
                params,
                add_special_tokens=body.add_special_tokens,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=adapter,
                tenant=caller.tenant,
                turn=caller.turn,
            )
            if body.suffix and state.model.fim is not None:
                ends = {*request.eos_token_ids, *state.model.fim.end_token_ids}
                request = msgspec.structs.replace(request, eos_token_ids=sorted(ends))
            requests.append(request)
            await asyncio.sleep(0)  # others take their turns between many short prompts
    check_prompt_logprobs(state, requests, copies=params.n)
    return requests


def _echo_text(state: Serving, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if state.llm.tokenizer is None:
        return ""
    text: str = state.llm.tokenizer.decode(prompt, skip_special_tokens=False)
    return text


class CompletionAnswer(ChunkAnswer):
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
        self._logprobs = [JSONColumns() for _ in self._choices]

    async def prepare(self, piece: Piece) -> None:
        """All samples of a prompt share its logprobs, which arrive with the first sample's first delta."""
        if (entries := piece.delta.prompt_logprobs) is not None:
            first, *others = self._of_prompt(piece.prompt)
            known = await self._generation.in_thread(lambda: first.shape_prompt(entries))
            for choice in (first, *others):
                choice.know_prompt(known)

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Chunks of the same shape as the answer."""
        prompt, delta = piece
        own = self._choices[prompt * self._n + delta.index]
        own.held.append(delta)
        # Deltas of other samples may have waited for the prompt's logprobs.
        for choice in (own,) if delta.prompt_logprobs is None else self._of_prompt(prompt):
            for gained in choice.ready():
                logprobs = gained["logprobs"]
                if self._body.stream:
                    gained["logprobs"] = None if logprobs is None else logprobs.json
                    yield self.chunk(gained)
                    continue
                del gained["logprobs"]
                if logprobs is not None:
                    self._logprobs[choice.index].join(logprobs)
                _append(self._shapes[choice.index], gained)

    def sent(self, piece: Piece) -> bytes:
        prompt, delta = piece
        choice = self._choices[prompt * self._n + delta.index]
        if self.varies_in_text and choice.started and delta.finish_reason is None and delta.prompt_logprobs is None:
            return self.text_event(choice.index, delta.text, choice.shape) if delta.text else b""
        return super().sent(piece)

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        choices = [shape | {"logprobs": logprobs.json} for shape, logprobs in zip(self._shapes, self._logprobs, strict=True)]
        return {**self._head, "choices": choices, "usage": self.usage(), **self.metrics()}

    def _of_prompt(self, prompt: int) -> list[_CompletionChoice]:
        return self._choices[prompt * self._n : (prompt + 1) * self._n]

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


class _PromptLogprobs(NamedTuple):
    """The logprobs of a prompt as its choices show them."""

    shown: msgspec.Raw | None
    """JSON of ``prompt_logprobs``."""
    echoed: JSONColumns | None
    """JSON of ``echo`` with ``logprobs``."""


class _CompletionChoice:
    """One sample of one prompt. Deltas wait in ``held`` until the prompt's logprobs are known, if they are needed."""

    def __init__(self, index: int, body: CompletionBody, model: ServedModel, request: EngineRequest, echo: str) -> None:
        self.index = index
        self.held: list[OutputDelta] = []
        self._body = body
        self._model = model
        self._prompt_token_ids = request.prompt_token_ids
        self._echo = echo
        self.started = False
        self._logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            special_text = not request.sampling.skip_special_tokens
            names = IDS if body.return_tokens_as_token_ids else None
            self._logprobs = CompletionLogprobs(model.texts, body.logprobs, model.special, special_text, names)
        self._waits_for_prompt = request.sampling.prompt_logprobs is not None
        self._prompt: _PromptLogprobs | None = None

    def shape_prompt(self, entries: Sequence[TokenLogprobs | None]) -> _PromptLogprobs:
        """Shapes the logprobs for all samples of the prompt."""
        shown = prompt_logprobs(self._model.texts, entries).json if "prompt_logprobs" in self._body.sampling else None
        echoed = None
        if self._body.echo and self._logprobs is not None:
            echoed = self._logprobs.echo(self._prompt_token_ids, entries, self._echo)
        return _PromptLogprobs(shown, echoed)

    def know_prompt(self, known: _PromptLogprobs) -> None:
        self._prompt = known
        if known.echoed is not None and self._logprobs is not None:
            self._logprobs.after_echo(self._echo)

    def empty(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "text": "", "finish_reason": None, "stop_reason": None}
        if self._body.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": self._prompt_token_ids}
        return choice

    def shape(self, text: str) -> dict[str, Any]:
        """An event of a text and nothing else."""
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def ready(self) -> Iterator[dict[str, Any]]:
        """The pieces that can be sent now, in order. Their logprobs are None where the request has none."""
        if self._waits_for_prompt and self._prompt is None:
            return
        for delta in self.held:
            if (piece := self._piece(delta)) is not None:
                yield piece
        self.held.clear()

    def _piece(self, delta: OutputDelta) -> dict[str, Any] | None:
        text, tokens, finish, stop = delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason
        if self._body.max_tokens == 0:
            text, tokens, finish, stop = "", [], finish and "length", None
        logprobs = None if self._logprobs is None else JSONColumns()
        piece = self.shape(text) | {"logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        first = not self.started
        if first:
            self.started = True
            self._begin(piece)
        if self._logprobs is not None and logprobs is not None and tokens and delta.logprobs:
            logprobs.extend(self._logprobs.add(tokens, delta.logprobs))
        if self._body.return_token_ids:
            piece["token_ids"] = tokens
        if self._body.return_weight_versions and finish:
            piece["weight_versions"] = [span.json for span in delta.weight_versions]
        return piece if first or piece["text"] or finish or logprobs or piece.get("token_ids") else None

    def _begin(self, piece: dict[str, Any]) -> None:
        """Adds the echoed prompt with its token ids and logprobs to the first piece."""
        piece["text"] = self._echo + piece["text"]
        if self._body.return_token_ids:
            piece["prompt_token_ids"] = self._prompt_token_ids
        if self._prompt is not None and self._prompt.echoed is not None:
            piece["logprobs"].join(self._prompt.echoed)
        if self._prompt is not None and self._prompt.shown is not None:
            piece["prompt_logprobs"] = self._prompt.shown


def _append(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Appends a piece to a choice."""
    for name, value in piece.items():
        if name == "index" or value is None:
            continue
        if name == "text":
            choice["text"] += value
        elif name == "token_ids":
            choice[name].extend(value)
        else:
            choice[name] = value
