"""Tokens in, tokens out: POST /generate of SGLang, POST /inference/v1/generate of vLLM and as /v1/generate; /health_generate,
/abort_request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.errors import QueueFullError, RequestError, unsupported, wrong_type
from headrace.sampling_params import SamplingParams
from headrace.server.answers import Begun, answers
from headrace.server.body import Caller, caller
from headrace.server.errors import JSON, unavailable
from headrace.server.generation import Generation, cancel_on_disconnect, named
from headrace.server.prompts import check_prompt_logprobs, need_tokenizer, parse_prompts
from headrace.server.request import posts
from headrace.server.sampling import inference_params, limit, rollout_names, sglang_params
from headrace.server.schema import AbortBody, GenerateBody, InferenceBody
from headrace.server.shape.generate import GenerateAnswer, InferenceAnswer
from headrace.server.state import Serving, ready, serving

router = APIRouter()
_PROBE_SECONDS = 20.0
"""Time in which an engine generates a token, or at least goes on with its steps."""


@answers(router, "/generate", "gen-", GenerateBody, "generate")
async def generate(state: Serving, body: GenerateBody, request_id: str, caller: Caller) -> Begun:
    """Continues one or more prompts, in the shape of SGLang's API."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give either text or input_ids", "input_ids")
    name = "text" if body.input_ids is None else "input_ids"
    given = getattr(body, name)

    def read() -> tuple[list[str | list[int]], list[_Sampled]]:
        prompts = parse_prompts(given, state.settings.max_prompts, name)
        if not isinstance(prompts[0], str if name == "text" else list):
            raise wrong_type(name, "text" if name == "text" else "token ids")
        return prompts, _sampled(state, body, len(prompts))

    adapter = state.adapter(None, body.lora_path)
    prompts, sampled = await state.llm.inputs.in_thread(caller.turn, read)
    several = isinstance(given, list) and not isinstance(given[0], int)
    names = _names(body.rid, request_id, len(prompts))
    limit("sampling_params.n", sum(each.params.n for each in sampled), state.settings.max_choices, "max_choices")
    requests: list[EngineRequest] = []
    for place, (prompt, own) in enumerate(zip(prompts, sampled, strict=True)):
        if isinstance(prompt, str):
            need_tokenizer(state, name)
        with named({**own.names, "prompt": name}):
            request = await state.llm.inputs.request_async(
                prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
                own.params,
                request_id=f"{request_id}-{place}",
                cache_salt=body.cache_salt,
                adapter=adapter,
                tenant=caller.tenant,
                turn=caller.turn,
            )
        requests.append(request)
        await asyncio.sleep(0)  # others take their turns between many short prompts
    if body.routed_experts_start_len > min(len(request.prompt_token_ids) for request in requests):
        name = "routed_experts_start_len"
        raise RequestError(f"{name} is {body.routed_experts_start_len}, which is beyond a prompt", name)
    check_prompt_logprobs(state, requests, copies=1)
    generation = Generation(state, requests, names=names, keeps_aborted=True, weights_number=body.start_weight_version)
    several = several or generation.num_choices > 1
    empty = [each.empty for each in sampled]
    return generation, GenerateAnswer(body, state, generation, names, empty, several=several)


class _Sampled(NamedTuple):
    """Sampling of one prompt."""

    params: SamplingParams
    names: Mapping[str, str]
    """Result of ``rollout_names``."""
    empty: bool
    """Whether new tokens are left out of the answer: the engine always samples one."""

    @classmethod
    def of(cls, state: Serving, body: GenerateBody, given: Any, where: str) -> _Sampled:
        empty = isinstance(given, dict) and given.get("max_new_tokens") == 0
        scores: dict[str, Any] = {"return_routed_experts": True} if body.return_routed_experts else {}
        scores |= {"logprobs": body.top_logprobs_num} if body.return_logprob else {}
        scores |= {"prompt_logprobs": body.top_logprobs_num} if body.logprob_start_len >= 0 else {}
        params = sglang_params(given | {"max_new_tokens": 1} if empty else given, where, state, scores)
        return cls(params, {**rollout_names(given, where, sglang=True), **_SCORES}, empty)


_SCORES: Mapping[str, str] = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "return_routed_experts": "return_routed_experts",
}


