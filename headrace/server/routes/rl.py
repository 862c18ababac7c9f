"""Parts that the routes of both dialects for trainers share: who may call them, bodies, and directories of weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from headrace.core.weights import GroupSpec
from headrace.errors import EngineDeadError, RequestError, WeightsError, did_you_mean, unknown
from headrace.server.body import ADMIN, json_object
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.shape.turns import Kind
from headrace.server.state import Serving, serving

logger = logging.getLogger("headrace.server")

T = TypeVar("T", bound=msgspec.Struct)

Version = Annotated[str, msgspec.Meta(max_length=256)]
"""Name of a version of the weights."""

_REMINDER_SECONDS = 60.0
_REMEMBERED = 64
"""Commands whose answers are kept for clients that send them again."""


def admin(request: Request) -> None:
    """Raises: ApiError 403: the request's key is not an admin's."""
    if serving(request).settings.api_keys and not request.scope.get(ADMIN):
        raise ApiError(403, "this route needs an admin key (--admin-key)", code="admin_key_needed")


class CommandRoute(APIRoute):
    """A route whose commands may be sent again: one with the ``X-Request-Id`` of an earlier one that succeeded, or is under
    way, gets its answer, and nothing is done twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def once(request: Request) -> Response:
            name = request.headers.get("x-request-id")
            if name is None or request.method != "POST":
                return await handle(request)
            admin(request)
            key, answers = (f"{request.url.path}?{request.url.query}", name), serving(request).command_answers
            if (command := answers.get(key)) is None:
                command = answers[key] = asyncio.ensure_future(handle(request))
                while len(answers) > _REMEMBERED:
                    del answers[next(iter(answers))]
            try:
                # A client that goes away leaves the command to those that ask again.
                answer = await asyncio.shield(command)
            except Exception:
                answers.pop(key, None)
                raise
            if answer.status_code != 200:
                answers.pop(key, None)
            # Middleware adds headers to the answer that it sends.
            return Response(answer.body, answer.status_code, media_type=answer.media_type)

        return once


class RlBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body of a trainer's call. Fields that it does not know are refused."""


def query_word(request: Request, name: str, *words: str) -> str:
    """Returns a parameter of the query, the first of ``words`` by default. Raises: RequestError: it is another word."""
    word = request.query_params.get(name, words[0])
    if word not in words:
        raise RequestError(f"{name} must be one of {', '.join(sorted(words))}, not {shown(word)!r}", name)
    return word


def query_flag(request: Request, name: str, *, default: bool = True) -> bool:
    """Returns a parameter of the query that is a boolean. Raises: RequestError: it is none."""
    words = ("true", "false", "True", "False", "1", "0")
    return query_word(request, name, *words) in ("true", "True", "1") if name in request.query_params else default


async def rl_body(request: Request, kind: type[T], *parameters: str) -> T:
    """Reads a body, which may be absent, with its Content-Type.

    Args:
        parameters: names that the query may have.

    Raises:
        ApiError, RequestError: it is not what the route takes.
    """
    if other := next((name for name in request.query_params if name not in parameters), None):
        raise unknown(shown(other), did_you_mean(shown(other), parameters))
    state, fields = serving(request), dict[str, Any]()
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if not empty:
        fields = await json_object(request, state.settings, state.bodies, state.max_json_values)
    if misplaced := next((name for name in parameters if name in fields), None):
        where = f"POST {request.url.path}?{misplaced}=..."
        raise RequestError(f"{misplaced} is a parameter of the query, not a field of the body: {where}", misplaced)
    read: T = Kind(kind).checked(fields, strict=False)
    return read


def weight_directory(state: Serving, path: str, param: str) -> Path:
    """Returns the directory of a checkpoint.

    Raises:
        RequestError: there is none, or it is not below --weight-root.
    """
    root = state.settings.weight_root
    if root is None:
        raise RequestError("the server reads no weights from files: start it with --weight-root DIRECTORY", param)
    folder = Path(path).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise RequestError(f"{param} must lie below {root} (--weight-root)", param)
    if not folder.is_dir():
        raise RequestError(f"{param}: there is no directory {folder}", param)
    return folder


def world_size(state: Serving) -> int:
    """Ranks of all replicas."""
    args = state.llm.args
    return args.tensor_parallel_size * args.data_parallel_size


def backend_of(state: Serving, wanted: str | None = None) -> Any:
    """Returns the library of a group's collectives. ``wanted``: by the request; None: the server's."""
    backend = wanted or state.llm.args.weight_transfer_config.backend
    if backend == "auto":
        backend = "nccl" if state.llm.info.device.startswith("cuda") else "gloo"
    if backend not in ("gloo", "nccl"):
        raise RequestError(f"backend must be gloo or nccl, not {backend!r}", "backend")
    return backend


def check_announced(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
    """Raises: RequestError: the lists differ in length."""
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes", "names")


def in_sglangs_form(command: Callable[[Request], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
    """Decorates a command, which returns the message of its answer. 400 says that it failed."""

    async def answer(request: Request) -> Response:
        try:
            message = await command(request)
        except (WeightsError, RequestError, EngineDeadError) as error:
            return JSON({"success": False, "message": str(error)}, 400)
        return JSON({"success": True, "message": message})

    answer.__name__, answer.__doc__ = command.__name__, command.__doc__
    return answer


async def drop_weights(state: Serving) -> None:
    """Leaves the weights without values, until an update of all of them."""
    await state.llm.weights.sleep(2, "keep", ["weights"])
    await state.llm.weights.wake_up()


async def join(state: Serving, group: GroupSpec) -> None:
    """Raises: RequestError: the group has no room for all ranks. WeightsError: its members did not come together."""
    own, end = world_size(state), group.rank_offset + world_size(state)
    if not 1 <= group.rank_offset < end <= group.world_size:
        text = f"ranks {group.rank_offset} to {end - 1} ({own} of the server) do not fit a group of {group.world_size}"
        raise RequestError(f"{text}, whose rank 0 is the trainer's", "world_size")
    await state.llm.weights.join(group)


def watch_pause(state: Serving) -> None:
    """Warns in the log while a pause lasts longer than ``pause_timeout``."""
    if state.settings.pause_timeout is None or (state.pause_watch is not None and not state.pause_watch.done()):
        return
    state.pause_watch = asyncio.create_task(_remind(state, state.settings.pause_timeout))


async def _remind(state: Serving, seconds: float) -> None:
    lasted, wait = 0.0, seconds
    while state.llm.weights.status().pause is not None:
        await asyncio.sleep(wait)
        lasted, wait = lasted + wait, _REMINDER_SECONDS
        if (mode := state.llm.weights.status().pause) is not None:
            logger.warning("generation has been paused (%s) for %.0f s", mode, lasted)
