"""ConstraintChecker: checks what a request says about its output and makes a Constraint of it.

It runs in a process with limits (``check_worker``): parsing, walking and compiling take what the input decides, and the
library recurses over it in native code.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.constrain.compiler import compiled
from headrace.constrain.compose import AnswerPlan, compose
from headrace.constrain.lark import QUIET, Hold, serialised, with_schemas
from headrace.constrain.lookaheads import lark_terminal
from headrace.constrain.matcher import words
from headrace.constrain.paths import check_rules
from headrace.constrain.references import subschemas
from headrace.constrain.schema import Schema, SchemaError, SchemaOptions, names_open_keys, narrow, refusal
from headrace.constrain.structural import structural_grammar
from headrace.constrain.vocabulary import GrammarVocabulary, VocabularyTable
from headrace.core.matcher import TOO_COMPLEX
from headrace.core.request import Constraint
from headrace.errors import RequestError
from headrace.host.bounded_cache import BoundedCache
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_PIECE = re.compile(r"\\[xuUpP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([()])|\{(\d{1,10})(?:,\d*)?\}", re.DOTALL)
"""Escapes and classes, in which nothing counts; brackets; and the least count of a repetition. The library refuses counts of
more digits."""


def too_many_repetitions(pattern: str, most: int) -> str | None:
    """Returns why a pattern is refused that asks for more than ``most`` repetitions, those of nested groups multiplied.

    The library would repeat the part one by one until it passes another of its limits, which takes a second of processor
    time.
    """
    groups, last, end = [1], 1, -1
    for found in _PIECE.finditer(pattern):
        bracket, count = found.groups()
        inner = last if found.start() == end else 1
        last, end = 1, -1
        if bracket == "(":
            groups.append(1)
        elif bracket and len(groups) > 1:
            last, end = groups.pop(), found.end()
        elif count:
            last, end = inner * max(int(count), 1), found.end()
            if last > most:
                return f"{TOO_COMPLEX}: it repeats a part {last} times, more than the limit of {most} (max_grammar_size)"
        groups[-1] = max(groups[-1], last)
    return None


def too_many_in_grammar(grammar: str, most: int) -> str | None:
    """``too_many_repetitions`` of the regular expressions in a Lark grammar."""
    patterns = (found[0][1:-1] for found in QUIET.finditer(grammar) if found[0].startswith("/") and found[0][1] != "/")
    return next(filter(None, (too_many_repetitions(pattern, most) for pattern in patterns)), None)


_GUARDED = frozenset(("json", "json_object", "regex", "grammar"))
"""Kinds of constraints whose outputs end when they repeat themselves."""
_CACHED = 256
_CACHED_BYTES = 2**24
_WHITESPACE = r"(\x20|\n[\x20\t]{0,32})"
"""Between tokens of JSON, once a place: what json.dumps writes, with and without indent. A model may go on without end
where whitespace may."""
_WHITESPACE_ONLY = re.compile(r"(?:\\x(?:20|09|0[aA]|0[dD])|\\[stnr]|[ \t\n\r]|[\[\]()|*+?]|\{\d{1,4}(?:,\d{0,4})?\})+")
_ESCAPES = 'bfnrt\\"u'
"""Letters of JSON's escapes, without the slash, which needs none."""
_NULL = {"type": "null"}
_COMPACT = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
_SEARCH_SECONDS = 0.5
"""Time for which schemas are compiled one by one to find the one that cannot be held."""
_GBNF_RULES = 1000
"""Most rules of a GBNF grammar: its converter takes time with the square of their number."""
_WRITING = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "strict")
"""Fields of StructuredOutputsParams that say how JSON is written."""
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class CheckSetup(msgspec.Struct, frozen=True):
    """Setup of the process that checks constraints, sent before the first."""

    config: dict[str, Any]
    """Fields of StructuredOutputsConfig."""
    vocabulary: VocabularyTable


class CheckJob(msgspec.Struct, frozen=True):
    """A constraint as ``GrammarFactory.constraint`` gets it."""

    params: StructuredOutputsParams | None
    plan: AnswerPlan | None


class Refused(msgspec.Struct, frozen=True):
    """Reason why a constraint cannot be held: a RequestError as data, without the frames of its traceback."""

    message: str
    param: str | None = None
    code: str = RequestError.code

    def error(self) -> RequestError:
        return RequestError(self.message, self.param, code=self.code)


