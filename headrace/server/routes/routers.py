"""The routers of every route."""

from __future__ import annotations

from fastapi import APIRouter

from headrace.server.routes import (
    admin,
    chat,
    completions,
    explain,
    features,
    generate,
    lora,
    messages,
    models,
    ollama,
    page,
    pooling,
    render,
    responses,
    status,
    tokens,
)

_GENERATING = (chat, completions, messages, responses, generate, ollama)
ROUTERS: tuple[APIRouter, ...] = tuple(
    part.router for part in (*_GENERATING, pooling, render, features, models, explain, tokens, status, admin, lora, page)
)
"""In the order in which paths are looked up."""
