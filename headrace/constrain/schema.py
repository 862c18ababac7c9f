"""JSON Schema: a walk over the positions where schemas stand, which refuses what cannot be held and narrows what can.

llguidance compiles keywords that it does not know without a word, and so would hold less than the schema says. Here every
keyword is held, an annotation, or refused with its JSON Pointer. What is compiled allows only instances of the schema, not
always all of them (``narrow``).
"""

from __future__ import annotations

import bisect
import dataclasses
import decimal
import difflib
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from headrace.constrain.branches import ANNOTATIONS, TYPES, Apart, combines, constants, followed, says, told_apart, types_named
from headrace.constrain.formats import PATTERNS
from headrace.constrain.lookaheads import json_patterns
from headrace.constrain.paths import PATH_DEPTHS, longest_path
from headrace.constrain.references import References, escaped, local, subschemas
from headrace.errors import RequestError

Schema = dict[str, Any] | bool

FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_INTEGER = 10**18
"""Bound of integers that have none; llguidance's bounds are float64, and those of int64 itself are beyond it."""
_LARGEST = 10**300
_DIVISOR = 10_000
_ARRAYS = 400
"""Arrays that one schema may stand for, at most: those of five values are 326."""
_BY_TYPE: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
_NAMING = frozenset({"properties", "patternProperties"})


