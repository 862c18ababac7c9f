"""The FastAPI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

import headrace
from headrace.server.errors import install_handlers
from headrace.server.generation import cancelled
from headrace.server.middleware import AllowedHosts, ApiKeys, HeadAsGet, Observe, SameOrigin
from headrace.server.routes.routers import ROUTERS
from headrace.server.routes.trainers import NO_TRAINERS, TRAINERS
from headrace.server.settings import ServerSettings
from headrace.server.sse import SEND
from headrace.server.state import ServerState, Serving

if TYPE_CHECKING:
    from headrace.frontend.async_llm import AsyncLLM


class _App(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault(SEND, send)
        await super().__call__(scope, receive, send)


def build_app(llm: AsyncLLM, settings: ServerSettings | None = None) -> FastAPI:
    """The OpenAI-compatible API over an engine; ``app.state.serving`` is its state.

    The app's lifespan starts the engine in the background, so that /health can tell the reason (503) while it loads,
    and closes it at the end.
    """
    serving = Serving(llm, settings or ServerSettings())
    return assemble(serving, routers(serving.settings), outermost(serving))


def routers(settings: ServerSettings) -> tuple[APIRouter, ...]:
    """The routers of a model's routes; of --enable-rl-api's among them."""
    return (*ROUTERS, *(TRAINERS if settings.trains else NO_TRAINERS))


def assemble(state: ServerState, routers: Iterable[APIRouter], middleware: Sequence[Middleware] = ()) -> FastAPI:
    """An app of some routers. ``state.start`` and ``state.close`` are its lifespan, if a server runs it."""
    app = _App(
        title="headrace",
        version=headrace.__version__,
        docs_url=None,
        redoc_url=None,
        middleware=middleware,
        lifespan=_lifespan,
    )
    app.state.serving = state
    install_handlers(app, state.settings.retry_after)
    for router in routers:
        app.include_router(router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.serving
    starting = asyncio.create_task(state.start())
    try:
        yield
    finally:
        await cancelled(starting)
        await state.close()


def outermost(state: ServerState) -> list[Middleware]:
    """The middleware of a server, outermost first. CORS answers preflights, which carry no key."""
    settings, stack = state.settings, []
    if settings.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_credentials=settings.cors_credentials,
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    stack.append(Middleware(Observe, server=state))
    if settings.allowed_hosts:
        stack.append(Middleware(AllowedHosts, names=settings.allowed_hosts))
    if settings.api_keys:
        stack.append(Middleware(ApiKeys, keys=settings.api_keys, admin_keys=settings.admin_keys))
    else:
        stack.append(Middleware(SameOrigin, others=settings.cors_origins))
    stack.append(Middleware(HeadAsGet))
    return stack
