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


_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}
_CALLS = {"function_call": ("function_call_arguments", "arguments"), "custom_tool_call": ("custom_tool_call_input", "input")}


def folded_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response, which must be what the events of OpenAI's Responses add up to."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, running, *middle, last = copy.deepcopy(events)
    assert (created["type"], running["type"]) == ("response.created", "response.in_progress")
    final: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{final['status']}" and final["status"] in ("completed", "incomplete")
    changing = ("status", "output", "usage", "completed_at", "incomplete_details")
    for event in (created, running):
        assert event["response"]["output"] == [] and event["response"]["usage"] is None
        assert {**event["response"], **{name: final[name] for name in changing}} == final
    output = []
    while middle:
        output.append(_item(middle, len(output)))
    assert output == final["output"]
    usage = final["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return final


def _item(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Takes the events of one item from the front."""
    place: dict[str, Any] = {"output_index": index}

    def take(kind: str, **fields: Any) -> dict[str, Any]:
        event = events.pop(0)
        assert event["type"] == f"response.{kind}" and event.items() >= {**place, **fields}.items()
        return event

    item: dict[str, Any] = take("output_item.added")["item"]
    kind = item["type"]
    assert item.get("status", "in_progress") == "in_progress"
    place["item_id"] = item["id"]
    if kind in _TEXTS:
        place["content_index"] = 0
        part = take("content_part.added")["part"]
        name, text = _TEXTS[kind], ""
        assert (part["type"], part["text"], item["content"]) == (name, "", [])
    else:
        (name, field), text = _CALLS[kind], ""
        assert item[field] == ""
    logprobs = []
    while events[0]["type"] == f"response.{name}.delta":
        event = take(f"{name}.delta")
        text += event["delta"]
        logprobs += event.get("logprobs", [])
    if kind in _TEXTS:
        done = take(f"{name}.done", text=text)
        assert done.get("logprobs", []) == logprobs
        part = take("content_part.done")["part"]
        assert part == {**part, "type": name, "text": text} and part.get("logprobs", []) == logprobs
        item["content"] = [part]
    else:
        take(f"{name}.done", **{field: text})
        item[field] = text
    place = {"output_index": index}
    ended: dict[str, Any] = take("output_item.done")["item"]
    assert {**item, "status": ended.get("status"), "encrypted_content": ended.get("encrypted_content")} == {
        **ended,
        "status": ended.get("status"),
        "encrypted_content": ended.get("encrypted_content"),
    }
    return ended