def _sampled(state: Serving, body: GenerateBody, count: int) -> list[_Sampled]:
    """Sampling of each prompt."""
    if not body.return_logprob and (body.top_logprobs_num or body.logprob_start_len >= 0):
        name = "top_logprobs_num" if body.top_logprobs_num else "logprob_start_len"
        raise RequestError(f"{name} needs return_logprob: true", name)
    given, where = body.sampling_params, "sampling_params"
    if not isinstance(given, list):
        return [_Sampled.of(state, body, given, where)] * count
    if len(given) != count:
        raise RequestError(f"{where} has {len(given)} entries for {count} prompts", where)
    return [_Sampled.of(state, body, each, f"{where}[{place}]") for place, each in enumerate(given)]


def _names(given: Any, request_id: str, count: int) -> list[str]:
    """The client's names of its requests, or the answer's id."""
    if given is None:
        return [request_id] * count
    names = [given] * count if isinstance(given, str) else given
    if not isinstance(names, list) or len(names) != count or any(type(each) is not str or not each for each in names):
        raise wrong_type("rid", "a string, or a list with a string for each prompt")
    return names


@answers(router, "/inference/v1/generate", "generate-tokens-", InferenceBody, "inference", "/v1/generate")
async def inference(state: Serving, body: InferenceBody, request_id: str, caller: Caller) -> Begun:
    """Continues tokens with tokens, in the shape of vLLM's API."""
    adapter = state.adapter(body.model)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    experts = body.return_routed_experts
    if experts is None:
        experts = state.llm.args.enable_return_routed_experts
    params = await state.llm.inputs.in_thread(
        caller.turn,
        lambda: inference_params(body.sampling_params, "sampling_params", state, return_routed_experts=experts),
    )
    if body.stream and params.prompt_logprobs is not None:
        name = "sampling_params.prompt_logprobs"
        raise unsupported(name, f"{name} is not supported with stream: true")
    own = {"prompt": "token_ids", "return_routed_experts": "return_routed_experts"}
    with named({**rollout_names(body.sampling_params, "sampling_params"), **own}):
        request = await state.llm.inputs.request_async(
            {"prompt_token_ids": body.token_ids},
            params,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapter=adapter,
            tenant=caller.tenant,
            turn=caller.turn,
        )
    check_prompt_logprobs(state, [request], copies=1)
    generation = Generation(state, [request], names=[body.request_id or request_id], keeps_aborted=True)
    return generation, InferenceAnswer(body, state.model, generation, request_id)


@router.get("/health_generate")
@router.post("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 if the engine generates, a token of its own or within 20 seconds the steps of others, or is paused; else 503. 200 too
    where /health is, while a trainer may write weights."""
    if (damage := serving(request).damage()) is not None:
        return JSON(damage)
    state = ready(request)
    if paused := state.paused():
        return JSON({"status": "ok"} | paused)
    await cancel_on_disconnect(state, request.receive, _probe(state, caller(request)))
    return JSON({"status": "ok"})


async def _probe(state: Serving, sender: Caller) -> None:
    """Raises: ApiError 503: nothing was generated."""
    before, inputs = state.llm.stats.step, state.llm.inputs
    token = inputs.eos_token_ids[0] if inputs.eos_token_ids else 0
    probe = await inputs.request_async(
        {"prompt_token_ids": [token]},
        SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        request_id=f"health-{uuid.uuid4().hex}",
        tenant=sender.tenant,
        turn=sender.turn,
    )
    generation = Generation(state, [probe])
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await generation.begin()
            return
    except (TimeoutError, QueueFullError):
        if state.llm.stats.step == before:
            raise unavailable(f"no token in {_PROBE_SECONDS:g} s", state.settings.retry_after) from None
    finally:
        await generation.aclose()


@posts(router, "/abort_request", kind=AbortBody)
async def abort_request(request: Request, state: Serving, body: AbortBody) -> Response:
    """End requests of the caller's API key: those with a name, or all. They are answered with the tokens that they have."""
    names = [name for name in body.rid or () if name]  # SGLang's own clients send "" with abort_all.
    if bool(names) == body.abort_all:
        raise RequestError("give either rid or abort_all: true", "rid")
    return JSON({"aborted": await state.abort(caller(request).tenant, names or None)})
