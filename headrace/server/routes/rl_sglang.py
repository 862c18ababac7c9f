"""Routes of trainers under SGLang's names. An update has no begin or end there: between pause and continue, the first call that
writes begins one, and continue finishes it; while generation runs, each call is an update of its own."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.core.weights import GroupSource, GroupSpec, PauseMode
from headrace.errors import RequestError, listed
from headrace.frontend.weights import tensor_specs
from headrace.server.errors import JSON, shown
from headrace.server.routes.rl import (
    CommandRoute,
    RlBody,
    admin,
    backend_of,
    check_announced,
    join,
    rl_body,
    sglang_answer,
    watch_pause,
    weight_directory,
    world_size,
)
from headrace.server.state import Serving, serving

router = APIRouter(dependencies=[Depends(admin)], route_class=CommandRoute)

_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "recompute", "in_place": "keep"}
_SECTIONS = ("all", "core", "memory", "spec", "lora", "disagg", "queues")
"""Parts of SGLang's report of loads."""


class _Pause(RlBody):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Disk(RlBody):
    model_path: str
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _Group(RlBody):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str | None = None


class _Distributed(RlBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _Leave(RlBody):
    group_name: str


class _Check(RlBody):
    action: Literal["snapshot", "reset_tensors", "compare"]


class _Version(RlBody):
    new_version: str
    abort_all_requests: bool = False


@router.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    """Pauses generation. abort: requests end with what they have. retract: they are computed again. in_place: they are
    frozen."""
    body, state = await rl_body(request, _Pause), serving(request)
    answer = await sglang_answer(state.llm.weights.pause(_MODES[body.mode]), "generation is paused")
    watch_pause(state)
    return answer


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Finishes the open update, and goes on with requests."""
    await rl_body(request, RlBody)
    return await sglang_answer(_continue(serving(request)), "generation goes on")


async def _continue(state: Serving) -> None:
    weights = state.llm.weights
    if weights.status().state not in ("serving", "paused"):
        await weights.finish(state.next_version)
        state.next_version = None
    await weights.resume()


@router.get("/flush_cache")
@router.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Forgets every cached prefix, at once: no request that runs keeps it from that."""
    await serving(request).llm.reset_prefix_cache()
    return JSON({"success": True, "message": "the cache was flushed"})


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """An update from the safetensors files of a directory below --weight-root. flush_cache changes nothing: KV of other weights
    is never found."""
    body, state = await rl_body(request, _Disk), serving(request)
    if body.abort_all_requests:
        state.llm.abort_all()

    async def update() -> None:
        await state.llm.weights.update_from_disk(weight_directory(state, body.model_path, "model_path"), body.weight_version)

    return await sglang_answer(update(), "the weights were updated")


@router.post("/init_weights_update_group")
async def init_weights_update_group(request: Request) -> Response:
    """Joins a group of torch's kind, one of several. Answered once all members are there."""
    body, state = await rl_body(request, _Group), serving(request)
    group = GroupSpec(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        rank_offset=body.rank_offset,
        world_size=body.world_size,
        protocol="torch",
        backend=backend_of(state, body.backend),
    )
    return await sglang_answer(join(state, group), "the group was joined")


@router.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: Request) -> Response:
    body = await rl_body(request, _Leave)
    return await sglang_answer(serving(request).llm.weights.leave(body.group_name), "the group was left")


@router.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: Request) -> Response:
    """Writes tensors that rank 0 of a group broadcasts, one by one."""
    body, state = await rl_body(request, _Distributed), serving(request)
    if body.abort_all_requests:
        state.llm.abort_all()
    check_announced(body.names, body.dtypes, body.shapes)
    return await sglang_answer(_receive(state, body), "the weights were written")


async def _receive(state: Serving, body: _Distributed) -> None:
    weights = state.llm.weights
    source = GroupSource(body.group_name, tensor_specs(body.names, body.dtypes, body.shapes))
    if weights.status().state == "serving":
        await weights.update(source, body.weight_version)
        return
    if weights.status().state != "open":
        await weights.begin()
        state.next_version = None
    state.next_version = body.weight_version or state.next_version
    await weights.load(source)


@router.post("/update_weights_from_tensor")
@router.post("/update_weights_from_ipc")
async def update_weights_from_pickles(request: Request) -> Response:
    """400: both bring pickles."""
    message = (
        "pickled tensors and handles are not read, since a pickle may run anything: use /update_weights_from_distributed or "
        "_disk, or /update_weights with shm_name or ipc_handles_json"
    )
    return JSON({"success": False, "message": message}, 400)


@router.get("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    return JSON({"weight_version": serving(request).llm.weights.status().version})


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Response:
    """Gives the present weights another version. Requests are aborted only where the body says so."""
    body, state = await rl_body(request, _Version), serving(request)
    if body.abort_all_requests:
        state.llm.abort_all()
    return await sglang_answer(state.llm.weights.rename(body.new_version), "the weights have the version")


@router.post("/weights_checker")
async def weights_checker(request: Request) -> Response:
    """Checks an update: snapshot keeps sums of all weights, reset_tensors drops the weights, and compare fails if the sums are
    others than the snapshot's."""
    body, state = await rl_body(request, _Check), serving(request)
    return await sglang_answer(_check(state, body.action), f"{body.action}: done")


async def _check(state: Serving, action: str) -> None:
    weights = state.llm.weights
    if action == "reset_tensors":
        await weights.sleep(2, "keep", ["weights"])
        await weights.wake_up()
        return
    sums = await weights.checksums()
    if action == "snapshot":
        state.weight_sums = sums
        return
    if state.weight_sums is None:
        raise RequestError("there is no snapshot to compare with: take one first", "action")
    if differing := sorted(name for name in sums if sums[name] != state.weight_sums.get(name)):
        raise RequestError(f"{len(differing)} weights differ from the snapshot: {listed(differing)}", "action")


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Sequences that run and wait: SGLang's section core. The others that ``include`` may name have nothing to tell here."""
    sections = request.query_params.get("include", "all").split(",")
    if unknown := [one for one in sections if one not in _SECTIONS]:
        raise RequestError(f"include must have some of {', '.join(_SECTIONS)}, not {shown(unknown[0])!r}", "include")
    stats = serving(request).llm.stats
    counts = {
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_reqs": stats.num_running + stats.num_waiting,
    }
    return JSON({**counts, "loads": [{"dp_rank": 0, **counts}]})


def sglang_args(state: Serving, port: int | None) -> dict[str, Any]:
    """Returns the arguments of SGLang's server that slime compares with its own or counts GPUs by.

    Args:
        port: on which the server was reached; None: it listens on a Unix domain socket.
    """
    args, info = state.llm.args, state.llm.info
    return {
        "model_path": info.model,
        "dtype": info.dtype,
        "host": state.settings.host,
        "port": port,
        "tp_size": args.tensor_parallel_size,
        "dp_size": args.data_parallel_size,
        "ep_size": args.tensor_parallel_size if args.enable_expert_parallel else 1,
        "pp_size": 1,
        "num_gpus": world_size(state),
        "base_gpu_id": int(info.device.partition(":")[2] or 0),
        "gpu_id_step": 1,
        "nnodes": 1,
        "node_rank": 0,
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "enable_return_routed_experts": args.enable_return_routed_experts,
    }
