"""Structural tags: what they accept, and how mistakes are named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.words import accepts, matcher

from headrace.errors import RequestError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JSON = {"type": "json_schema", "json_schema": CITY}
GET = {"begin": "<function=get>", "content": JSON, "end": "</function>"}
PUT = {"begin": "<function=put>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</function>"}
CALLED, STORED = '<function=get>{"city": "Rome"}</function>', "<function=put>12</function>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": [GET, PUT]}
OLDER = {"structures": [{"begin": "<function=get>", "schema": CITY, "end": "</function>"}], "triggers": ["<function="]}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"format": JSON}, ['{"city": "Rome"}'], ["Rome", "{}"]),
    ({"format": {"type": "const_string", "value": "yes"}}, ["yes"], ["no", "yesyes"]),
    ({"format": {"type": "any_text"}}, ["", "anything\nat all"], []),
    ({"format": {"type": "or", "elements": [JSON, PUT | {"type": "tag"}]}}, [STORED, '{"city": ""}'], ["", CALLED]),
    ({"format": THINK | {"content": JSON}}, ['<think>{"city": ""}</think>'], ["<think></think>"]),
    (
        {"format": {"type": "sequence", "elements": [THINK, JSON]}},
        ['<think>a<b</think>{"city": ""}'],
        ["<think>", '{"city": ""}'],
    ),
    (
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "So: "}, JSON]}},
        ['Well. So: {"city": ""}', 'So: {"city": ""}'],
        ['So: So: {"city": ""}', "Well."],
    ),
    ({"format": {"type": "grammar", "grammar": 'root ::= "a" root | "b"'}}, ["aab"], ["aa"]),
    (
        {"format": TRIGGERED},
        ["", "text", f"a {CALLED} b {STORED}", STORED],
        ["<function=", "<function=del>", f"{STORED}<function="],
    ),
    ({"format": TRIGGERED | {"at_least_one": True}}, [CALLED, f"{STORED} a {CALLED}"], ["", "text", f"a {CALLED}"]),
    ({"format": TRIGGERED | {"stop_after_first": True}}, ["", "text", f"a {CALLED}"], [f"{CALLED}a", CALLED + STORED]),
    ({"format": TRIGGERED | {"stop_after_first": True, "at_least_one": True}}, [CALLED], ["", f"a{CALLED}", CALLED + STORED]),
    ({"type": "structural_tag", **OLDER}, ["", "text", f"a {CALLED} b {CALLED}"], [STORED, "<function=get>{}</function>"]),
    (
        {"format": {"type": "tags_with_separator", "tags": [GET, PUT], "separator": ","}},
        ["", STORED, f"{STORED},{CALLED}"],
        [STORED + CALLED, f"{STORED},"],
    ),
]


@pytest.mark.parametrize(("tag", "right", "wrong"), CASES, ids=lambda value: json.dumps(value)[:50])
def test_what_is_accepted(tag: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    held = matcher(structural_tag=tag)
    assert [text for text in right if not accepts(held, text)] == []
    assert [text for text in wrong if accepts(held, text)] == []
    assert accepts(matcher(structural_tag=json.dumps(tag)), right[-1])


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({}, "at #:"),
        ("[", "not JSON"),
        ({"format": {"type": "poem"}}, "at #/format:"),
        ({"format": {"type": "any_text", "excludes": ["a"]}}, "at #/format/excludes:"),
        (
            {"format": THINK | {"content": {"type": "json_schema", "json_schema": {"not": {}}}}},
            "at #/format/content/json_schema: ",
        ),
        ({"format": THINK | {"begin": ""}}, "at #/format/begin:"),
        ({"format": {"type": "sequence", "elements": []}}, "at #/format/elements:"),
        ({"format": {"type": "sequence", "elements": [TRIGGERED, JSON]}}, "at #/format/elements/0:"),
        ({"format": TRIGGERED | {"triggers": ["<tool"]}}, "at #/format/tags/0/begin:"),
        ({"format": TRIGGERED | {"at_least_one": 1}}, "at #/format/at_least_one:"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "at #/structures/0:"),
    ],
)
def test_a_mistake_is_named_with_its_place(tag: Any, place: str) -> None:
    with pytest.raises(RequestError) as found:
        matcher(structural_tag=tag)
    assert place in found.value.message and found.value.param == "structured_outputs.structural_tag"
