"""The checkpoint's own ``response_template``, which transformers' ``ResponseParser`` reads too, as formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.text.parse.format import Choice, Format, Literals, Mark, Reasoning, State, Written

_REASONING = ("reasoning_content", "reasoning", "thinking")
_PATTERN = re.compile(
    r"\(\?P<(?P<group>\w+)>[^()]*\)|(?P<space>(?:\\s|\\n|\n| )[*+?]+)|(?P<line>\\n)"
    r"|\\(?P<escaped>[^\w\s])|(?P<plain>[^\\()\[\].*+?^$])",
    re.DOTALL,
)


def load(template: Mapping[str, Any]) -> Choice:
    """Raises: ValueError, KeyError, TypeError, AttributeError: the template is malformed, or says what no format can."""
    reasoning, tools, wrap = None, None, []
    for name, field in template["fields"].items():
        if name in _REASONING:
            (opening,), (closing,) = _anchors(field, "open")[0], _anchors(field, "close")[0]
            reasoning = Reasoning("hf", opening, closing)
        elif name == "tool_calls":
            tools = field
        elif name == "content":
            wrap += [anchor[0] for which in ("open", "close") for anchor in _anchors(field, which)]
        elif "open" in field or "open_pattern" in field:
            raise ValueError(f"response_template has a field {name}, which no answer has")
    return Choice(_calls(tools, tuple(wrap)) if tools is not None else None, reasoning)


def _calls(field: Mapping[str, Any], wrap: tuple[str, ...]) -> Format:
    kind, options = field.get("content", "text"), field.get("content_args", {})
    opens, closes = _anchors(field, "open"), _anchors(field, "close")
    named = any("(name)" in anchor for anchor in opens)
    states: dict[str, State] = {}
    opening, closing = _spelled(field, "open"), _spelled(field, "close")
    written = Written("", several=bool(field.get("repeats")))
    ends = tuple(_chain(anchor, "after", states, ends=kind == "xml-inline") for anchor in closes)
    if kind == "json":
        quotes = {delimiter: None for pair in options.get("string_delims", ()) for delimiter in pair}
        scan = "quoted" if options.get("unquoted_keys") or quotes else "json" if named else "calls"
        if named != ('"{name}"' in json.dumps(field.get("transform"))):
            raise ValueError("response_template has a transform that no call has")
        states["call"] = State("scan", tuple(Mark(quote, "") for quote in quotes), scan=scan, then="close" if ends else "after")
        states["close"] = State("space", ends)
        if scan == "quoted":
            member = "KEY:VALUE" if options.get("unquoted_keys") else '"KEY":VALUE'
            literals = Literals(member, ",", quote=next(iter(quotes), ""), keys=r"[^\s{}\[\],:\"<>]+")
            call = "{PARAMETERS}" if named else ""
            written = replace(written, parameter=member, joint=",", keys=literals.keys, literals=literals)
        else:
            call = "ARGUMENTS" if named else '{"name": "NAME", "arguments": ARGUMENTS}'
    elif kind == "xml-inline" and named and ends:
        before, key, between, value, after = _parts(options["tag_pattern"])
        if (key, value) != ("(key)", "(value)"):
            raise ValueError("response_template has a tag_pattern without key and value")
        states["call"] = State("space", (Mark(before, "key"), *ends))
        states["key"] = State("key", (Mark(between, "value"),))
        states["value"] = State("value", (Mark(after, "call", trim=1),))
        call, written = "PARAMETERS", replace(written, parameter=_filled(options["tag_pattern"]))
    else:
        raise ValueError(f"response_template has tool calls of content {kind!r}")
    forms = (replace(written, call=opening + call + closing),) if call and opening else ()
    marks = tuple(_chain(anchor, "call", states) for anchor in opens)
    return Format("hf", opens=marks, states=states, wrap=wrap, written=forms)


def _chain(anchor: list[str], to: str, states: dict[str, State], *, ends: bool = False) -> Mark:
    """The mark of an anchor's first part; adds the states that read its others."""
    first, *rest = anchor
    if rest == ["(name)"]:  # ended by the arguments' brace
        rest.append("")
    if not rest:
        return Mark(first, to, ends=ends)
    state = f"{first}{len(rest)}{to}"
    if rest[0] == "(name)":
        after = _chain(rest[1:], to, states)
        states[state] = State("name", (after if after.text else Mark("{", to, keep=True),))
    else:
        states[state] = State("space", (_chain(rest, to, states),))
    return Mark(first, state, ends=ends)


def _anchors(field: Mapping[str, Any], which: str) -> list[list[str]]:
    """Each way to open or close a field, in parts that whitespace may part; a group is ``(NAME)``."""
    if (literals := field.get(which)) is not None:
        return [[text] for text in ([literals] if isinstance(literals, str) else literals)]
    return [_parts(pattern)] if (pattern := field.get(f"{which}_pattern")) is not None else []


def _spelled(field: Mapping[str, Any], which: str) -> str:
    """Returns the text, for grammars, that opens or closes a field: the first of several."""
    if (literals := field.get(which)) is not None:
        return literals if isinstance(literals, str) else str(literals[0])
    return _filled(field.get(f"{which}_pattern", ""))


def _filled(pattern: str) -> str:
    """A pattern as text: groups as the parts of ``Written``, whitespace that may be there as a line break."""

    def text(found: re.Match[str]) -> str:
        if found["group"]:
            return found["group"].upper()
        if found["space"]:
            return " " if found["space"].startswith(" ") else "\n"
        return "\n" if found["line"] else found["escaped"] or found["plain"]

    return _PATTERN.sub(text, pattern)


def _parts(pattern: str) -> list[str]:
    parts, place = [""], 0
    while place < len(pattern):
        if (match := _PATTERN.match(pattern, place)) is None:
            raise ValueError(f"response_template has a pattern that is not a marker: {pattern}")
        if match["group"]:
            parts += [f"({match['group']})", ""]
        elif match["space"]:
            parts.append("")
        else:
            parts[-1] += "\n" if match["line"] else match["escaped"] or match["plain"]
        place = match.end()
    return [part for part in parts if part]
