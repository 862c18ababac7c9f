"""The routers of every route, but for those of trainers."""

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
    ollama_embed,
    ollama_pull,
    page,
    pooling,
    render,
    responses,
    status,
    tokens,
)

_GENERATING = (chat, completions, messages, responses, generate, ollama)
_OTHERS = (ollama_embed, ollama_pull, pooling, render, features, models, explain, tokens, status, admin, lora, page)
ROUTERS: tuple[APIRouter, ...] = tuple(part.router for part in (*_GENERATING, *_OTHERS))
"""In the order in which paths are looked up."""
