"""Recorded requests of agents, with texts and ids replaced. Each recording has the first two requests of a session in which the
model called a tool: ``first``, and the fields that differ in the second one, ``then``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parent / "recorded"
RECORDINGS = pytest.mark.parametrize("recording", sorted(path.stem for path in _FOLDER.glob("*.json")))


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def second(recording: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The second request of a session whose first one had this answer: the recorded call and its result are replaced."""
    if "input" in recording["then"]:
        (call,) = (item for item in answer["output"] if item["type"] == "function_call")
        *before, _, result = recording["then"]["input"]
        return recording["first"] | {"input": [*before, call, result | {"call_id": call["call_id"]}]}
    (use,) = (block for block in answer["content"] if block["type"] == "tool_use")
    *before, _, user = recording["then"]["messages"]
    results = [block | {"tool_use_id": use["id"]} for block in user["content"]]
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
    return recording["first"] | {"messages": [*before, *turns]}
