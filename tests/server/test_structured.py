"""Structured output over HTTP: each spelling reaches the engine as the same constraint, and mistakes name their field."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import msgspec
import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api

from headrace.cli.prompts import parse_line
from headrace.constrain.checker import ConstraintChecker
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.request import Constraint
from headrace.errors import RequestError
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams
from headrace.server.settings import ServerSettings

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "answer", "schema": SCHEMA}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
GRAMMAR = 'root ::= "yes" | "no"'
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"description": "d"}}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"json_object": True, "disable_any_whitespace": True},
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"response_format": TAG}, {"structural_tag": TAG}),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, {"json": SCHEMA, "whitespace_pattern": "[ ]?"}),
    ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
    ({"ebnf": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"grammar": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"guided_regex": None, "response_format": None}, None),
]
PATHS = ("/v1/chat/completions", "/v1/completions")


def expected(meaning: dict[str, Any] | None) -> Constraint | None:
    if meaning is None:
        return None
    checker = ConstraintChecker(StructuredOutputsConfig(), GrammarVocabulary.of_bytes())
    return checker.constraint(StructuredOutputsParams(**meaning))


def without_measures(constraint: Constraint | None) -> Constraint | None:
    """The memory and time that it takes vary."""
    return None if constraint is None else msgspec.structs.replace(constraint, nbytes=0, seconds=0.0)


def send(path: str, fields: dict[str, Any]) -> tuple[Any, FakeLLM]:
    llm = FakeLLM()
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == PATHS[1] else {"messages": [{"role": "user", "content": "Hi"}]}
    return Api(llm).post(path, prompt | {"max_tokens": 4} | fields), llm


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "meaning"), SPELLINGS, ids=lambda value: json.dumps(value)[:60])
def test_every_spelling_reaches_the_engine(path: str, fields: dict[str, Any], meaning: dict[str, Any] | None) -> None:
    response, llm = send(path, fields)
    assert response.status_code == 200, response.text
    assert without_measures(llm.seen[0].constraint) == without_measures(expected(meaning))
    assert llm.seen[0].sampling.structured_outputs is None


@pytest.mark.parametrize(("fields", "meaning"), SPELLINGS, ids=lambda value: json.dumps(value)[:60])
def test_lines_of_a_file_take_the_same_spellings(fields: dict[str, Any], meaning: dict[str, Any] | None) -> None:
    job = parse_line(1, json.dumps({"prompt": "Hi", **{name: value for name, value in fields.items() if value is not None}}))
    assert job.error is None
    params = job.sampling.get("structured_outputs")
    assert params == (None if meaning is None else StructuredOutputsParams(**meaning))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format"),
    ({"structured_outputs": {"regex": "a"}, "regex": "b"}, "regex", "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex", "not a parameter"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "must have format"),
    ({"structured_outputs": "x"}, "structured_outputs", "object"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "only be true"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": "a"}, "guided_choice", "list"),
    ({"regex": "a\0"}, "regex", "NUL"),
    ({"guided_regex": "b(?=a)"}, "guided_regex", "look-around"),
    ({"ebnf": "root ::= x"}, "ebnf", "x"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "whitespace only"),
    ({"guided_json": {"nt": 1}}, "guided_json", "#/nt"),
    ({"response_format": {"type": "json"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "must have a type"),
    ({"response_format": []}, "response_format", "object"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "no field"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "letters",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "a b",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "JSON Schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"not": {}}}}}},
        "response_format.json_schema.schema",
        "#/items/not",
    ),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda value: str(value)[:60])
def test_a_mistake_names_its_field(path: str, fields: dict[str, Any], param: str, message: str) -> None:
    response, llm = send(path, fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and message in error["message"]
    assert not llm.seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_passes_a_limit_is_the_client_s_mistake(stream: bool) -> None:
    mistake = RequestError("structured_outputs: too much", "structured_outputs", code="grammar_too_complex")
    llm = FakeLLM(script=lambda request, index: [mistake])
    response = Api(llm).complete(max_tokens=4, stream=stream, structured_outputs={"regex": "a+"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs", "grammar_too_complex")


def test_a_server_without_a_tokenizer_says_so() -> None:
    llm = FakeLLM()
    llm._tokenizer = None
    llm.inputs = llm._make_inputs()
    response = Api(llm).post("/v1/completions", {"prompt": [1, 2], "max_tokens": 4, "structured_outputs": {"regex": "a"}})
    assert response.status_code == 400 and "tokenizer" in response.json()["error"]["message"]


def test_the_openai_client_parses_into_a_class() -> None:
    """The schema that ``chat.completions.parse`` sends is held as it is."""
    from openai.lib._pydantic import to_strict_json_schema
    from pydantic import BaseModel

    class Part(BaseModel):
        name: str
        amount: float | None

    class Whole(BaseModel):
        title: str
        parts: list[Part]
        kind: Literal["a", "b"]

    schema = to_strict_json_schema(Whole)
    sent = {"type": "json_schema", "json_schema": {"name": "Whole", "schema": schema, "strict": True}}
    response, llm = send(PATHS[0], {"response_format": sent})
    assert response.status_code == 200, response.text
    assert without_measures(llm.seen[0].constraint) == without_measures(expected({"json": schema}))


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses", "/v1/messages"])
def test_constraints_are_compiled_for_the_owner_of_the_api_key(path: str) -> None:
    """Clients have the compiling threads in turns, in the engine too."""
    llm = FakeLLM()
    api = Api(llm, ServerSettings(api_keys=("one", "two")))
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    body: dict[str, Any] = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, messages)
    for key in ("one", "two", "one"):
        assert api.post(
            path, {**body, "max_tokens": 4} if path != "/v1/responses" else body, headers={"x-api-key": key}
        ).is_success
    tenants = [request.tenant for request in llm.seen]
    assert tenants[0] == tenants[2] != tenants[1] and "" not in tenants and "one" not in tenants
    assert send(PATHS[1], {})[1].seen[0].tenant == ""


@pytest.mark.parametrize(("keys", "turn"), [((), "127.0.0.1"), (("one",), hashlib.sha256(b"one").hexdigest())])
def test_constraints_are_checked_in_turns_of_addresses_where_there_are_no_keys(
    keys: tuple[str, ...], turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    prepare = GrammarFactory.prepare

    async def watched(self: GrammarFactory, params: Any, plan: Any, name: str) -> Constraint:
        turns.append(name)
        return await prepare(self, params, plan, name)

    monkeypatch.setattr(GrammarFactory, "prepare", watched)
    api = Api(FakeLLM(), ServerSettings(api_keys=keys))
    for path, text in zip(PATHS, ({"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}), strict=True):
        body = {**text, "max_tokens": 4, "structured_outputs": {"regex": "a"}}
        assert api.post(path, body, headers={"x-api-key": "one"}).is_success
    assert turns == [turn, turn]
