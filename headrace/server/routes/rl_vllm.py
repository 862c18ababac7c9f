"""Routes of trainers under vLLM's names, with prime-rl's form of /update_weights."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.core.weights import PACKED, GroupSpec, IpcHandle, IpcSource, PauseMode, SegmentSource, WeightResult
from headrace.errors import RequestError
from headrace.frontend.adapters import max_loaded
from headrace.frontend.weights import tensor_specs
from headrace.server.errors import JSON, shown
from headrace.server.routes.rl import (
    CommandRoute,
    RlBody,
    Version,
    admin,
    backend_of,
    check_announced,
    drop_weights,
    join,
    query_flag,
    query_word,
    rl_body,
    watch_pause,
    weight_directory,
    world_size,
)
from headrace.server.state import Serving, serving

router = APIRouter(dependencies=[Depends(admin)], route_class=CommandRoute)

GROUP = "vllm"
"""Name of the one group that these routes join."""


class _Start(RlBody):
    is_checkpoint_format: bool = True
    checksums: bool = False


class _Finish(RlBody):
    weight_version: Version | None = None
    checksums: dict[str, int] = {}


class _UpdateInfo(RlBody):
    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    shm_name: str | None = None
    ipc_handles_json: list[dict[str, IpcHandle]] | None = None
    ipc_handles: Any = None
    ipc_handles_pickled: Any = None


class _Update(RlBody):
    update_info: _UpdateInfo | None = None
    weight_dir: str | None = None


class _InitInfo(RlBody):
    rank_offset: int
    world_size: int
    master_address: str = ""
    master_port: int = 0
    packed: bool = True
    nccl_unique_id_b64: bytes = b""


class _Init(RlBody):
    init_info: _InitInfo


class _Abort(RlBody):
    request_ids: list[str] | None = None


class _Checker(RlBody):
    action: Literal["checksum", "compare", "reset"] = "checksum"
    baseline: dict[str, int] | None = None


def _done(message: str, result: WeightResult) -> Response:
    weights = result.weights
    facts: dict[str, Any] = {"state": weights.state, "version": weights.version, "written": result.written}
    if result.num_kept:
        facts |= {"kept": result.num_kept, "kept_names": result.kept}
    return JSON({"message": message, **facts})


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Pauses generation, with mode abort (default): requests end with what they have; wait: they run to their ends; keep: they
    are frozen, and with kv=recompute computed again. wait_for_inflight_requests is vLLM's older name of wait. clear_cache
    changes nothing: KV of other weights is never found."""
    await rl_body(request, RlBody, "mode", "kv", "clear_cache", "wait_for_inflight_requests")
    mode, kv = query_word(request, "mode", "abort", "wait", "keep"), query_word(request, "kv", "keep", "recompute")
    if query_flag(request, "wait_for_inflight_requests", default=False):
        mode = "wait"
    query_flag(request, "clear_cache")
    if kv == "recompute" and mode != "keep":
        raise RequestError(f"kv=recompute goes with mode=keep, not {mode}", "kv")
    state = serving(request)
    result = await state.llm.weights.pause(cast(PauseMode, "recompute" if kv == "recompute" else mode))
    watch_pause(state)
    return _done("generation is paused", result)


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Goes on with requests. 409 while an update is open, or the weights are not whole."""
    await rl_body(request, RlBody)
    return _done("generation goes on", await serving(request).llm.weights.resume())


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return JSON({"is_paused": serving(request).llm.weights.status().pause is not None})


@router.get("/get_world_size")
async def get_world_size(request: Request) -> Response:
    """Ranks of all replicas, or with include_dp=false of one."""
    state, all_replicas = serving(request), query_flag(request, "include_dp")
    return JSON({"world_size": world_size(state) if all_replicas else state.llm.args.tensor_parallel_size})


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Response:
    """Joins the trainer's group. Answered once all members are there."""
    info, state = (await rl_body(request, _Init)).init_info, serving(request)
    backend = backend_of(state)
    if len(info.nccl_unique_id_b64) not in (0, 128) or bool(info.nccl_unique_id_b64) == bool(info.master_address):
        raise RequestError("give either master_address and master_port, or the 128 bytes of nccl_unique_id_b64", "init_info")
    if info.nccl_unique_id_b64 and backend != "nccl":
        raise RequestError(f"nccl_unique_id_b64 goes with the backend nccl, and this server has {backend}", "init_info")
    group = GroupSpec(
        name=GROUP,
        address=info.master_address,
        port=info.master_port,
        rank_offset=info.rank_offset,
        world_size=info.world_size,
        protocol="vllm",
        backend=backend,
        unique_id=info.nccl_unique_id_b64,
    )
    await join(state, group)
    state.packed = info.packed
    return JSON({"message": "the group was joined"})


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    await rl_body(request, RlBody)
    await serving(request).llm.weights.leave(GROUP)
    return JSON({"message": "the group was left"})


