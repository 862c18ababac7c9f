"""Routes of trainers under SGLang's names. An update has no begin or end there: between pause and continue, the first call that
writes begins one, and continue finishes it; while generation runs, each call is an update of its own."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from headrace.core.weights import GroupSource, GroupSpec, PauseMode, WeightResult
from headrace.errors import RequestError, listed
from headrace.frontend.weights import tensor_specs
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.routes.rl import (
    CommandRoute,
    RlBody,
    Version,
    admin,
    backend_of,
    check_announced,
    drop_weights,
    in_sglangs_form,
    join,
    rl_body,
    watch_pause,
    weight_directory,
    world_size,
)
from headrace.server.state import Serving, serving

router = APIRouter(dependencies=[Depends(admin)], route_class=CommandRoute)

_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "recompute", "in_place": "keep"}
_WORKER = "0"
"""Id of this server as a worker of its own."""
_SECTIONS = ("all", "core", "memory", "spec", "lora", "disagg", "queues")
"""Parts of SGLang's report of loads."""
_WHOLE = 2**62
"""Bytes that no pack of tensors has: all tensors of a call come in one."""


class _Pause(RlBody):
    mode: Literal["abort", "retract", "in_place"] = "abort"
    abort_below_start_weight_version: int | None = None


class _Disk(RlBody):
    model_path: str
    weight_version: Version | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class _Continue(RlBody):
    torch_empty_cache: bool = True


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
    weight_version: Version | None = None
    load_format: Literal["auto", "flattened_bucket"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class _Leave(RlBody):
    group_name: str


class _End(RlBody):
    weight_version: Version | None = None


class _Worker(RlBody):
    url: str
    worker_type: Literal["regular"] = "regular"


class _Check(RlBody):
    action: Literal["snapshot", "reset_tensors", "compare"]


class _Version(RlBody):
    new_version: Version
    abort_all_requests: bool = False


@router.post("/pause_generation")
@in_sglangs_form
async def pause_generation(request: Request) -> str:
    """Pauses generation. abort: requests end with what they have. retract: they are computed again. in_place: they are
    frozen. With the last two, abort_below_start_weight_version ends those that began with weights of a lower number."""
    body, state = await rl_body(request, _Pause), serving(request)
    name, lowest = "abort_below_start_weight_version", body.abort_below_start_weight_version
    if lowest is not None and body.mode == "abort":
        raise RequestError(f"{name} goes with the modes retract and in_place: abort ends all requests", name)
    await state.llm.weights.pause(_MODES[body.mode])
    watch_pause(state)
    if lowest is not None:
        await state.abort_begun_before(lowest)
    return "generation is paused"


@router.post("/continue_generation")
@in_sglangs_form
async def continue_generation(request: Request) -> str:
    """Finishes the open update, and goes on with requests. torch_empty_cache changes nothing: updates are written in place."""
    await rl_body(request, _Continue)
    weights = serving(request).llm.weights
    kept = ""
    if weights.status().updating or weights.status().state in ("torn", "lost", "hollow"):
        kept = await _finish(serving(request), None)
    await weights.resume()
    return "generation goes on" + kept


async def _finish(state: Serving, version: str | None) -> str:
    """``version``: None: the one that came with the tensors. Returns what the answer says of tensors that were not sent."""
    result = await state.llm.weights.finish(version or state.next_version)
    state.next_version = None
    return _kept(result)


def _kept(result: WeightResult) -> str:
    more = f" and {others} more" if (others := result.num_kept - len(result.kept)) else ""
    return f"; kept, as they were not sent: {', '.join(result.kept)}{more}" if result.num_kept else ""


@router.post("/begin_weight_update")
@in_sglangs_form
async def begin_weight_update(request: Request) -> str:
    """Begins an update, which /end_weight_update ends."""
    await rl_body(request, RlBody)
    await _begin(serving(request))
    return "the update has begun"


async def _begin(state: Serving) -> None:
    await state.llm.weights.begin()
    state.next_version = None


@router.post("/end_weight_update")
@in_sglangs_form
async def end_weight_update(request: Request) -> str:
    """Ends the update. 400 after a failure, until an update has written all weights."""
    body = await rl_body(request, _End)
    return "the update is finished" + await _finish(serving(request), body.weight_version)


@router.get("/flush_cache")
@router.post("/flush_cache")
@in_sglangs_form
async def flush_cache(request: Request) -> str:
    """Forgets every cached prefix, at once: no request that runs keeps it from that."""
    await serving(request).llm.reset_prefix_cache()
    return "the cache was flushed"


@router.post("/update_weights_from_disk")
@in_sglangs_form
async def update_weights_from_disk(request: Request) -> str:
    """An update from the safetensors files of a directory below --weight-root. flush_cache changes nothing, since KV of other
    weights is never found, nor do torch_empty_cache and recapture_cuda_graph: weights are written in place."""
    body, state = await rl_body(request, _Disk), serving(request)
    folder = weight_directory(state, body.model_path, "model_path")
    if body.abort_all_requests:
        state.llm.abort_all()
    return "the weights were updated" + _kept(await state.llm.weights.update_from_disk(folder, body.weight_version))


@router.post("/init_weights_update_group")
@in_sglangs_form
async def init_weights_update_group(request: Request) -> str:
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
    await join(state, group)
    return "the group was joined"


@router.post("/destroy_weights_update_group")
@in_sglangs_form
async def destroy_weights_update_group(request: Request) -> str:
    """Leaves a group."""
    body = await rl_body(request, _Leave)
    await serving(request).llm.weights.leave(body.group_name)
    return "the group was left"


@router.post("/update_weights_from_distributed")
@in_sglangs_form
async def update_weights_from_distributed(request: Request) -> str:
    """Writes tensors that rank 0 of a group broadcasts, one by one."""
    body, state = await rl_body(request, _Distributed), serving(request)
    check_announced(body.names, body.dtypes, body.shapes)
    if body.abort_all_requests:
        state.llm.abort_all()
    weights = state.llm.weights
    packed_bytes = _WHOLE if body.load_format == "flattened_bucket" else None
    source = GroupSource(body.group_name, tensor_specs(body.names, body.dtypes, body.shapes), packed_bytes)
    if weights.status().state == "serving":
        await weights.update(source, body.weight_version)
    else:
        if not weights.status().updating:
            await _begin(state)
        state.next_version = body.weight_version or state.next_version
        await weights.load(source)
    return "the weights were written"


@router.post("/update_weights_from_tensor")
@router.post("/update_weights_from_ipc")
@in_sglangs_form
async def update_weights_from_pickles(request: Request) -> str:
    """400: both bring pickles."""
    raise RequestError(
        "pickled tensors and handles are not read, since a pickle may run anything: use /update_weights_from_distributed or "
        "_disk, or /update_weights with shm_name or ipc_handles_json"
    )


@router.get("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    return JSON({"weight_version": serving(request).llm.weights.status().version})


@router.post("/update_weight_version")
@in_sglangs_form
async def update_weight_version(request: Request) -> str:
    """Gives the present weights another version. Requests are aborted only where the body says so."""
    body, state = await rl_body(request, _Version), serving(request)
    if body.abort_all_requests:
        state.llm.abort_all()
    await state.llm.weights.rename(body.new_version)
    return "the weights have the version"


@router.post("/weights_checker")
@in_sglangs_form
async def weights_checker(request: Request) -> str:
    """Checks an update: snapshot keeps sums of all weights, reset_tensors drops the weights, and compare fails if the sums are
    others than the snapshot's."""
    body, state = await rl_body(request, _Check), serving(request)
    if body.action == "reset_tensors":
        await drop_weights(state)
        return "the weights were dropped"
    sums = await state.llm.weights.checksums()
    if body.action == "snapshot":
        state.weight_sums = sums
        return "the sums of all weights are kept"
    if state.weight_sums is None:
        raise RequestError("there is no snapshot to compare with: take one first", "action")
    if differing := sorted(name for name in sums if sums[name] != state.weight_sums.get(name)):
        raise RequestError(f"{len(differing)} weights differ from the snapshot: {listed(differing)}", "action")
    return "all weights are those of the snapshot"


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """SGLang's description of the model, with the version of its weights."""
    state = serving(request)
    return JSON(
        {
            "model_path": state.llm.info.model,
            "tokenizer_path": state.llm.args.tokenizer or state.llm.info.model,
            "is_generation": state.llm.inputs.no_text is None,
            "weight_version": state.llm.weights.status().version,
        }
    )


# SGLang's router: this server stands for one whose only worker it is.


@router.get("/workers")
async def workers(request: Request) -> Response:
    """The engine's address in SGLang's router, by which trainers abort requests: that of this server."""
    worker = {"id": _WORKER, "url": _own_url(request), "worker_type": "regular", "is_healthy": True}
    return JSON({"workers": [worker], "total": 1})


@router.post("/workers")
async def add_worker(request: Request) -> Response:
    """Takes this server for a worker. 400: it is another one, to which nothing would be sent."""
    body = await rl_body(request, _Worker)
    if urlsplit(body.url).netloc not in (urlsplit(_own_url(request)).netloc, _listens_at(request)):
        raise RequestError(f"url must be {_own_url(request)}: this server sends requests to its own engines alone", "url")
    return JSON({"status": "accepted", "worker_id": _WORKER, "url": body.url})


@router.delete("/workers/{worker_id}")
async def remove_worker(request: Request, worker_id: str) -> Response:
    """Takes leave of a worker that ends: this server ends by itself."""
    if worker_id != _WORKER:
        raise ApiError(404, f"there is no worker {shown(worker_id)!r}")
    return JSON({"status": "accepted", "worker_id": _WORKER})


def _own_url(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def _listens_at(request: Request) -> str:
    return f"{serving(request).settings.host}:{request.url.port}"


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
        "enable_memory_saver": state.settings.enable_memory_saver and state.settings.trains,
        "enable_return_routed_experts": args.enable_return_routed_experts,
    }