class SchemaError(Exception):
    """A schema cannot be held. ``pointer`` is the JSON Pointer of the keyword."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer


@dataclasses.dataclass(frozen=True)
class SchemaOptions:
    strict: bool = True
    """Refuse unknown formats of strings."""
    closed: bool = True
    """Objects have no keys beside their ``properties``, where the schema leaves it open."""
    max_depth: int = 64
    max_values: int = 20_000


@dataclasses.dataclass
class _Node:
    """A schema at its position."""

    pointer: str
    keywords: dict[str, Any]
    """Keywords of the narrowed copy; child schemas are put in as they are walked."""
    merged: bool
    """The schema is combined with another one: in an intersection, or a oneOf that must stay disjoint. To narrow it could then
    leave nothing, or allow an instance that the other branch excludes."""


def narrow(schema: Any, options: SchemaOptions) -> Schema:
    """A copy with the keywords that are held, and narrower where a model would lose itself:

    * an object that lists ``properties`` and leaves open what else there is has no other keys;
    * an ``integer`` is in [-10^18, 10^18], unless its bounds lie beyond.

    Both are left alone where schemas are combined: below allOf, beside $ref, anyOf and oneOf, and in a oneOf whose branches
    differ neither in their type nor in a required constant.

    Raises:
        SchemaError: a keyword is unknown, cannot be held, or has a wrong value; a limit is passed.
    """
    walk = _Walk(schema, options)
    narrowed = walk.schema(schema, "", 0, merged=False)
    walk.resolve()
    walk.check_combined()
    for node in walk.nodes.values():
        if not node.merged:
            _bound_integer(node.keywords)
            if options.closed:
                _close_object(node.keywords)
    for node in walk.nodes.values():
        _check_counted_keys(node)
    return narrowed


class _Walk:
    """Walks every schema position once and copies it."""

    def __init__(self, root: Any, options: SchemaOptions) -> None:
        self.nodes: dict[str, _Node] = {}
        self._options = options
        self._booleans: set[str] = set()
        """Pointers of schemas that are true or false."""
        self._found: list[tuple[str, str, bool]] = []
        """(pointer of a $ref, pointer of its target, merged)"""
        self._apart: dict[str, Apart] = {}
        """Differences of branches that exclude each other, by the pointer of the schema with the oneOf."""
        self._num_values = 0
        self._path: list[str] = []
        """Pointers of the schemas around the one that is walked."""
        self._edges: dict[str, list[str]] = {}
        """Pointer of a schema -> those of the schemas in it and of what it refers to."""
        self._links = References(root, options.max_depth)
        if self._links.too_long:
            self._fail("the names of nested schemas are too long", "")
        self._handlers: Mapping[str, Callable[[Any, str, int, bool], Any]] = {
            **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), self._by_name),
            **dict.fromkeys(("additionalProperties", "additionalItems"), self.schema),
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), self._list),
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), self._count),
            **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), self._number),
            "items": self._items,
            "type": self._type,
            "enum": self._enum,
            "const": self._const,
            "required": self._required,
            "pattern": self._text,
            "format": self._text,
            "uniqueItems": self._boolean,
            "$ref": self._reference,
        }

    def schema(self, schema: Any, pointer: str, depth: int, merged: bool) -> Schema:
        if self._path:
            self._edges[self._path[-1]].append(pointer)
        if isinstance(schema, bool):
            self._booleans.add(pointer)
            return schema
        if not isinstance(schema, dict):
            self._fail(f"a schema is an object or a boolean, not {_shown(schema)}", pointer)
        if depth >= self._options.max_depth:
            self._fail(f"the schema is nested deeper than {self._options.max_depth}", pointer)
        self._path.append(pointer)
        self._edges[pointer] = []
        node = self.nodes[pointer] = _Node(pointer, {}, merged or combines(schema))
        kept = {name: value for name, value in _modern(schema).items() if self._held(name, value, schema, pointer, depth)}
        for name, value in kept.items():
            below = node.merged
            if name == "oneOf" and isinstance(value, list):
                if (apart := told_apart(self._links, schema, pointer)) is not None:
                    self._apart[pointer] = apart
                below = below or apart is None
            elif name == "allOf":
                below = below or len(value) > 1 if isinstance(value, list) else below
            elif name in ("$defs", "definitions"):
                below = False
            node.keywords[name] = self._handlers[name](value, f"{pointer}/{escaped(name)}", depth + 1, below)
        _spell_out(node.keywords)
        if node.keywords.pop("uniqueItems", False):
            self._enumerate(node)
        self._path.pop()
        return node.keywords

    def resolve(self) -> None:
        """Checks that each $ref points to a schema, and marks what merged ones point to as merged."""
        pending = []
        for pointer, target, merged in self._found:
            if target not in self.nodes and target not in self._booleans:
                self._fail("$ref must point to a schema of this document", pointer)
            if merged:
                pending.append(target)
        length, first = longest_path(self._edges)
        if length > (most := PATH_DEPTHS * self._options.max_depth):
            self._fail(f"a path of {length} schemas through $ref begins here, longer than the limit of {most}", first)
        pointers, references = sorted(self.nodes), sorted(self._found)
        done: set[str] = set()
        while pending:
            start = pending.pop()
            if start in done:
                continue
            done.add(start)
            below = [start, *_within(pointers, start, str)] if start in self.nodes else []
            for pointer in below:
                self.nodes[pointer].merged = True
            pending += [target for _, target, _ in _within(references, start, operator.itemgetter(0))]
        targets = sorted(target for _, target, _ in self._found)
        for pointer, apart in self._apart.items():
            # A pointer to one of the branches has to lead there.
            if not _within(targets, f"{pointer}/oneOf", str):
                self._make_any_of(pointer, apart)

    # ------------------------------------------------------------------ keywords

    def _held(self, name: str, value: Any, schema: dict[str, Any], pointer: str, depth: int) -> bool:
        """Whether a keyword is kept; False for those that say nothing."""
        where = f"{pointer}/{escaped(name)}"
        if name in ANNOTATIONS or name.startswith("x-"):
            return False
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            if self._options.strict and "string" in types_named(schema):
                known = ", ".join(sorted(FORMATS))
                self._fail(
                    f"the format {_shown(value)} cannot be enforced (known are {known}); strict: false ignores it", where
                )
            return False
        if name not in self._handlers:
            close = difflib.get_close_matches(name, [*self._handlers, *ANNOTATIONS], n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close and close[0] != name else ""
            self._fail(f"the keyword {_shown(name)} is not supported{hint}", where)
        return True

    def _by_name(self, value: Any, pointer: str, depth: int, merged: bool) -> dict[str, Schema]:
        if not isinstance(value, dict):
            self._fail(f"must be an object of schemas, not {_shown(value)}", pointer)
        self._spend(len(value), pointer)
        return {name: self.schema(own, f"{pointer}/{escaped(name)}", depth, merged) for name, own in value.items()}

    def _list(self, value: Any, pointer: str, depth: int, merged: bool) -> list[Schema]:
        if not isinstance(value, list) or not value:
            self._fail(f"must be a list of schemas that is not empty, not {_shown(value)}", pointer)
        self._spend(len(value), pointer)
        return [self.schema(own, f"{pointer}/{index}", depth, merged) for index, own in enumerate(value)]

    def _items(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        """A schema, or before 2020-12 a list of them."""
        return (self._list if isinstance(value, list) else self.schema)(value, pointer, depth, merged)

    def _count(self, value: Any, pointer: str, depth: int, merged: bool) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 <= value < 2**31:
            self._fail(f"must be an integer in [0, 2^31 - 1], not {_shown(value)}", pointer)
        return value

    def _number(self, value: Any, pointer: str, depth: int, merged: bool) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"must be a number, not {_shown(value)}", pointer)
        if pointer.endswith("/multipleOf"):
            self._check_divisor(value, pointer)
            return value
        return _representable(value, up="inimum" in pointer.rpartition("/")[2])

    def _check_divisor(self, value: float, pointer: str) -> None:
        """The states of the automaton that divides are as many as the divisor, without its powers of ten."""
        if not 0 < value < _LARGEST or _digits(value) > _DIVISOR:
            self._fail(f"must be a number above 0 whose digits make at most {_DIVISOR}, not {_shown(value)}", pointer)

    def _type(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        named = value if isinstance(value, list) else [value]
        if not named or not all(isinstance(name, str) and name in TYPES for name in named):
            self._fail(f"must be one or several of {', '.join(TYPES)}, not {_shown(value)}", pointer)
        return value

    def _enum(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        if not isinstance(value, list) or not value:
            self._fail(f"must be a list that is not empty, not {_shown(value)}", pointer)
        self._spend(len(value), pointer)
        return value

    def _const(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        return value

    def _required(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._fail(f"must be a list of names, not {_shown(value)}", pointer)
        self._spend(len(value), pointer)
        return list(dict.fromkeys(value))

    def _text(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        if not isinstance(value, str):
            self._fail(f"must be a string, not {_shown(value)}", pointer)
        return value

    def _reference(self, value: Any, pointer: str, depth: int, merged: bool) -> Any:
        if not isinstance(value, str):
            self._fail(f"must be a string, not {_shown(value)}", pointer)
        target = self._links.target(pointer.removesuffix("/$ref"))
        if target is None:
            self._fail(f"must point to a schema of this document, not {_shown(value)}", pointer)
        self._found.append((pointer, target, merged))
        self._edges[self._path[-1]].append(target)
        return local(value, target)

    def check_combined(self) -> None:
        """Checks what holds together, by $ref and allOf: no schema with itself, and divisors, whose automata are multiplied."""
        targets = {pointer.removesuffix("/$ref"): target for pointer, target, _ in self._found}
        for start, node in self.nodes.items():
            if not node.keywords.keys() & {"allOf", "$ref"}:
                continue
            pending, passed, common = [start], set(), 1
            while pending:
                pointer = pending.pop()
                if pointer in passed and pointer == start:
                    self._fail("the schema refers to itself, with nothing that ends between", start)
                if pointer in passed or (own := self.nodes.get(pointer)) is None:
                    continue
                passed.add(pointer)
                common = math.lcm(common, _digits(own.keywords.get("multipleOf", 1)))
                if common > _DIVISOR:
                    message = f"the digits of the common multiple of each multipleOf make more than {_DIVISOR}"
                    self._fail(message, start)
                pending += (f"{pointer}/allOf/{index}" for index in range(len(own.keywords.get("allOf", ()))))
                if pointer in targets:
                    pending.append(targets[pointer])

    def _make_any_of(self, pointer: str, apart: Apart) -> None:
        for alternative in apart.alternatives:
            name, node = apart.discriminator, self.nodes[alternative.pointer]
            if name is None or name in alternative.required:
                continue
            if node.merged:
                self._fail(f"{name} must be required in each branch of the oneOf", alternative.pointer)
            node.keywords["required"] = [*node.keywords.get("required", ()), name]
        keywords = self.nodes[pointer].keywords
        branches = keywords.pop("oneOf")
        if "anyOf" in keywords:
            keywords["allOf"] = [*keywords.get("allOf", ()), {"anyOf": branches}]
        else:
            keywords["anyOf"] = branches

    def _enumerate(self, node: _Node) -> None:
        """Writes out the arrays of an array whose items are unique."""
        keywords, pointer = node.keywords, f"{node.pointer}/uniqueItems"
        if keywords.get("type") != "array":
            self._fail("uniqueItems needs the type array", pointer)
        if keywords.get("maxItems", 2) <= 1:
            return
        found = followed(self._links, f"{node.pointer}/items")
        if found is None or (arrays := unique_arrays(keywords, found[1])) is None:
            self._fail("uniqueItems can be held where the items are of an enum that makes few arrays: 326 of 5 values", pointer)
        self._spend(len(arrays), pointer)
        keywords["enum"] = arrays

    def _boolean(self, value: Any, pointer: str, depth: int, merged: bool) -> bool:
        if not isinstance(value, bool):
            self._fail(f"must be true or false, not {_shown(value)}", pointer)
        return value

    def _spend(self, count: int, pointer: str) -> None:
        self._num_values += count
        if self._num_values > self._options.max_values:
            self._fail(f"the schema has more than {self._options.max_values} properties and values", pointer)

    def _fail(self, message: str, pointer: str) -> NoReturn:
        raise SchemaError(message, pointer)


T = TypeVar("T")


def _digits(value: float) -> int:
    """A number without its powers of ten."""
    return int("".join(map(str, decimal.Decimal(repr(value)).normalize().as_tuple().digits)))


def _within(found: list[T], start: str, pointer: Callable[[T], str]) -> list[T]:
    """Returns the entries below ``start`` of a list sorted by pointer."""
    low = bisect.bisect_left(found, start + "/", key=pointer)
    return found[low : bisect.bisect_left(found, start + "0", low, key=pointer)]  # "0" follows "/"


def _modern(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Boolean exclusive bounds of draft 4 in today's form."""
    found = dict(schema)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    return found


