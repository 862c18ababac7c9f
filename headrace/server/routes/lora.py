"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them; /load_lora_adapter and /unload_lora_adapter, as
SGLang has them, where loading replaces."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from headrace.errors import ConfigError, ConflictError, RequestError
from headrace.frontend.adapters import LoRARequest
from headrace.server.errors import JSON, ApiError
from headrace.server.request import posts
from headrace.server.schema import LoadLoraBody, UnloadLoraBody
from headrace.server.state import Serving

router = APIRouter()


@posts(router, "/v1/load_lora_adapter", kind=LoadLoraBody)
async def load(request: Request, state: Serving, body: LoadLoraBody) -> Response:
    """Load a LoRA adapter into every engine. 400 if the name is taken, unless load_inplace is set."""
    await _load(state, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@posts(router, "/v1/unload_lora_adapter", kind=UnloadLoraBody)
async def unload(request: Request, state: Serving, body: UnloadLoraBody) -> Response:
    """Forget a LoRA adapter. Requests that run with it go on."""
    await state.llm.unload_lora(body.lora_name, body.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@posts(router, "/load_lora_adapter", kind=LoadLoraBody)
async def load_in_place(request: Request, state: Serving, body: LoadLoraBody) -> Response:
    """Load a LoRA adapter, or replace the one that has the name."""
    await _load(state, msgspec.structs.replace(body, load_inplace=True))
    return _loaded(state)


@posts(router, "/unload_lora_adapter", kind=UnloadLoraBody)
async def unload_in_place(request: Request, state: Serving, body: UnloadLoraBody) -> Response:
    """Forget a LoRA adapter."""
    await state.llm.unload_lora(body.lora_name, body.lora_int_id)
    return _loaded(state)


def _loaded(state: Serving) -> Response:
    adapters = {one.name: one.path for one in state.llm.adapters.names}
    return JSON({"success": True, "error_message": "", "loaded_adapters": adapters})


async def _load(state: Serving, body: LoadLoraBody) -> None:
    """Raises: ApiError: the path may not be read, or is not an adapter that can be served."""
    if body.lora_name in state.model.names:
        raise RequestError(f"{body.lora_name!r} is a name of the model", "lora_name")
    if body.pinned:
        raise RequestError("pinned must be false: all adapters share the places on the device", "pinned")
    wanted = LoRARequest(
        body.lora_name, body.lora_int_id, str(_path(state, body.lora_path)), body.load_inplace, body.is_3d_lora_weight
    )
    try:
        await state.llm.load_lora(wanted, new=not body.load_inplace)
    except ConfigError as error:
        raise RequestError(error.message, error.param) from error
    except ConflictError as error:
        # A name that is taken is a 400 of vLLM's.
        raise error if error.code == "max_cpu_loras" else RequestError(error.message, error.param) from error


def _path(state: Serving, given: str) -> Path:
    """The path, links resolved, if it is in the directory of adapters.

    Raises:
        ApiError: 403: there is no such directory, or the path leads out of it.
        RequestError: it is not a path.
    """
    root = state.settings.lora_root
    if root is None:
        raise ApiError(403, "clients may load no adapters: start the server with --lora-root DIRECTORY", param="lora_path")
    try:
        root = root.expanduser().resolve()
        path = (root / given).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"lora_path cannot be resolved: {error}", "lora_path") from error
    if not path.is_relative_to(root):
        raise ApiError(403, f"lora_path must be below {root} (--lora-root)", param="lora_path")
    return path
