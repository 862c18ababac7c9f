"""Parameters: the arguments of a tool's calls, as expressions of a grammar."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.constrain.characters import by_character, characters
from headrace.constrain.lark import Hold, Lark, regex, spelled
from headrace.errors import RequestError
from headrace.text.answers import referred, types_of
from headrace.text.parse.format import Format, Literals, Written

CUSTOM_INPUT = "input"
"""The one parameter of a tool whose calls have a text."""


class HeldTool(msgspec.Struct, frozen=True):
    """A tool whose calls a grammar holds."""

    name: str
    parameters: str | None
    """JSON Schema of the arguments, as text; None: any object."""
    param: str
    """Parameter of the request that declares the tool."""
    strict: bool = False
    lark: str | None = None
    """Grammar of the text that calls have in place of arguments."""


_PARTS = re.compile("(NAME|INDEX|ARGUMENTS|PARAMETERS|KEY|VALUE|STRING)")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "nullable", "type", "anyOf"})
_STRING_KEYWORDS = frozenset({"enum", "const", "pattern", "minLength", "maxLength"})
_OWN: Mapping[str, frozenset[str]] = {
    "string": _STRING_KEYWORDS | {"format"},
    "integer": (_NUMBER := frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})),
    "number": _NUMBER,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""JSON type -> the keywords of its values that a format's own writing holds."""
_LEVELS = 8
_QUOTE = '"'