def _spell_out(keywords: dict[str, Any]) -> None:
    """Puts patterns in the place of formats that llguidance holds otherwise, and of lookaheads."""
    patterns = [PATTERNS[keywords.pop("format")]] if keywords.get("format") in PATTERNS else []
    if "pattern" in keywords:
        patterns = [*json_patterns(keywords.pop("pattern")), *patterns]
    if patterns:
        keywords["pattern"], *others = patterns
        if others:
            keywords["allOf"] = [*keywords.get("allOf", ()), *({"pattern": pattern} for pattern in others)]


def _bound_integer(keywords: dict[str, Any]) -> None:
    if keywords.get("type") != "integer" or "enum" in keywords or "const" in keywords:
        return
    lows = [keywords[name] for name in ("minimum", "exclusiveMinimum") if name in keywords]
    highs = [keywords[name] for name in ("maximum", "exclusiveMaximum") if name in keywords]
    low, high = max(lows, default=-math.inf), min(highs, default=math.inf)
    if low < -_INTEGER < high:
        keywords.pop("exclusiveMinimum", None)
        keywords["minimum"] = -_INTEGER
    if high > _INTEGER > low:
        keywords.pop("exclusiveMaximum", None)
        keywords["maximum"] = _INTEGER


def _representable(bound: float, *, up: bool) -> float:
    """The nearest float64 that is not beyond a bound: llguidance rounds, also outward."""
    if abs(bound) > _LARGEST:
        return bound
    rounded = float(bound)
    if rounded == bound:
        return bound
    if (rounded < bound) == up:
        rounded = math.nextafter(rounded, math.inf if up else -math.inf)
    return int(rounded)