class Checked(msgspec.Struct, frozen=True):
    """Result of a check: one of the two, or none where the constraint needs more memory or stack than there is."""

    constraint: Constraint | None = None
    refused: Refused | None = None


class ConstraintChecker:
    """Makes constraints of one engine. For one thread."""

    def __init__(self, config: StructuredOutputsConfig, vocabulary: GrammarVocabulary) -> None:
        self.config = config
        self._vocabulary = vocabulary
        self._bytes = GrammarVocabulary.of_bytes()
        self._parts: BoundedCache[StructuredOutputsParams, str] = BoundedCache(
            _CACHED, _CACHED_BYTES, lambda params, grammar: len(grammar)
        )
        """Grammars of parts of answers: the tools of an agent are in each of its requests."""

    def prepare(self) -> None:
        """Builds both vocabularies and loads what checks need, so that their time and memory are not a constraint's."""
        from llguidance import LLMatcher, gbnf_to_lark  # noqa: F401

        for vocabulary in (self._bytes, self._vocabulary):
            compiled(LLMatcher.grammar_from_regex("[a-z]"), vocabulary, self.config)

    def constraint(self, params: StructuredOutputsParams | None, plan: AnswerPlan | None = None) -> Constraint:
        """
        Args:
            params: of the content.
            plan: what else an answer has; None: the content alone. One of the two is given.

        Raises:
            RequestError: the constraint cannot be held; ``param`` begins with ``structured_outputs``, or is the plan's.
        """
        if plan is not None:
            return self._composed(params, plan)
        if params is None:
            raise ValueError("neither content nor a plan is given")
        return self._checked(params)

    def _composed(self, params: StructuredOutputsParams | None, plan: AnswerPlan) -> Constraint:
        answer = None if params is None else self._checked(params, part=True)
        kind = "tools" if plan.rules is not None else answer.kind if answer is not None else "thinking_token_budget"
        grammar = compose(plan, None if answer is None else answer.grammar, self._held)
        nbytes = self._nbytes(grammar, self._vocabulary)
        if isinstance(nbytes, str):
            param = plan.rules.param if plan.rules is not None else "structured_outputs" if answer is not None else kind
            raise RequestError(f"{param}: the grammar of the answer cannot be held: {nbytes}", param)
        return Constraint(kind, grammar, nbytes=nbytes)

    def _nbytes(self, grammar: str, vocabulary: GrammarVocabulary) -> int | str:
        """Returns the bytes that the matcher of a grammar takes, or why it cannot be held."""
        before = native_bytes()
        matcher = compiled(grammar, vocabulary, self.config)
        if isinstance(matcher, str):
            return matcher
        nbytes = native_bytes() - before
        # What passes a limit at once would be compiled in the engine in vain, and stay in its cache.
        problem = matcher.first_step()
        return problem if problem is not None and problem.startswith(TOO_COMPLEX) else nbytes

    def _checked(self, params: StructuredOutputsParams, *, part: bool = False) -> Constraint:
        """``part``: of an answer, whose grammar is compiled as a whole."""
        try:
            return self._make(params, part)
        except RequestError as error:
            error.param = f"structured_outputs.{error.param or params.kind}"
            raise

    def _make(self, params: StructuredOutputsParams, part: bool) -> Constraint:
        kind = params.kind
        value = getattr(params, kind)
        length = sum(map(len, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0
        if length > self.config.max_bytes:
            raise RequestError(f"{kind} has {length} characters, more than the limit of {self.config.max_bytes}", kind)
        makers: dict[str, Callable[[StructuredOutputsParams], str]] = {
            "json": self._json,
            "json_object": self._json_object,
            "regex": self._regex,
            "choice": self._choice,
            "grammar": self._grammar,
            "structural_tag": self._structural_tag,
        }
        grammar = makers[kind](params)
        # Grammars and tags may name tokens of the vocabulary.
        quick = part and kind not in ("grammar", "structural_tag")
        nbytes = self._nbytes(grammar, self._bytes if quick else self._vocabulary)
        if not isinstance(nbytes, str):
            return Constraint(kind, grammar, guarded=kind in _GUARDED, nbytes=nbytes)
        if kind == "json":
            raise refusal(self._culprit(params, nbytes), "json")
        raise _cannot_be_held(kind, nbytes)

    def _held(self, **content: Any) -> str:
        """The grammar of a part of an answer."""
        params = StructuredOutputsParams(**content)
        if (grammar := self._parts.get(params)) is None:
            grammar = self._checked(params, part=True).grammar
            self._parts.put(params, grammar)
        return grammar

    # ------------------------------------------------------------------ kinds

    def _json(self, params: StructuredOutputsParams) -> str:
        try:
            schema = self._narrowed(params)
            self._check_patterns(schema)
            return self._json_grammar(schema, params)
        except SchemaError as error:
            raise refusal(error, "json") from None

    def _narrowed(self, params: StructuredOutputsParams) -> Schema:
        try:
            schema = json.loads(params.json, parse_constant=_no_constant)
            return narrow(schema, self._schema_options(params))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is not JSON: {str(error)[:200]}", "json") from None

    def _check_patterns(self, schema: Schema) -> None:
        """Refuses patterns with too many repetitions, and closed objects whose patternProperties allow no name beside those of
        properties: behind a comma the library would wait for one."""
        pending = [("", schema)]
        while pending:
            pointer, own = pending.pop()
            pending += ((pointer + step, below) for step, below in subschemas(own))
            if not isinstance(own, dict):
                continue
            names, patterns = own.get("properties"), own.get("patternProperties", ())
            for pattern in (own.get("pattern", ""), *patterns):
                if problem := too_many_repetitions(pattern, self.config.max_grammar_size):
                    raise SchemaError(problem, f"{pointer}/{'patternProperties' if pattern in patterns else 'pattern'}")
            if own.get("additionalProperties") is not False:
                continue
            # Others allow names without end.
            if not names or not patterns or not all("^" in pattern and "$" in pattern for pattern in patterns):
                continue
            keys = {"properties": dict.fromkeys(names, _NULL), "patternProperties": dict.fromkeys(patterns, _NULL)}
            grammar = self._json_grammar({"type": "object", **keys, "additionalProperties": False}, _COMPACT)
            made = compiled(grammar, self._bytes, self.config)
            text = json.dumps(dict.fromkeys(names), ensure_ascii=False, separators=(",", ":"))[:-1] + ","
            if isinstance(made, str) or made.advance([*text.encode()]) is not None:
                continue
            if made.fill(np.zeros(words(made.vocab_size), dtype=np.int32)) is not None:
                message = "it allows no name beside those of properties: merge its schemas into theirs"
                raise SchemaError(message, f"{pointer}/patternProperties")

    def _json_object(self, params: StructuredOutputsParams) -> str:
        return self._json_grammar({"type": "object"}, params)

    def _json_grammar(self, schema: Schema, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        compact = params.disable_any_whitespace
        if compact is None:
            compact = self.config.disable_any_whitespace and params.whitespace_pattern is None
        # "\\u0061" would be another spelling of a key that the schema names.
        escapes = _ESCAPES.replace("u", "") if names_open_keys(schema) else _ESCAPES
        overrides: JsonCompileOptions = {"whitespace_flexible": not compact, "json_allowed_escapes": escapes, "lenient": False}
        if not compact:
            overrides["whitespace_pattern"] = _whitespace(params.whitespace_pattern)
        held = schema if isinstance(schema, dict) else {} if schema else {"anyOf": []}
        try:
            return LLMatcher.grammar_from_json_schema(json.dumps(held, ensure_ascii=False), overrides=overrides)
        except (ValueError, RecursionError):  # A const or enum, since schemas have a limit of their own.
            raise SchemaError("a value is nested too deep", "") from None

    def _regex(self, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        if problem := too_many_repetitions(params.regex or "", self.config.max_grammar_size):
            raise _cannot_be_held("regex", problem)
        if (terminal := lark_terminal(params.regex or "")) is not None:
            return serialised(f"start: TEXT\nTEXT: {terminal}")
        return LLMatcher.grammar_from_regex(params.regex or "")

    def _choice(self, params: StructuredOutputsParams) -> str:
        choices = list(dict.fromkeys(params.choice or ()))
        if len(choices) > self.config.max_values:
            raise RequestError(f"choice has {len(choices)} strings, more than the limit of {self.config.max_values}", "choice")
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return serialised(f"start: CHOICE\nCHOICE: {literals}")

    def _grammar(self, params: StructuredOutputsParams) -> str:
        text = params.grammar or ""
        if _GBNF.search(text):
            return _from_gbnf(text, self.config.max_depth)
        check_rules(text, self.config.max_depth)
        if problem := too_many_in_grammar(text, self.config.max_grammar_size):
            raise _cannot_be_held("grammar", problem)
        try:
            return with_schemas(text, self._hold_as(params))
        except RequestError as error:
            raise RequestError(error.message, "grammar", code=error.code) from None

    def _structural_tag(self, params: StructuredOutputsParams) -> str:
        return structural_grammar(params.structural_tag, self._vocabulary.names, self._hold_as(params))

    def _hold_as(self, params: StructuredOutputsParams) -> Hold:
        """Holds parts of a constraint; JSON is written as ``params`` say."""
        writing = {name: getattr(params, name) for name in _WRITING}
        return lambda **content: self._held(**content, **(writing if "json" in content else {}))

    def _schema_options(self, params: StructuredOutputsParams) -> SchemaOptions:
        closed = params.disable_additional_properties
        return SchemaOptions(
            strict=params.strict,
            closed=self.config.disable_additional_properties if closed is None else closed,
            max_depth=self.config.max_depth,
            max_values=self.config.max_values,
        )

    def _culprit(self, params: StructuredOutputsParams, problem: str) -> SchemaError:
        """The innermost schema that cannot be held on its own either."""
        schema = self._narrowed(params)
        named = schema if isinstance(schema, dict) else {}
        shared: dict[str, Any] = {name: named[name] for name in ("$defs", "definitions") if name in named}
        check = functools.partial(self._problem_of, params=params, shared=shared)
        pointer, deadline = "", time.monotonic() + _SEARCH_SECONDS
        while True:
            for step, own in subschemas(schema):
                if time.monotonic() > deadline:
                    return SchemaError(problem, pointer)
                if isinstance(own, dict) and (found := check(own)):
                    problem, pointer, schema = found, pointer + step, own
                    break
            else:
                return SchemaError(problem, pointer)

    def _problem_of(self, schema: dict[str, Any], params: StructuredOutputsParams, shared: dict[str, Any]) -> str:
        found = compiled(self._json_grammar({**shared, **schema}, params), self._bytes, self.config)
        return found if isinstance(found, str) else ""


def _cannot_be_held(kind: str, problem: str) -> RequestError:
    return RequestError(f"{kind} cannot be held: {problem}", kind)


def native_bytes() -> int:
    """Bytes that libraries in this process have allocated; 0 where the C library does not tell them (glibc before 2.33)."""
    find = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if find is None:
        return 0
    find.restype = _Mallinfo
    found = find()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"_{place}", ctypes.c_size_t) for place in range(4)]
    _fields_ += [("hblkhd", ctypes.c_size_t), ("_5", ctypes.c_size_t), ("_6", ctypes.c_size_t)]
    _fields_ += [("uordblks", ctypes.c_size_t), ("_8", ctypes.c_size_t), ("_9", ctypes.c_size_t)]


def _whitespace(pattern: str | None) -> str:
    """A pattern of a request, in which \\s is JSON's whitespace and not Unicode's."""
    if pattern is None:
        return _WHITESPACE
    if not _WHITESPACE_ONLY.fullmatch(pattern):
        raise RequestError(f"whitespace_pattern may match whitespace only, not {pattern!r}", "whitespace_pattern")
    inside = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(r"\s", r" \t\n\r"), pattern)
    return inside.replace(r"\s", r"[ \t\n\r]")


def _from_gbnf(text: str, max_depth: int) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if text.count("::=") > _GBNF_RULES:
        raise RequestError(f"grammar has more than {_GBNF_RULES} rules in GBNF; Lark has no such limit", "grammar")
    try:
        lark = any_to_lark(text)
    except Exception as error:  # A parser without an error type for all that can go wrong.
        raise RequestError(f"grammar is not GBNF: {str(error)[:200] or type(error).__name__}", "grammar") from None
    check_rules(lark, max_depth)
    return serialised(lark)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
