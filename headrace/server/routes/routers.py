"""The routers of every route."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.routes import (
    admin,
    chat,
    completions,
    features,
    inspect,
    lora,
    messages,
    models,
    page,
    responses,
    status,
    tokens,
)

_GENERATING = (chat, completions, messages, responses)
ROUTERS: tuple[APIRouter, ...] = tuple(
    part.router for part in (*_GENERATING, features, models, inspect, tokens, status, admin, lora, page)
)
"""In the order in which paths are looked up."""
