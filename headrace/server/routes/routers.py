"""The routers of every route."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.routes import (
    admin,
    chat,
    completions,
    features,
    inspect,
    messages,
    models,
    ollama,
    page,
    responses,
    status,
    tokens,
)

_GENERATING = (chat, completions, messages, responses, ollama)
ROUTERS: tuple[APIRouter, ...] = tuple(
    part.router for part in (*_GENERATING, features, models, inspect, tokens, status, admin, page)
)
"""In the order in which paths are looked up."""
