"""GET /, /health, /ready, /live, /ping, /version, /metrics: for operators, without an API key. GET /server_info, with one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import headrace
from headrace.metrics.prometheus import CONTENT_TYPE
from headrace.metrics.stats import EngineStats
from headrace.processes.replicas import ReplicaStatus
from headrace.routing import RoutingDecision
from headrace.server.errors import JSON, first_line, unavailable
from headrace.server.routes.rl import query_word
from headrace.server.routes.rl_sglang import sglang_args
from headrace.server.routes.rl_vllm import vllm_config
from headrace.server.state import Serving, described, serving

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 if requests are served; else 503 with the reason. Of several replicas, says how many are up. 200 too where a trainer
    may write weights (--enable-rl-api) and an engine that runs has none that are whole: the next trainer waits for it."""
    state = serving(request)
    if (damage := state.damage()) is not None:
        return JSON(damage | _counted(state) | state.paused())
    state.check_ready()
    return JSON({"status": "ok"} | _counted(state) | state.paused())


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 if requests are served, and by every replica; else 503 with the reason."""
    state = serving(request)
    state.check_ready()
    if reason := state.llm.health().reason:
        raise unavailable(first_line(reason), state.settings.retry_after)
    return JSON({"status": "ok"} | _counted(state))


def _counted(state: Serving) -> dict[str, Any]:
    """The replicas that are up, where there are several."""
    replicas = state.llm.replicas
    if replicas is None:
        return {}
    status = replicas.status()
    return {"replicas": {"up": sum(not one.reason for one in status), "total": len(status)}}


@router.get("/live")
async def live(request: Request) -> Response:
    """200 while the server runs, loads or restarts its engine; 503 with the reason once the engine stays down."""
    state = serving(request)
    state.check_live()
    return JSON({"status": "sleeping" if state.llm.weights.status().state in ("asleep", "hollow") else "ok"})


@router.get("/version")
async def version() -> Response:
    return JSON({"version": headrace.__version__})


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Describes the server: the model, the engine's arguments and the load; of several replicas the load of each, with the
    latest routing decisions. Has the arguments of SGLang that its trainers compare; config_format=json adds those of vLLM."""
    state, config_format = described(request), query_word(request, "config_format", "text", "json")
    info, args = state.llm.info, state.llm.args
    answer = {
        "version": headrace.__version__,
        "model": info.model,
        "device": info.device,
        "data_parallel_size": args.data_parallel_size,
        **sglang_args(state, (request.scope["server"] or (None, None))[1]),
        "engine_args": msgspec.to_builtins(args, enc_hook=str),
    }
    if (replicas := state.llm.replicas) is None:
        answer |= _load(state.llm.stats)
    else:
        answer["dp_routing_policy"] = args.dp_routing_policy
        answer["replicas"] = [_replica(status) for status in replicas.status()]
        answer["routing"] = [_decision(decision) for decision in replicas.decisions()]
    if config_format == "json":
        answer["vllm_config"] = vllm_config(state)
    return JSON(answer)


def _replica(status: ReplicaStatus) -> dict[str, Any]:
    stats = status.stats
    return {
        "replica": status.replica,
        "state": status.state,
        "reason": first_line(status.reason),
        "pid": status.pid,
        "device": None if status.info is None else status.info.environment.get("device", status.info.device),
        **_load(stats),
        "accepted": status.routing.accepted,
    }


def _load(stats: EngineStats) -> dict[str, Any]:
    """Sequences that run and wait, and KV blocks, as of the engine's last report."""
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_cache_usage": round(stats.kv_usage, 4),
        "kv_blocks": stats.kv_blocks_total,
        "kv_blocks_free": stats.kv_blocks_total - stats.kv_blocks_used,
    }


def _decision(decision: RoutingDecision) -> dict[str, Any]:
    scores = [score if math.isfinite(score) else None for score in decision.scores]
    return dataclasses.asdict(decision) | {"scores": scores, "waited": round(decision.waited, 6)}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(serving(request).metrics.render(), media_type=CONTENT_TYPE)
