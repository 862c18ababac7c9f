"""Messages between ``TemplateRenderer`` and its process, in msgpack."""

from __future__ import annotations

from typing import Any

import msgspec


class TemplateJob(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render, and with what."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text of a conversation, or why there is none."""

    text: str = ""
    error: str | None = None
