"""Routes by which an engine gives memory back and takes it again, under the names of vLLM, SGLang and FastDeploy."""

from __future__ import annotations

from typing import Literal, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import PlainTextResponse, Response

from headrace.core.weights import MEMORY_TAGS, PauseMode, SleepTag
from headrace.errors import RequestError
from headrace.server.errors import JSON, shown
from headrace.server.routes.rl import CommandRoute, RlBody, admin, in_sglangs_form, query_word, rl_body
from headrace.server.state import Serving, serving

router = APIRouter(dependencies=[Depends(admin)], route_class=CommandRoute)
disabled = APIRouter()
"""Stands for the router where there is no RL API."""


class _Memory(RlBody):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


def _query_tags(request: Request) -> list[SleepTag] | None:
    """Returns the tags of the query; None: it has none. Raises: RequestError: one is unknown."""
    known = ("scheduling", *MEMORY_TAGS)
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in known:
            raise RequestError(f"tags must be some of {', '.join(known)}, not {shown(tag)!r}", "tags")
    return cast(list[SleepTag], tags) or None


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Gives memory back. level 0: generation alone sleeps; 1 (default): the host's memory keeps the weights; 2: they are
    dropped. mode: what becomes of requests that run, as of /pause. tags: weights, kv_cache, cuda_graph; all by default."""
    await rl_body(request, RlBody, "level", "mode", "tags")
    level = cast(Literal[0, 1, 2], int(query_word(request, "level", "1", "0", "2")))
    mode = cast(PauseMode, query_word(request, "mode", "abort", "wait", "keep"))
    result = await serving(request).llm.weights.sleep(level, mode, _query_tags(request) or MEMORY_TAGS)
    return _state(serving(request), memory=[msgspec.structs.asdict(one) for one in result.memory])


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Takes memory again: that of ``tags``, which may be given several times; all by default."""
    await rl_body(request, RlBody, "tags")
    await serving(request).llm.weights.wake_up(_query_tags(request))
    return _state(serving(request))


def _state(state: Serving, **more: object) -> Response:
    weights = state.llm.weights.status()
    return JSON({"status": "sleeping" if weights.asleep else "awake", "tags": weights.asleep, "state": weights.state, **more})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return JSON({"is_sleeping": bool(serving(request).llm.weights.status().asleep)})


@router.post("/release_kv_cache_memory")
async def release_kv_cache_memory(request: Request) -> Response:
    """Gives the memory of KV back. Requests that run are computed again once it was woken."""
    await rl_body(request, RlBody)
    await serving(request).llm.weights.sleep(1, "keep", ["kv_cache"])
    return _state(serving(request))


@router.post("/release_memory_occupation")
@in_sglangs_form
async def release_memory_occupation(request: Request) -> str:
    """Gives memory back, while the host's memory keeps the weights. Requests that run are computed again afterwards."""
    body = await rl_body(request, _Memory)
    await serving(request).llm.weights.sleep(1, "keep", body.tags or MEMORY_TAGS)
    return "the memory is free"


@router.post("/resume_memory_occupation")
@in_sglangs_form
async def resume_memory_occupation(request: Request) -> str:
    """Takes memory again: that of ``tags``; all by default."""
    body = await rl_body(request, _Memory)
    await serving(request).llm.weights.wake_up(body.tags)
    return "the memory is taken"


@router.get("/clear_load_weight")
@router.post("/clear_load_weight")
async def clear_load_weight(request: Request) -> Response:
    """Ends all requests, drops the weights, and gives their memory back, with that of KV. The next update of all weights wakes
    the engine: /update_model_weight, or a trainer's."""
    await rl_body(request, RlBody)
    await serving(request).llm.weights.sleep(2, "abort", until_update=True)
    return _state(serving(request))


@router.get("/update_model_weight")
@router.post("/update_model_weight")
async def update_model_weight(request: Request) -> Response:
    """Reads the weights of the model's files again, and wakes the engine. One that has kept its weights wakes with those."""
    await rl_body(request, RlBody)
    weights = serving(request).llm.weights
    if weights.status().level != 1:
        await weights.reload()
    await weights.wake_up()
    return _state(serving(request))


@disabled.get("/clear_load_weight")
@disabled.post("/clear_load_weight")
@disabled.get("/update_model_weight")
@disabled.post("/update_model_weight")
async def no_dynamic_weights(request: Request) -> Response:
    """404: the server has no --enable-rl-api."""
    return PlainTextResponse("Dynamic Load Weight Disabled.", 404)