def names_open_keys(schema: Schema) -> bool:
    """Whether a narrowed schema has an object that says what some keys have, and allows others."""
    pending: list[Any] = [schema]
    while pending:
        own = pending.pop()
        if isinstance(own, dict) and own.get("additionalProperties") is not False and own.keys() & _NAMING:
            return True
        pending += (below for _, below in subschemas(own))
    return False


def _close_object(keywords: dict[str, Any]) -> None:
    properties = keywords.get("properties")
    if not properties or "additionalProperties" in keywords or "patternProperties" in keywords:
        return
    if set(keywords.get("required", ())) <= set(properties) and keywords.get("minProperties", 0) <= len(properties):
        keywords["additionalProperties"] = False


def _check_counted_keys(node: _Node) -> None:
    """A key may come twice where an object is open, which counts as one: fewer than were asked for."""
    keywords = node.keywords
    least = keywords.get("minProperties", 0)
    if least > max(len(keywords.get("required", ())), 1) and keywords.get("additionalProperties") is not False:
        message = "minProperties can only be held where additionalProperties is false, or when the properties are required"
        raise SchemaError(message, f"{node.pointer}/minProperties")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def refusal(error: SchemaError, param: str) -> RequestError:
    """The error as a client gets it."""
    return RequestError(f"the schema at #{error.pointer}: {error.message}", param, code="unsupported_schema")


def unique_arrays(schema: Mapping[str, Any], items: Any) -> list[list[Any]] | None:
    """Every array without repetitions that the schema may allow; None: they are not known, too many, or none.

    They are written out, since no grammar remembers what it has read.

    Args:
        items: the schema of the items, behind its references.
    """
    if schema.keys() & {"prefixItems", "enum", "const"} or not isinstance(items, dict):
        return None
    if any(says(name) for name in items.keys() - {"type", "enum", "const"}):
        return None
    named, kind = constants(items), items.get("type")
    values = list(named.values()) or (_BY_TYPE.get(kind, []) if isinstance(kind, str) else [])
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    sizes = range(least, most + 1)
    if not values or not sizes or sum(math.perm(len(values), size) for size in sizes) > _ARRAYS:
        return None
    return [list(array) for size in sizes for array in itertools.permutations(values, size)]
