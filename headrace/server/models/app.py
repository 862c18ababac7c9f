"""The app of a server of several models."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware

from headrace.server.app import assemble, outermost, routers
from headrace.server.models.dispatch import Dispatch
from headrace.server.models.host import ModelHost
from headrace.server.models.routes import router


def build_host(host: ModelHost) -> FastAPI:
    """An app with the routes of one model, each of which ``Dispatch`` hands to the app of the model that is meant, and with
    routes about the server."""
    every = [router, *routers(host.settings)]
    return assemble(host, every, [*outermost(host), Middleware(Dispatch, host=host, routers=every)])