@contextlib.contextmanager
def _named(tool: HeldTool) -> Iterator[None]:
    """Errors say which tool cannot be held."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{tool.param}: {error.message}", tool.param, code=error.code) from None


class Parameters(Lark):
    """A grammar with rules for the arguments of calls."""

    def __init__(self, tokens: Mapping[str, int], tools: Format | None, hold: Hold) -> None:
        super().__init__(tokens)
        self._tools = tools
        self._hold = hold

    def _filled(self, template: str, texts: Mapping[str, str], expression: Callable[[str], str]) -> str:
        """A template with its capital parts: as text, or as an expression."""
        found, run = [], ""
        for part in _PARTS.split(template):
            if part in texts or not _PARTS.fullmatch(part):
                run += texts.get(part, part)
                continue
            found += [self.literal(run), expression(part)]
            run = ""
        return " ".join([*found, self.literal(run)])

    def _schema(self, schema: Any, tool: HeldTool) -> str:
        """The grammar of a JSON value."""
        with _named(tool):
            return self._hold(json=schema, strict=tool.strict)

    def _text(self, tool: HeldTool) -> str:
        """The grammar of the tool's text."""
        with _named(tool):
            return self._hold(grammar=tool.lark)

    def _arguments(self, tool: HeldTool) -> Any:
        schema = {} if tool.parameters is None else json.loads(tool.parameters)
        if schema.get("type", "object") != "object":
            raise RequestError(f"{tool.param}: type must be object", tool.param, code="unsupported_schema")
        return {"type": "object", **schema}

    def _parameters(self, written: Written, tool: HeldTool) -> str:
        """Each parameter by itself, in the order of the schema."""
        if tool.lark is not None:
            return self._text_parameter(written, tool)
        schema = self._arguments(tool)
        known = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "strict"}
        if (other := next((name for name in schema if name not in known), None)) is not None:
            raise self._refused(f"#/{other}", other, tool)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list) or not {*required} <= properties.keys():
            raise self._refused("#/required", "properties and required that do not fit together", tool)
        self._schema({**schema, "type": "object"}, tool)  # says what no format can hold, with its place
        if "properties" not in schema and (others := schema.get("additionalProperties", {})) is not False:
            one = self.rule(self._parameter(written, None, others, tool, schema))
            return f"({one} ({self.literal(written.joint)} {one})*)?"
        if (wrong := next((key for key in properties if not re.fullmatch(written.keys, key)), None)) is not None:
            raise self._refused("#/properties", f"the name {wrong!r}", tool)
        members = [(self._parameter(written, key, value, tool, schema), key in required) for key, value in properties.items()]
        return self._joined(members, written.joint)

    def _text_object(self, tool: HeldTool) -> str:
        """The arguments of a tool that has a text, as JSON."""
        inside = self.sub(self._by_character(tool, json_string=True))
        opening, closing = json.dumps(f'{{"{CUSTOM_INPUT}": "'), json.dumps('"}')
        return f"{opening} {inside} {closing}"

    def _text_parameter(self, written: Written, tool: HeldTool) -> str:
        before, _, after = written.parameter.partition("VALUE")
        opening = self.literal(self._texts(before, {"KEY": CUSTOM_INPUT, "STRING": "true"}))
        if written.literals is not None and not written.literals.quote:
            inside = self.sub(self._by_character(tool, json_string=True))
            return f"{opening} {json.dumps(_QUOTE)} {inside} {json.dumps(_QUOTE)} {self.literal(after)}"
        quote = written.literals.quote if written.literals is not None else ""
        first, *rest = spelled(quote + after, self.tokens)
        opening += f" {self.literal(quote)}"
        if isinstance(first, int):
            return f"{opening} {self.sub(self._text(tool))} {self.pieces([first, *rest])}"
        inside = self.sub(self._by_character(tool, json_string=False))
        return f"{opening} {inside} {characters(first)} {self.pieces(rest)}"

    def _by_character(self, tool: HeldTool, *, json_string: bool) -> str:
        with _named(tool):
            return by_character(self._hold(grammar=tool.lark), json_string=json_string)

    def _joined(self, members: Sequence[tuple[str, bool]], joint: str) -> str:
        """Expressions one after another, each with whether it is required, and ``joint`` between those that are there."""
        if not joint:
            return " ".join(member if required else f"({member})?" for member, required in members)
        first = later = self.rule('""')
        for expression, required in reversed(members):
            member = self.rule(expression)
            starts, follows = f"{member} {later}", f"{self.literal(joint)} {member} {later}"
            first = self.rule(starts if required else f"{starts} | {first}")
            later = self.rule(follows if required else f"{follows} | {later}")
        return first

    def _parameter(self, written: Written, key: str | None, schema: Any, tool: HeldTool, root: Any) -> str:
        before, _, after = written.parameter.partition("VALUE")
        types = types_of(schema, root)
        flags = {"STRING": "true" if types == {"string"} or not types else "false"}
        if key is None:
            opening = self._filled(before, flags, lambda part: self.terminal(_ANY_KEY))
        else:
            opening = self.literal(self._texts(before, {"KEY": key, **flags}))
        if written.literals is not None:
            value = self._literal(written.literals, schema, root, tool) or self.sub(self._json(schema, root, tool))
            return f"{opening} {value} {self.literal(after)}"
        return f"{opening} {self._value(schema, types, root, after, tool, key, written)}"

    def _texts(self, template: str, texts: Mapping[str, str]) -> str:
        return "".join(texts.get(part, part) for part in _PARTS.split(template))

    def _json(self, schema: Any, root: Any, tool: HeldTool) -> str:
        """The grammar of a value as JSON."""
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return self._schema({**shared, **schema} if isinstance(schema, dict) else schema, tool)

    # Values as raw text

    def _value(
        self, schema: Any, types: frozenset[str], root: Any, after: str, tool: HeldTool, key: str | None, written: Written
    ) -> str:
        if types and "string" not in types:
            return f"{self.sub(self._json(schema, root, tool))} {self.literal(after)}"
        place = f"#/properties/{key}"
        if types == {"string"}:
            terms, empty = self._string_terms(_followed(schema, root), place, tool)
        elif types and "STRING" in written.parameter:
            raise self._refused(place, "a parameter of several types", tool)
        elif not _free(schema):
            raise self._refused(place, "a parameter of several types with further keywords", tool)
        else:
            terms, empty = ["/(?s:.*)/"], True
        states = self._tools.states.values() if self._tools is not None else ()
        closing = next(mark.text for state in states if state.sink == "value" for mark in state.on)
        return self._text_before(terms, empty, after, closing)

    def _text_before(self, terms: Sequence[str], empty: bool, after: str, closing: str) -> str:
        """Raw text for which all terms hold, without the marker ``closing``, and what comes ``after`` it."""
        first, *rest = spelled(after, self.tokens)
        if isinstance(first, int):
            return f"{self.terminal(' & '.join(terms))}{'?' if empty else ''} {self.pieces([first, *rest])}"
        value = " & ".join([*terms, f"~/(?s:.*){regex(closing)}(?s:.*)/"])
        return f"{self.terminal(f'({value}) {json.dumps(first)}')} {self.pieces(rest)}"

    def _string_terms(self, schema: Any, place: str, tool: HeldTool) -> tuple[list[str], bool]:
        """Terms of a terminal that all hold for the raw text, and whether it may be empty."""
        unknown = next((name for name in schema if name not in _ANNOTATIONS | _STRING_KEYWORDS), None)
        if unknown is not None or "anyOf" in schema:
            raise self._refused(f"{place}/{unknown or 'anyOf'}", unknown or "anyOf", tool)
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        terms, empty = [f"/(?s:.{{{least},{'' if most is None else most}}})/"], least == 0
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            values = [value for value in values if isinstance(value, str)]
            terms.append("(" + " | ".join(f"/{regex(value)}/" for value in values) + ")")
            empty = empty and "" in values
        if "pattern" in schema:
            pattern = schema["pattern"]
            begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
            inner = pattern[begins : len(pattern) - ends]
            if (begins or ends) and _has_alternatives(inner):
                raise self._refused(f"{place}/pattern", "a pattern with ^ or $ in a part of it", tool)
            inner = inner.replace("/", "\\/") if "\\/" not in inner else inner
            terms.append(f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}/")
            empty = False
        return terms, empty

    def _refused(self, place: str, what: str, tool: HeldTool) -> RequestError:
        name = self._tools.name if self._tools is not None else "none"
        message = f"the schema at {place}: {what} cannot be held in this model's format of tool calls, {name}"
        return RequestError(f"{tool.param}: {message}", tool.param, code="unsupported_schema")

    # Values as literals

    def _literal(self, literals: Literals, schema: Any, root: Any, tool: HeldTool, level: int = 0) -> str:
        """A value in the format's own writing; empty: it can only be written as JSON."""
        schema = _followed(schema, root) if isinstance(schema, dict) else {}
        if level > _LEVELS or "$ref" in schema:
            return ""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            plain = schema.keys() <= _ANNOTATIONS - {"type", "anyOf"} | {"enum", "const"}
            return self._rule_of(self._written_value(literals, value) for value in values) if plain else ""
        if "anyOf" in schema:
            plain = schema.keys() <= _ANNOTATIONS - {"type"}
            branches = schema["anyOf"] if plain else ()
            return self._rule_of(self._literal(literals, branch, root, tool, level + 1) for branch in branches)
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not schema.keys() <= _ANNOTATIONS.union(*(_OWN.get(kind, ()) for kind in types)):
            return ""
        return self._rule_of(self._of_type(literals, kind, schema, root, tool, level) for kind in types)

    def _rule_of(self, alternatives: Iterable[str]) -> str:
        """One of several; empty where one of them is."""
        each = list(alternatives)
        return self.rule(" | ".join(each)) if each and all(each) else ""

    def _of_type(self, literals: Literals, kind: str, schema: Any, root: Any, tool: HeldTool, level: int) -> str:
        own = {name: value for name, value in schema.items() if name in _OWN[kind]}
        match kind:
            case "boolean":
                return " | ".join(self._written_value(literals, value) for value in (True, False))
            case "null":
                return self._written_value(literals, None)
            case "string" if literals.quote and "format" not in own:
                terms, empty = self._string_terms(own, "#", tool)
                return f"{self.literal(literals.quote)} {self._text_before(terms, empty, literals.quote, literals.quote)}"
            case "array" if isinstance(own.get("items"), dict):
                item = self._literal(literals, own["items"], root, tool, level + 1)
                return item and self._array(item, own.get("minItems", 0), own.get("maxItems"), literals.joint)
            case "object" if own.get("properties", {}).keys() >= {*own.get("required", ("",))}:
                members = []
                for key, value in own["properties"].items():
                    expression = self._literal(literals, value, root, tool, level + 1)
                    if not expression or not re.fullmatch(literals.keys, key):
                        return ""
                    before = self._texts(literals.member, {"KEY": key}).removesuffix("VALUE")
                    members.append((f"{self.literal(before)} {expression}", key in own.get("required", ())))
                return f'"{{" {self._joined(members, literals.joint)} "}}"'
            case "array" | "object":
                return ""
        return self.sub(self._json({"type": kind, **own}, root, tool))

    def _array(self, item: str, least: int, most: int | None, joint: str) -> str:
        if most is not None and most < max(1, least):
            return '"[]"' if not least else ""
        more = f"({self.literal(joint)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {more} "]"' + ("" if least else ' | "[]"')

    def _written_value(self, literals: Literals, value: Any) -> str:
        """Empty: it can only be written as JSON."""
        if isinstance(value, (list, dict)):
            return ""
        if isinstance(value, str) and literals.quote:
            quote, inside = self.literal(literals.quote), json.dumps(value, ensure_ascii=False)
            return f"{quote} {inside} {quote}" if literals.quote not in value else ""
        text = json.dumps(value, ensure_ascii=False)
        return json.dumps(literals.words.get(text, text), ensure_ascii=False)


def _followed(schema: Any, root: Any) -> Any:
    """The schema that a bare $ref stands for."""
    for _ in range(8):
        if not isinstance(target := referred(schema, root), dict):
            break
        schema = {**target, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema


def _has_alternatives(pattern: str) -> bool:
    """Whether there is a ``|`` outside of groups and classes."""
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    depth = 0
    for char in bare:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _free(schema: Any) -> bool:
    """Whether a schema says nothing but types."""
    if not isinstance(schema, dict):
        return schema is True
    return schema.keys() <= _ANNOTATIONS and all(_free(branch) for branch in schema.get("anyOf", ()))
