"""Checkers of event streams: order, places and sums. They return what the events add up to."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
from pydantic_core import from_json


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream whose event lines repeat the type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def folded_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that Anthropic's events add up to."""
    events = copy.deepcopy([event for event in events if event["type"] != "ping"])
    start, *middle, end, stop = events
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] >= 0
    opened: dict[str, Any] | None = None
    arguments = ""
    for event in middle:
        index, content = event["index"], message["content"]
        if event["type"] == "content_block_start":
            assert opened is None and index == len(content)
            opened, arguments = event["content_block"], ""
            content.append(opened)
            assert opened.get("input", {}) == {} and not opened.get("text") and not opened.get("thinking")
            continue
        assert opened is not None and index == len(content) - 1
        if event["type"] == "content_block_stop":
            if opened["type"] == "tool_use":
                opened["input"] = from_json(arguments or "{}", allow_partial=True)
            opened = None
            continue
        assert event["type"] == "content_block_delta"
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                opened["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                assert not opened["signature"]
                opened["thinking"] += text
            case {"type": "signature_delta", "signature": signature}:
                opened["signature"] = signature
            case {"type": "input_json_delta", "partial_json": text}:
                assert opened["type"] == "tool_use"
                arguments += text
            case other:
                raise AssertionError(other)
    assert opened is None
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}