@router.post("/start_weight_update")
async def start_weight_update(request: Request) -> Response:
    """Begins an update, which with ``checksums`` ends with the sender's. ``is_checkpoint_format`` says that names are those of
    checkpoints; other names are not known."""
    body = await rl_body(request, _Start)
    if not body.is_checkpoint_format:
        raise RequestError("tensors are named as in checkpoints: is_checkpoint_format must be true", "is_checkpoint_format")
    return _done("the update has begun", await serving(request).llm.weights.begin(checksums=body.checksums))


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    """Writes the tensors that the trainer broadcasts or shares (update_info), or all of a directory in an update of its own
    (weight_dir)."""
    body, state = await rl_body(request, _Update), serving(request)
    info, folder = body.update_info, body.weight_dir
    if info is None and folder is not None:
        path = weight_directory(state, folder, "weight_dir")
        return _done("the weights were updated", await state.llm.weights.update_from_disk(path))
    if info is None or folder is not None:
        raise RequestError("give either update_info or weight_dir", "update_info")
    if info.ipc_handles is not None or info.ipc_handles_pickled is not None:
        raise RequestError(
            "pickled handles are not read, since a pickle may run anything: send ipc_handles_json, as "
            "headrace.weights.transport.shared.ipc_handle makes them",
            "update_info",
        )
    if info.shm_name is not None:
        return _done("the weights were written", await state.llm.weights.load(SegmentSource(info.shm_name)))
    if not info.names:  # As before.
        info = msgspec.structs.replace(state.announced or info, packed=info.packed, ipc_handles_json=info.ipc_handles_json)
    state.announced = info
    check_announced(info.names, info.dtype_names, info.shapes)
    if (handles := info.ipc_handles_json) is not None:
        if len(handles) != len(info.names):
            raise RequestError(f"there are {len(info.names)} names and {len(handles)} handles", "update_info")
        tensors = tensor_specs(info.names, info.dtype_names, info.shapes)
        return _done("the weights were written", await state.llm.weights.load(IpcSource(tensors, handles)))
    packed = state.packed if info.packed is None else info.packed
    result = await state.llm.weights.receive(GROUP, info.names, info.dtype_names, info.shapes, packed=packed)
    return _done("the weights were written", result)


@router.post("/abort_weight_update")
async def abort_weight_update(request: Request) -> Response:
    """Gives the open update up. The weights are torn if something was written."""
    await rl_body(request, RlBody)
    return _done("the update was given up", await serving(request).llm.weights.fail())


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> Response:
    """Ends the update. 409 after a failure, until an update has written all weights; or if tensors differ from the sums."""
    body = await rl_body(request, _Finish)
    done = await serving(request).llm.weights.finish(body.weight_version, checksums=body.checksums)
    return _done("the update is finished", done)


@router.get("/weight_info")
async def weight_info(request: Request) -> Response:
    """State and version of the weights, and the groups that were joined."""
    return JSON(serving(request).llm.weights.status())


@router.post("/weights/accept_files")
async def accept_files(request: Request) -> Response:
    """Serves the weights of the model's files, although others were served before the engine was started again."""
    await rl_body(request, RlBody)
    return _done("the files' weights are served", await serving(request).llm.weights.accept_files())


@router.post("/weight_checker")
async def weight_checker(request: Request) -> Response:
    """64-bit sums of all weights, by their names in the checkpoint; or with compare those that differ from a baseline, which
    may be the trainer's; reset drops the weights."""
    body = await rl_body(request, _Checker)
    if body.action == "reset":
        await drop_weights(serving(request))
        return _done("the weights were dropped", WeightResult(weights=serving(request).llm.weights.status()))
    if body.action == "compare" and body.baseline is None:
        raise RequestError("baseline is missing: compare needs the sums that checksum gave", "baseline")
    found = await serving(request).llm.weights.sums()
    if body.baseline is None or body.action == "checksum":
        return JSON({"checksums": found.checksums, "tied": found.tied})
    return JSON(_compared(found, body.baseline))


def _compared(found: WeightResult, baseline: dict[str, int]) -> dict[str, Any]:
    """Raises: RequestError: the baseline has a weight of which there is no such sum; names it."""
    sums = found.checksums
    given = {found.tied.get(name, name): value for name, value in baseline.items()}
    for name in given:
        if name not in sums and name + PACKED in sums:
            text = f"{name} is kept packed, and no sum of the checkpoint's tensor can be made: leave it out of the baseline"
            raise RequestError(text, "baseline")
        if name not in sums:
            raise RequestError(f"baseline has {shown(name)}, and the model has no such weight", "baseline")
    differing = sorted(name for name, value in baseline.items() if sums[found.tied.get(name, name)] != value)
    lacking = sorted(sums.keys() - given.keys())
    differing += [name for name in lacking if not name.endswith(PACKED)]
    return {"equal": not differing, "differing": differing, "unchecked": [name for name in lacking if name.endswith(PACKED)]}


@router.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """Ends requests with what they have: those of the ids, or all."""
    body, state = await rl_body(request, _Abort), serving(request)
    if body.request_ids is None:
        state.llm.abort_all()
    for request_id in body.request_ids or ():
        await state.llm.abort(request_id)
    return JSON({"message": "the requests were aborted"})


@router.get("/liveness")
async def liveness(request: Request) -> Response:
    serving(request).check_live()
    return JSON({"status": "ok"})


def _lora_config(state: Serving) -> dict[str, Any]:
    args = state.llm.args
    return {
        "max_lora_rank": args.max_lora_rank,
        "max_loras": args.max_loras,
        "max_cpu_loras": max_loaded(args),
        "fully_sharded_loras": False,
        "lora_dtype": f"torch.{state.llm.info.dtype}",
        "target_modules": list(args.lora_target_modules) or None,
    }


def vllm_config(state: Serving) -> dict[str, Any]:
    """Returns the fields of vLLM's configuration that TRL reads."""
    args, info = state.llm.args, state.llm.info
    return {
        "model_config": {"model": info.model, "dtype": f"torch.{info.dtype}", "max_model_len": info.max_model_len},
        "lora_config": _lora_config(state) if args.enable_lora else None,
        "parallel_config": {
            "data_parallel_size": args.data_parallel_size,
            "tensor_parallel_size": args.tensor_parallel_size,
        },
        "weight_transfer_config": dataclasses.asdict(args.weight_transfer_config) | {"backend": backend_of(state)},
    }
