"""GrammarFactory: checks what a request says about its output and makes a Constraint of it."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.bounded_cache import BoundedCache
from headrace.config import StructuredOutputsConfig
from headrace.constrain.compiler import compiled
from headrace.constrain.compose import AnswerPlan, compose
from headrace.constrain.limits import make_pool
from headrace.constrain.references import subschemas
from headrace.constrain.schema import Schema, SchemaError, SchemaOptions, narrow, refusal
from headrace.constrain.structural import structural_grammar
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.request import Constraint
from headrace.errors import QueueFullError, RequestError
from headrace.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_CACHED = 256
_CACHED_BYTES = 2**24
_WAITING_BYTES = 2**26
"""Most that one tenant's unchecked constraints may take while they wait. One alone is always taken."""
_WHITESPACE = r"(\x20|\n[\x20\t]{0,32})"
"""Between tokens of JSON, once a place: what json.dumps writes, with and without indent. A model may go on without end
where whitespace may."""
_WHITESPACE_ONLY = re.compile(r"(?:\\x(?:20|09|0[aA]|0[dD])|\\[stnr]|[ \t\n\r]|[\[\]()|*+?]|\{\d{1,4}(?:,\d{0,4})?\})+")
_ESCAPES = 'bfnrt\\"u'
"""Letters of JSON's escapes, without the slash: "\\/" would be another spelling of a key that the schema names."""
_SEARCH_SECONDS = 0.5
"""How long schemas are compiled on their own to find the one that cannot be held."""
_GBNF_RULES = 1000
"""Its converter takes time with the square of their number."""
_WRITING = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "strict")
"""Fields of StructuredOutputsParams that say how JSON is written."""
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*(?=[{\[])")


class GrammarFactory:
    """Makes constraints of one engine. Safe to use from several threads; equal constraints are checked once."""

    def __init__(self, config: StructuredOutputsConfig, vocabulary: GrammarVocabulary | None) -> None:
        self.config = config
        self._vocabulary = vocabulary
        self._bytes = GrammarVocabulary.of_bytes()
        self.pool = make_pool(config)
        """Checks what requests hold; see ``prepare``."""
        self._cache: BoundedCache[bytes, Constraint | RequestError] = BoundedCache(_CACHED, _CACHED_BYTES, _size)
        self._pending: dict[bytes, Future[Constraint | RequestError]] = {}
        """What ``prepare`` waits for."""
        self._waiting: dict[str, int] = {}
        """Bytes of constraints that each tenant waits for."""

    @property
    def special_texts(self) -> Sequence[str]:
        """What spells a token that is never text."""
        return [] if self._vocabulary is None else list(self._vocabulary.names)

    def constraint(self, params: StructuredOutputsParams | None, plan: AnswerPlan | None = None) -> Constraint:
        """Takes some milliseconds, a bomb up to a second; an event loop calls ``prepare`` instead.

        Args:
            params: of the content.
            plan: what else an answer has; None: the content alone. One of the two is given.

        Raises:
            RequestError: the constraint cannot be held; ``param`` begins with ``structured_outputs``, or is the plan's.
        """
        plan = None if plan is None or plan.plain else plan
        return _unwrapped(self._outcome(_key(params, plan), params, plan))

    async def prepare(
        self, params: StructuredOutputsParams | None, plan: AnswerPlan | None = None, tenant: str = ""
    ) -> Constraint:
        """As ``constraint``, in one of a few threads, which tenants have in turns.

        Raises:
            QueueFullError: this tenant waits for too many.
        """
        plan = None if plan is None or plan.plain else plan
        key = _key(params, plan)
        if (found := self._cache.get(key)) is not None:
            return _unwrapped(found)
        waiting = self._waiting.get(tenant, 0)
        if waiting and waiting + len(key) > _WAITING_BYTES:
            message = f"structured outputs of {waiting} bytes wait to be checked for this client; try again later"
            raise QueueFullError(message, "structured_outputs")
        self._waiting[tenant] = waiting + len(key)
        try:
            # Others may wait for it, so that it is done even if this request is dropped.
            return _unwrapped(await asyncio.shield(asyncio.wrap_future(self._submitted(key, params, plan, tenant))))
        finally:
            self._waiting[tenant] -= len(key)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _submitted(
        self, key: bytes, params: StructuredOutputsParams | None, plan: AnswerPlan | None, tenant: str
    ) -> Future[Constraint | RequestError]:
        future = self._pending.get(key)
        if future is not None:
            self.pool.share(tenant, future)
            return future
        future = self._pending[key] = self.pool.submit(tenant, functools.partial(self._outcome, key, params, plan))
        future.add_done_callback(lambda _: self._pending.pop(key))
        return future

    def _outcome(
        self, key: bytes, params: StructuredOutputsParams | None, plan: AnswerPlan | None
    ) -> Constraint | RequestError:
        found = self._cache.get(key)
        if found is None:
            try:
                found = self._checked(params) if plan is None else self._composed(params, plan)
            except RequestError as error:
                found = error.with_traceback(None)
            self._cache.put(key, found)
        return found

    def _composed(self, params: StructuredOutputsParams | None, plan: AnswerPlan) -> Constraint:
        answer = None if params is None else self.constraint(params)
        kind = "tools" if plan.rules is not None else answer.kind if answer is not None else "thinking_token_budget"
        grammar = compose(plan, None if answer is None else answer.grammar, self._held)
        problem = self._problem(grammar, named=True)
        if problem:
            param = plan.rules.param if plan.rules is not None else "structured_outputs" if answer is not None else kind
            raise RequestError(f"{param}: the grammar of the answer cannot be held: {problem}", param)
        return Constraint(kind, grammar)

    def _checked(self, params: StructuredOutputsParams | None) -> Constraint:
        if params is None:
            raise ValueError("neither content nor a plan is given")
        try:
            return self._make(params)
        except RequestError as error:
            error.param = f"structured_outputs.{error.param or params.kind}"
            raise

    def _make(self, params: StructuredOutputsParams) -> Constraint:
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
        problem = self._problem(grammar, named=kind in ("grammar", "structural_tag"))
        if problem and kind == "json":
            raise refusal(self._culprit(params, problem), "json")
        if problem:
            raise RequestError(f"{kind} cannot be held: {problem}", kind)
        return Constraint(kind, grammar, guarded=kind in ("json", "json_object", "regex", "grammar"))

    def _held(self, **content: Any) -> str:
        """The grammar of a part of an answer."""
        return self.constraint(StructuredOutputsParams(**content)).grammar

    def _problem(self, grammar: str, *, named: bool = False) -> str:
        """What is wrong with a grammar; empty: nothing. ``named``: it may name special tokens of the vocabulary."""
        vocabulary = self._vocabulary if named and self._vocabulary is not None else self._bytes
        try:
            compiled(grammar, vocabulary, self.config)
        except RequestError as error:
            return error.message
        return ""

    # ------------------------------------------------------------------ kinds

    def _json(self, params: StructuredOutputsParams) -> str:
        try:
            return self._json_grammar(self._narrowed(params), params)
        except SchemaError as error:
            raise refusal(error, "json") from None

    def _narrowed(self, params: StructuredOutputsParams) -> Schema:
        try:
            schema = json.loads(params.json, parse_constant=_no_constant)
            return narrow(schema, self._schema_options(params))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is not JSON: {str(error)[:200]}", "json") from None

    def _json_object(self, params: StructuredOutputsParams) -> str:
        return self._json_grammar({"type": "object"}, params)

    def _json_grammar(self, schema: Schema, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        compact = params.disable_any_whitespace
        if compact is None:
            compact = self.config.disable_any_whitespace and params.whitespace_pattern is None
        overrides: JsonCompileOptions = {"whitespace_flexible": not compact, "json_allowed_escapes": _ESCAPES, "lenient": False}
        if not compact:
            overrides["whitespace_pattern"] = _whitespace(params.whitespace_pattern)
        held = schema if isinstance(schema, dict) else {} if schema else {"anyOf": []}
        try:
            return LLMatcher.grammar_from_json_schema(json.dumps(held, ensure_ascii=False), overrides=overrides)
        except (ValueError, RecursionError):  # A const or enum, since schemas have a limit of their own.
            raise SchemaError("a value is nested too deep", "") from None

    def _regex(self, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        return LLMatcher.grammar_from_regex(params.regex or "")

    def _choice(self, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        choices = list(dict.fromkeys(params.choice or ()))
        if len(choices) > self.config.max_values:
            raise RequestError(f"choice has {len(choices)} strings, more than the limit of {self.config.max_values}", "choice")
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}")

    def _grammar(self, params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        text = params.grammar or ""
        if _GBNF.search(text):
            return _from_gbnf(text)
        for found in _EMBEDDED.finditer(text):
            try:
                schema, _ = json.JSONDecoder().raw_decode(text, found.end())
            except (ValueError, RecursionError):
                continue  # Not JSON after all, or llguidance says what is wrong with it.
            try:
                narrow(schema, self._schema_options(params))
            except SchemaError as error:
                raise refusal(error, "grammar") from None
        return LLMatcher.grammar_from_lark(text)

    def _structural_tag(self, params: StructuredOutputsParams) -> str:
        names = self._vocabulary.names if self._vocabulary is not None else {}
        writing = {name: getattr(params, name) for name in _WRITING}

        def hold(**content: Any) -> str:
            return self._held(**content, **(writing if "json" in content else {}))

        return structural_grammar(params.structural_tag, names, hold)

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
        return self._problem(self._json_grammar({**shared, **schema}, params))


def _unwrapped(found: Constraint | RequestError) -> Constraint:
    """Raises the error as one of its own: requests name their own fields in it."""
    if isinstance(found, RequestError):
        raise type(found)(found.message, found.param, code=found.code)
    return found


def _size(key: bytes, found: Constraint | RequestError) -> int:
    return len(key) + (len(found.grammar) if isinstance(found, Constraint) else 0)


def _key(params: StructuredOutputsParams | None, plan: AnswerPlan | None) -> bytes:
    return msgspec.msgpack.encode((params, None if plan is None else plan.key))


def _whitespace(pattern: str | None) -> str:
    """A pattern of a request, in which \\s is JSON's whitespace and not Unicode's."""
    if pattern is None:
        return _WHITESPACE
    if not _WHITESPACE_ONLY.fullmatch(pattern):
        raise RequestError(f"whitespace_pattern may match whitespace only, not {pattern!r}", "whitespace_pattern")
    inside = re.sub(r"\[[^]]*\]", lambda found: found[0].replace(r"\s", r" \t\n\r"), pattern)
    return inside.replace(r"\s", r"[ \t\n\r]")


def _from_gbnf(text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if text.count("::=") > _GBNF_RULES:
        raise RequestError(f"grammar has more than {_GBNF_RULES} rules in GBNF; Lark has no such limit", "grammar")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # A parser without an error type for all that can go wrong.
        raise RequestError(f"grammar is not GBNF: {str(error)[:200] or type(error).__name__}", "grammar") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
