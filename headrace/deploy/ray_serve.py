"""The application: a thin ingress, and engines that Ray Serve places, scales, watches and replaces."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headrace.config import EngineArgs
from headrace.deploy.call import HttpCall, HttpStart, answered
from headrace.deploy.config import DeployConfig
from headrace.deploy.ray_router import PolicyRouter
from headrace.frontend.async_llm import AsyncLLM
from headrace.processes.replicas import capacity_of
from headrace.server.app import build_app
from headrace.server.body import BodyBudget
from headrace.server.errors import ApiError, unavailable
from headrace.server.settings import ServerSettings
from headrace.server.state import MAX_JSON_VALUES, Serving

logger = logging.getLogger("headrace.deploy")

_STATS_SECONDS = 1.0


class EngineReplica:
    """One engine in a separate process, with the application of a server, without its socket."""

    async def __init__(self, args: EngineArgs, settings: ServerSettings) -> None:  # type: ignore[misc]
        self._llm = AsyncLLM(args)
        self._app = build_app(self._llm, settings)
        self._serving: Serving = self._app.state.serving
        await self._serving.start()
        if self._serving.failure is not None:
            raise self._serving.failure

    def check_health(self) -> None:
        """An engine that died is restarted in its replica: only one that stays down ends the replica."""
        self._serving.check_live()

    def record_routing_stats(self) -> dict[str, Any]:
        return {"ready": self._serving.health()[0], "kv_tokens": capacity_of(self._llm.info).kv_tokens}

    async def answer(self, call: HttpCall) -> AsyncIterator[HttpStart | bytes]:
        async with contextlib.aclosing(answered(self._app, call)) as parts:
            async for part in parts:
                yield part

    async def __del__(self) -> None:
        # After the requests in flight, for which Ray Serve waits.
        if hasattr(self, "_llm"):
            await self._llm.close()


class Ingress:
    """Reads whole requests, so that routing can look at their prompts, and passes the answers on."""

    def __init__(self, engines: DeploymentHandle, settings: ServerSettings) -> None:
        self._answer = engines.options(method_name="answer", stream=True)
        self._settings = settings
        self._bodies = BodyBudget(settings)

    async def __call__(self, request: Request) -> Response:
        is_json = "json" in request.headers.get("content-type", "")
        max_values = (self._settings.max_json_values or MAX_JSON_VALUES) if is_json else None
        body = self._bodies.json(request, max_values)
        try:
            await body.read(request)
            # Held until it is answered: it may run again.
            return await self._answered(request, bytes(body.data))
        except ApiError as error:
            return error.response(request.scope)
        finally:
            body.release()

    async def _answered(self, request: Request, body: bytes) -> Response:
        scope = request.scope
        client = None if request.client is None else (request.client.host, request.client.port)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        call = HttpCall(request.method, path, scope["query_string"], list(scope["headers"]), body, client)
        # Nothing was streamed yet: it may run once more, and not end one replica after the other.
        for last in (False, True):
            parts = self._answer.remote(call)
            try:
                start = await anext(parts)
            except RayActorError as error:
                logger.warning("a replica is gone%s: %s", "" if last else ", and its request runs again", error)
            except (BackPressureError, RayServeException, RayError) as error:
                reason = f"no replica takes the request: {type(error).__name__}"
                logger.warning("%s: %s", reason, error)
                raise unavailable(reason, self._settings.retry_after) from None
            else:
                return _streamed(start, parts)
        raise unavailable("the replicas that had the request died", self._settings.retry_after)


def _streamed(start: HttpStart, parts: Any) -> Response:
    events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start.headers)

    async def body() -> AsyncIterator[bytes]:
        try:
            yield start.body
            async for part in parts:
                yield part
        except RayError as error:
            if not events:
                raise
            logger.warning("a replica is gone in the middle of an answer: %s", error)
            yield b"data: " + msgspec.json.encode(unavailable("the replica died", 0).body) + b"\n\n"
        finally:
            parts.cancel()

    response = StreamingResponse(body(), start.status)
    response.raw_headers = start.headers
    return response


def application(config: DeployConfig) -> Any:
    """The application of Ray Serve."""
    most = (config.deployment.get("autoscaling_config") or {}).get("max_replicas", config.deployment.get("num_replicas", 1))
    router = RequestRouterConfig(
        request_router_class=PolicyRouter,
        # Twice: while a new version replaces the old one.
        request_router_kwargs={"policy": config.engine.dp_routing_policy, "max_replicas": 2 * most + 1},
        request_routing_stats_period_s=_STATS_SECONDS,
    )
    engines = serve.deployment(EngineReplica, name="engine").options(**({"request_router_config": router} | config.deployment))
    ingress = serve.deployment(Ingress, name="ingress").options(**({"max_ongoing_requests": 4096} | config.ingress))
    return ingress.bind(engines.bind(config.engine, config.settings), config.settings)
