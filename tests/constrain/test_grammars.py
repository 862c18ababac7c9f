"""Matchers of requests' constraints: kinds, options, refusals, limits, caches, and the masks themselves."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from support.hostile_constraints import BOMBS
from support.words import EOS, OTHER_SPECIAL, PIECES, VOCAB, accepts, allowed, matcher, tokenizer, walk

from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.matcher import reason
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.matcher import TOO_COMPLEX
from headrace.core.request import Constraint
from headrace.errors import RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams

GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "hi"\nname ::= [A-Z] [a-z]+\n'
LARK = 'start: "SELECT " NAME (", " NAME)*\nNAME: /[a-z]+/\n'
KINDS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": r"\d{3}-[a-f]+|x{2,5}"},
    {"choice": ["yes", "no", "nö", 'qu"ote', "yesterday"]},
    {"grammar": GBNF},
    {"grammar": LARK},
]


@functools.lru_cache(maxsize=1)
def factory_of(config: StructuredOutputsConfig) -> GrammarFactory:
    """One for several tests, since its processes take a while to start."""
    return GrammarFactory(config, GrammarVocabulary(tokenizer(), VOCAB))


def make(config: StructuredOutputsConfig | None = None) -> tuple[GrammarFactory, GrammarCompiler]:
    config = config or StructuredOutputsConfig()
    return factory_of(config), GrammarCompiler(GrammarVocabulary(tokenizer(), VOCAB), config)


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        ({"json_object": True}, ["{}", '{"a": [1, "b"]}', '{\n  "a": 1\n}'], ["[]", "1", "{", '{"a"  : 1}']),
        ({"regex": r"\d{3}-[a-f]+"}, ["123-abc"], ["12-abc", "123-", "x123-a"]),
        ({"choice": ["yes", "no", 'qu"ote', "yesterday"]}, ["yes", "no", 'qu"ote', "yesterday"], ["ye", "noo", ""]),
        ({"grammar": GBNF}, ["hello Ada", "hi Bob"], ["hey Ada", "hi ada"]),
        ({"grammar": LARK}, ["SELECT a", "SELECT a, bc"], ["SELECT ", "SELECT a,b"]),
        ({"json_object": True, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json_object": True, "whitespace_pattern": r"[\s]?"}, ['{"a":\t1}'], ['{"a":  1}', '{"a":\u00a01}']),
        ({"json": '{"type": "integer"}'}, ["1"], ["a"]),
        ({"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": False}, ['{"b": 1}'], ["[]"]),
    ],
    ids=str,
)
def test_kinds_and_options(constraint: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    made = matcher(**constraint)
    assert [text for text in right if not accepts(made, text)] == []
    assert [text for text in wrong if accepts(made, text)] == []


EMBEDDED: list[tuple[Any, list[str], list[str]]] = [
    (
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        ['{"a": 1, "b": 2}'],
        [r'{"a": 1, "\u0061": "x"}'],
    ),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"']),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1, 2]"], ["[1, 1]"]),
    ({"type": "string", "pattern": "^(?!a)"}, ['"b"'], ['"a"']),
    (True, ["1"], ["x"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), EMBEDDED, ids=str)
def test_a_schema_in_a_grammar_is_held_as_one_alone(schema: Any, right: list[str], wrong: list[str]) -> None:
    made = matcher(grammar=f'start: "%json {{\\"a\\": 1}}" (value ";")+ // %json {{}}\nvalue: %json {json.dumps(schema)}\n')
    for text in right:
        assert accepts(made, f'%json {{"a": 1}}{text};{text};')
    for text in wrong:
        assert not accepts(made, f'%json {{"a": 1}}{text};')


def test_options_of_writing_hold_for_schemas_in_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "x"}}}
    made = matcher(grammar=f"start: %json {json.dumps(schema)}", disable_additional_properties=False, strict=False)
    assert accepts(made, '{"a": "b", "c": 1}')


@pytest.mark.parametrize("text", ["x", "#", "%json", '"' * 99, '{"grammars": [{"json_schema": {"type": "null"}}]}'])
def test_a_text_without_rules_is_no_grammar(text: str) -> None:
    with pytest.raises(RequestError, match="grammar") as caught:
        matcher(grammar=text)
    assert caught.value.param == "structured_outputs.grammar"


def test_a_pydantic_class_stands_for_its_schema() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int | None

    made = matcher(json=Person)
    assert accepts(made, '{"name": "Ada", "age": null}') and not accepts(made, '{"name": "Ada"}')


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({}, None),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"json_object": False}, "json_object"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"regex": "a\0b"}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": 7}, "regex"),
        ({"json": 7}, "json"),
        ({"json": {"a": float("nan")}}, "json"),
        ({"json": {"const": "\ud800"}}, "json"),
        ({"regex": "\ud800"}, "regex"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
    ids=str,
)
def test_params_are_checked_when_they_are_made(constraint: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**constraint)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("constraint", "param", "message"),
    [
        ({"regex": "b(?=a)"}, "structured_outputs.regex", "look-around"),
        ({"regex": "("}, "structured_outputs.regex", "unclosed"),
        ({"regex": "()"}, "structured_outputs.regex", "empty text"),
        ({"json": False}, "structured_outputs.json", "Unsatisfiable"),
        ({"grammar": "start: foo"}, "structured_outputs.grammar", "foo"),
        ({"grammar": "root ::= foo"}, "structured_outputs.grammar", "foo"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "structured_outputs.grammar", "GBNF"),
        ({"grammar": 'start: "a" %json {"unknwn": 1}'}, "structured_outputs.grammar", "unknwn"),
        ({"json": "{"}, "structured_outputs.json", "not JSON"),
        ({"json": "[" * 100_000}, "structured_outputs.json", "not JSON"),
        ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "NaN"),
        ({"json": '{"const": ' + "[" * 200 + "]" * 200 + "}"}, "structured_outputs.json", "nested too deep"),
        ({"json_object": True, "whitespace_pattern": "a?"}, "structured_outputs.whitespace_pattern", "whitespace only"),
        ({"choice": [f"c{i}" for i in range(20_001)]}, "structured_outputs.choice", "20001"),
        ({"regex": "a" * (2**20 + 1)}, "structured_outputs.regex", "limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_held_is_refused_by_name(constraint: dict[str, Any], param: str, message: str) -> None:
    factory, _ = make()
    for _ in range(2):  # The second time from the cache.
        with pytest.raises(RequestError, match=message) as caught:
            factory.constraint(StructuredOutputsParams(**constraint))
        assert caught.value.param == param


@pytest.mark.parametrize("constraint", KINDS, ids=str)
def test_a_mask_is_what_the_matcher_takes(constraint: dict[str, Any]) -> None:
    """Along random outputs: every allowed token is taken, no other is, and the end is allowed exactly where it may be."""
    chance = random.Random(5)
    state = matcher(**constraint)
    for _ in range(25):
        tokens = allowed(state)
        assert (EOS in tokens) == state.accepting
        assert OTHER_SPECIAL not in tokens and not tokens & {token for token in range(VOCAB) if not PIECES[token]}
        for token in range(VOCAB):
            if token != EOS:
                assert state.inner.validate_tokens([token]) == (token in tokens), PIECES[token]
        following = sorted(tokens - {EOS})
        if not following:
            assert state.ended
            break
        before = allowed(state)
        token = chance.choice(following)
        assert state.advance([token]) is None
        state.rollback(1)
        assert allowed(state) == before
        state.advance([token])


@pytest.mark.parametrize("constraint", KINDS, ids=str)
def test_the_end_is_seen_when_it_is_reached(constraint: dict[str, Any]) -> None:
    """``walk`` asserts that a matcher which has not ended allows a token."""
    assert any(walk(matcher(**constraint), seed)[1] for seed in range(8))


def test_tokens_that_end_a_sequence_are_text_nowhere() -> None:
    """A stop token whose text the grammar would take is the end where the grammar accepts, and banned elsewhere."""
    state = matcher(ends=(EOS, ord("b"), VOCAB + 5, -1), regex="a[bc]*d?")
    assert allowed(state) == {ord("a"), PIECES.index(b"abc")}
    state.advance([ord("a")])
    assert {EOS, ord("b")} <= allowed(state)
    string = matcher(ends=(), json={"type": "string"})
    string.advance([ord('"')])
    inside = allowed(string)
    assert EOS not in inside and OTHER_SPECIAL not in inside
    assert PIECES.index(b"</think>") in inside and PIECES.index(b"</s>") in inside


def test_a_refused_token_is_an_error_for_good() -> None:
    state = matcher(choice=["yes", "no"])
    assert state.advance([ord("x")]) is not None
    assert not state.ended and not state.accepting and state.error is not None


def test_copies_are_independent() -> None:
    state = matcher(regex="[ab]{3}")
    other = state.copy()
    state.advance(list(b"aab"))
    assert state.ended and not other.ended and allowed(other) == {ord("a"), ord("b")}


def test_equal_constraints_are_compiled_once_and_failures_are_kept() -> None:
    factory, compiler = make()
    first = factory.constraint(StructuredOutputsParams(json={"type": "object", "title": "one"}))
    second = factory.constraint(StructuredOutputsParams(json={"title": "two", "type": "object"}))
    assert first.grammar == second.grammar
    future, known = compiler.compile(first)
    assert not known and compiler.compile(second) == (future, True)
    bad = Constraint("regex", "no grammar")
    for known in (False, True):
        future, found = compiler.compile(bad)
        assert found is known
        assert isinstance(future.result(), str)


def test_the_cache_is_bounded_in_bytes() -> None:
    factory, compiler = make(StructuredOutputsConfig(cache_bytes=300_000))
    constraints = [factory.constraint(StructuredOutputsParams(regex=f"[a-z]{{{count}}}")) for count in range(1, 9)]
    for constraint in constraints:
        compiler.compile(constraint)[0].result()
    assert compiler.compile(constraints[-1])[1] and not compiler.compile(constraints[0])[1]
    factory, compiler = make(StructuredOutputsConfig(cache_bytes=0))
    assert not compiler.compile(constraints[0])[1] and not compiler.compile(constraints[0])[1]


def test_a_vocabulary_that_cannot_be_built_refuses_with_the_reason() -> None:
    class Broken:
        vocab_size = VOCAB

        @property
        def token_bytes(self) -> Any:
            raise ValueError("no bytes here")

    vocabulary = GrammarVocabulary(Broken(), VOCAB)
    compiler = GrammarCompiler(vocabulary, StructuredOutputsConfig())
    constraint = make()[0].constraint(StructuredOutputsParams(regex="a"))
    for _ in range(2):
        assert "no bytes here" in str(compiler.compile(constraint)[0].result())
        with pytest.raises(RequestError, match="no bytes here"):
            vocabulary.get()
    with pytest.raises(RequestError, match="no bytes here"):
        GrammarFactory(StructuredOutputsConfig(), vocabulary).constraint(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_bounded(name: str) -> None:
    """Refused, or compiled and advanced in bounded time; an error on the way is one of this matcher alone."""
    factory, compiler = make()
    start = time.process_time()
    try:
        state = compiler.compile(factory.constraint(StructuredOutputsParams(**BOMBS[name])))[0].result().copy()
        chance = random.Random(1)
        for _ in range(20):
            tokens = sorted(allowed(state) - {EOS})
            if not tokens or state.advance([chance.choice(tokens)]) is not None:
                break
    except (RequestError, AssertionError) as error:
        assert "structured_outputs" in str(getattr(error, "param", "")) or "grammar_too_complex" in str(error)
    assert time.process_time() - start < 20


def test_the_error_of_a_panic_has_no_backtrace() -> None:
    message = reason("panic: assertion failed: symbols.len() < u16::MAX <backtrace> 0: <unknown> 1: <unknown>")
    assert message == f"{TOO_COMPLEX}: panic: assertion failed: symbols.len() < u16::MAX"


def test_nothing_is_imported_before_it_is_needed() -> None:
    """A server that holds no constraint pays neither for llguidance nor for the vocabulary."""
    code = (
        "import sys\nfrom headrace.constrain import compiler, constraints, factory, fields, vocabulary\n"
        "import headrace.startup.text, headrace.server.fields\nassert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
