"""Structural tags: text with structured parts, as xgrammar's JSON describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.constrain.lark import Hold, Lark
from headrace.errors import RequestError
from headrace.options import shown

_PARAM = "structural_tag"
_MAX_DEPTH = 32
_MAX_NODES = 2000
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "grammar": ({"grammar"}, set()),
    "any_text": (set(), set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
"""type -> fields that it needs, and fields that it may have"""


def structural_grammar(text: str, tokens: Mapping[str, int], hold: Hold) -> str:
    """The grammar of a structural tag, in llguidance's serialised form. ``tokens``: those that are never text.

    Raises:
        RequestError: it is malformed or cannot be held; says where.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structural_tag is not JSON: {str(error)[:200]}", _PARAM) from None
    if not isinstance(given, dict):
        raise _wrong("#", f"must be an object, not {shown(given)}")
    if "structures" in given:
        node, place = _older(given), "#"
    elif {*given} <= {"type", "format"} and given.get("type", _PARAM) == _PARAM and "format" in given:
        node, place = given["format"], "#/format"
    else:
        raise _wrong("#", "must have format, or structures and triggers")
    return _Tags(tokens, hold).grammar(node, place)


def _older(given: dict[str, Any]) -> dict[str, Any]:
    """The form with ``structures`` in today's."""
    structures = given["structures"]
    if not {*given} <= {"type", "structures", "triggers"} or not isinstance(structures, list):
        raise _wrong("#", "must have structures, a list, and triggers")
    tags = []
    for index, each in enumerate(structures):
        if not isinstance(each, dict) or {*each} != {"begin", "schema", "end"}:
            raise _wrong(f"#/structures/{index}", "must have begin, schema and end")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


