"""Fields that agents send beyond the parts of an API that this server knows: those of betas, and hints to the models of
others."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from fastapi import Request

from headrace.errors import RequestError
from headrace.options import Endpoint
from headrace.server.body import caller
from headrace.server.fields import rules, takes
from headrace.server.shape import items, messages
from headrace.server.shape.seal import is_sealed
from headrace.server.shape.unknown_keys import unknown_keys
from headrace.server.state import Serving
from headrace.text.effort import EffortVariables

logger = logging.getLogger("headrace.server")
_AGENTS = re.compile(r"claude-cli/|codex", re.IGNORECASE)
_MESSAGES = {
    "messages": list[messages.Turn],
    "system": list[messages.Text],
    "tools": list[messages.Tool],
    "tool_choice": messages.ToolChoice,
    "thinking": messages.ThinkingConfig,
    "output_config": messages.OutputConfig,
}
_RESPONSES = {
    "input": list[items.Item],
    "tools": list[items.Tool],
    "tool_choice": items.ToolChoice,
    "text": items.TextConfig,
    "reasoning": items.ReasoningConfig,
}
_PARTS: Mapping[Endpoint, Mapping[str, Any]] = {"messages": _MESSAGES, "count_tokens": _MESSAGES, "responses": _RESPONSES}
"""Types of the fields whose objects agents extend."""
_HINTS = frozenset(
    {
        *("context_management", "service_tier", "speed", "diagnostics", "inference_geo", "prompt_cache_options"),
        *("prompt_cache_retention", "moderation", "access_programs", "metadata", "client_metadata"),
    }
)
"""Fields that ask for how an answer is made, not for which, and labels: an agent works without them."""
_WORDS = (
    ("reasoning", "summary", items.Summary),
    ("reasoning", "generate_summary", items.Summary),
    ("thinking", "display", messages.Display),
)
"""Fields of objects that say how reasoning is shown, and the words that are known."""
_HOSTED = re.compile(
    r"(web_search|image_generation|tool_search|code_interpreter|file_search|computer|mcp|local_shell|shell|apply_patch)"
    r"_(call|call_output|output|list_tools|approval_request|approval_response)|server_tool_use|mcp_tool_use|\w+_tool_result"
)
"""Types of items and blocks in which conversations with a provider have the calls and results of tools that are not here."""
_EFFORTS = (("output_config", "effort"), ("reasoning", "effort"))
_LISTED = 16


class _Extra(NamedTuple):
    owner: Any
    name: str | int
    """A key of the owner, an object; or a place in it, a list."""
    path: str


async def without_extras(request: Request, state: Serving, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """The body without what this server does not know, if an agent has sent it and the server makes up for that."""
    agent = request.headers.get("user-agent", "")
    if state.settings.agent_compat == "strict" or _AGENTS.match(agent) is None:
        return body
    answers = state.llm.inputs.answers
    efforts = answers.efforts if answers is not None else EffortVariables()
    extras = await state.llm.inputs.in_thread(
        caller(request).turn, lambda: list(_extras(endpoint, body, efforts, state.secret))
    )
    for extra in reversed(extras):  # Of a list, the last places first.
        del extra.owner[extra.name]
    if extras:
        names = list(dict.fromkeys(re.sub(r"\[\d+\]", "[]", extra.path)[:64] for extra in extras))
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        logger.info("left out of a request of %r: %s%s", agent[:64], ", ".join(map(repr, names[:_LISTED])), more)
    return body


def _extras(endpoint: Endpoint, body: dict[str, Any], efforts: EffortVariables, secret: bytes) -> Iterator[_Extra]:
    table = rules(endpoint)
    for name, value in body.items():
        if name not in table or (name in _HINTS and table[name].treatment != "applied" and not takes(table[name], value)):
            yield _Extra(body, name, name)
    yield from _foreign(body.get("input"), "input", secret)
    for index, turn in enumerate(_objects(body.get("messages"))):
        yield from _foreign(turn.get("content"), f"messages[{index}].content", secret)
    for name, kind in _PARTS.get(endpoint, {}).items():
        for key in unknown_keys(body.get(name), kind, name):
            yield _Extra(key.owner, key.name, key.path)
    for owner, name in _EFFORTS:
        if isinstance(given := body.get(owner), dict) and not _known_effort(given.get(name), efforts):
            yield _Extra(given, name, f"{owner}.{name}")
    for owner, name, known in _WORDS:
        if isinstance(given := body.get(owner), dict) and given.get(name) not in (None, *get_args(known)):
            yield _Extra(given, name, f"{owner}.{name}")
    if isinstance(text := body.get("text"), dict) and text.get("verbosity", "medium") != "medium":
        yield _Extra(text, "verbosity", "text.verbosity")


def _foreign(parts: Any, where: str, secret: bytes) -> Iterator[_Extra]:
    """Yields the parts of a conversation that another server made, or this one before it started again: calls of hosted tools,
    and reasoning under a seal that cannot be opened."""
    if not isinstance(parts, list):
        return
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            continue
        if kind != "tool_result" and _HOSTED.fullmatch(kind):
            yield _Extra(parts, index, f"{where}[{index}]: {kind}")
        elif kind == "reasoning" and isinstance(seal := part.get("encrypted_content"), str) and not is_sealed(seal, secret):
            yield _Extra(part, "encrypted_content", f"{where}[{index}].encrypted_content")


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else []


def _known_effort(effort: Any, efforts: EffortVariables) -> bool:
    if effort is not None:
        try:
            efforts.set_by(effort)
        except RequestError:
            return False
    return True