class _Tags(Lark):
    def __init__(self, tokens: Mapping[str, int], hold: Hold) -> None:
        super().__init__(tokens)
        self._hold = hold
        self._num_nodes = 0

    def grammar(self, node: Any, place: str) -> str:
        return self.serialised(self._node(node, place, 0))

    def _node(self, node: Any, place: str, depth: int) -> str:
        """The expression of a node behind which the output ends, or that ends by itself."""
        kind = self._checked(node, place, depth)
        inner = depth + 1
        match kind:
            case "const_string":
                return self.literal(self._text_of(node, "value", place))
            case "json_schema":
                return self._held(f"{place}/json_schema", json=node["json_schema"])
            case "regex":
                return self._held(f"{place}/pattern", regex=node["pattern"])
            case "grammar":
                return self._held(f"{place}/grammar", grammar=node["grammar"])
            case "any_text":
                return self.text(())
            case "sequence":
                return self._sequence(self._list(node, "elements", place), f"{place}/elements", inner)
            case "or":
                elements = enumerate(self._list(node, "elements", place))
                return "(" + " | ".join(self._node(each, f"{place}/elements/{at}", inner) for at, each in elements) + ")"
            case "tag":
                return self._tag(node, place, depth)
            case "triggered_tags":
                return self._triggered(node, place, inner)
        return self._separated(node, place, inner)

    def _checked(self, node: Any, place: str, depth: int) -> str:
        """The type of a node."""
        self._num_nodes += 1
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            raise _wrong(place, f"is beyond {_MAX_DEPTH} levels or {_MAX_NODES} parts")
        kind = node.get("type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _wrong(place, f"must have a type, one of {', '.join(_FIELDS)}, not {shown(kind)}")
        needed, others = _FIELDS[kind]
        if missing := sorted(needed - {*node}):
            raise _wrong(place, f"has no {missing[0]}")
        if unknown := sorted({*node} - needed - others - {"type"}):
            raise _wrong(f"{place}/{unknown[0]}", f"is not a field of {kind} that can be held")
        return kind

    def _sequence(self, elements: Sequence[Any], place: str, depth: int) -> str:
        found, at = [], 0
        while at < len(elements):
            here, node = f"{place}/{at}", elements[at]
            following = elements[at + 1] if at + 1 < len(elements) else None
            if isinstance(node, dict) and node.get("type") in ("any_text", "triggered_tags") and following is not None:
                self._checked(node, here, depth)
                if node["type"] == "triggered_tags" or self._checked(following, f"{place}/{at + 1}", depth) != "const_string":
                    raise _wrong(here, "can only be followed by a const_string, and triggered_tags by nothing")
                found.append(self.until(self._text_of(following, "value", f"{place}/{at + 1}")))
                at += 2
                continue
            found.append(self._node(node, here, depth))
            at += 1
        return " ".join(found)

    def _tag(self, tag: dict[str, Any], place: str, depth: int, *, read: str = "") -> str:
        """``read``: what of its beginning is read already."""
        begin, end = self._text_of(tag, "begin", place), self._text_of(tag, "end", place, empty=True)
        content, here = tag["content"], f"{place}/content"
        opening = self.literal(begin.removeprefix(read))
        if end and isinstance(content, dict) and content.get("type") == "any_text":
            self._checked(content, here, depth + 1)
            return f"{opening} {self.until(end)}"
        if end and isinstance(content, dict) and content.get("type") == "triggered_tags":
            raise _wrong(here, "triggered_tags cannot be the content of a tag that has an end")
        return f"{opening} {self._node(content, here, depth + 1)} {self.literal(end)}"

    def _triggered(self, node: dict[str, Any], place: str, depth: int) -> str:
        triggers = self._list(node, "triggers", place)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _wrong(f"{place}/triggers", "must be a list of strings that are not empty")
        tags = self._tags_of(node, place, depth)
        by_trigger: dict[str, list[tuple[str, dict[str, Any]]]] = {trigger: [] for trigger in triggers}
        for where, tag in tags:
            fitting = [trigger for trigger in triggers if tag["begin"].startswith(trigger)]
            if len(fitting) != 1:
                raise _wrong(f"{where}/begin", f"begins with {len(fitting)} of the triggers, and must with one")
            by_trigger[fitting[0]].append((where, tag))
        texts = [trigger for trigger in triggers if not self.is_token(trigger)]
        steps = []
        for trigger, own in by_trigger.items():
            rest = " | ".join(self._tag(tag, where, depth, read=trigger) for where, tag in own)
            if not own:
                continue
            before = self.lazy(trigger, texts) if trigger in texts else f"{self.text(texts)} {self.literal(trigger)}"
            steps.append(f"{before} ({rest})")
        step = self.rule(" | ".join(steps))
        text, once = self.text(texts), self._flag(node, "stop_after_first", place)
        if self._flag(node, "at_least_one", place):
            first = self.rule(" | ".join(self._tag(tag, where, depth) for where, tag in tags))
            return first if once else f"{first} {step}* {text}"
        return f"({step} | {text})" if once else f"{step}* {text}"

    def _separated(self, node: dict[str, Any], place: str, depth: int) -> str:
        tags = self._tags_of(node, place, depth)
        tag = self.rule(" | ".join(self._tag(tag, where, depth) for where, tag in tags))
        separator = self._text_of(node, "separator", place, empty=True)
        several = tag if self._flag(node, "stop_after_first", place) else f"{tag} ({self.literal(separator)} {tag})*"
        return several if self._flag(node, "at_least_one", place) else f"({several})?"

    def _tags_of(self, node: dict[str, Any], place: str, depth: int) -> list[tuple[str, dict[str, Any]]]:
        """(place, tag)"""
        found = []
        for at, tag in enumerate(self._list(node, "tags", place)):
            where = f"{place}/tags/{at}"
            given = {"type": "tag", **tag} if isinstance(tag, dict) else tag
            if self._checked(given, where, depth) != "tag":
                raise _wrong(where, "must be a tag")
            self._text_of(given, "begin", where)
            found.append((where, given))
        return found

    def _held(self, place: str, **content: Any) -> str:
        try:
            return self.sub(self._hold(**content))
        except RequestError as error:
            raise RequestError(f"structural_tag at {place}: {error.message}", _PARAM, code=error.code) from None

    def _text_of(self, node: dict[str, Any], name: str, place: str, *, empty: bool = False) -> str:
        value = node[name]
        if not isinstance(value, str) or not (value or empty):
            raise _wrong(f"{place}/{name}", f"must be a string{'' if empty else ' that is not empty'}, not {shown(value)}")
        return value

    def _list(self, node: dict[str, Any], name: str, place: str) -> list[Any]:
        value = node[name]
        if not isinstance(value, list) or not value:
            raise _wrong(f"{place}/{name}", f"must be a list that is not empty, not {shown(value)}")
        return value

    def _flag(self, node: dict[str, Any], name: str, place: str) -> bool:
        value = node.get(name, False)
        if not isinstance(value, bool):
            raise _wrong(f"{place}/{name}", f"must be true or false, not {shown(value)}")
        return value


def _wrong(place: str, message: str) -> RequestError:
    return RequestError(f"structural_tag at {place}: {message}", _PARAM)
