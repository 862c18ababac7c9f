"""Constraints of a chat request on its answer reach the engine as one grammar, from the first token on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.server import scripted
from support.server.harness import Api
from support.server.scripted import ScriptedLLM

from headrace.constrain.compiler import compiled
from headrace.constrain.factory import GrammarFactory
from headrace.option_groups import StructuredOutputsConfig
from headrace.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
THINKING = {"enable_thinking": True}
Held = Callable[..., Callable[[str], bool]]


@pytest.fixture
def held(made: Tokenizer) -> Held:
    """Sends a request; returns whether its grammar accepts a text."""

    def send(config: StructuredOutputsConfig | None = None, **fields: Any) -> Callable[[str], bool]:
        llm = ScriptedLLM(made, [""])
        if config is not None:
            llm.grammars = GrammarFactory(config, llm.vocabulary)
            llm.inputs = llm._make_inputs()
        response = Api(llm).chat(**fields)
        assert response.status_code == 200, response.text
        constraint = llm.seen[-1].constraint
        assert constraint is not None
        matcher = compiled(constraint.grammar, llm.vocabulary, StructuredOutputsConfig())

        def accepts(text: str) -> bool:
            probe = matcher.copy()
            return probe.advance(made.encode(text, add_special_tokens=False)) is None and probe.accepting

        return accepts

    return send


def test_content_is_held_behind_reasoning(held: Held) -> None:
    opened = held(response_format=FORMAT, chat_template_kwargs=THINKING)
    assert opened('why {"a"?\n</think>\n\n{"a": 1}') and opened('</think>{"a": 1}')
    assert not opened('{"a": 1}') and not opened('a</think>b</think>{"a": 1}') and not opened('why</think>{"a": "b"}')
    free = held(response_format=FORMAT)
    assert free('{"a": 1}') and free('<think>\nwhy\n</think>\n\n{"a": 1}') and not free('why</think>{"a": 1}')
    closed = held(
        response_format=FORMAT,
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think></think>"}],
        continue_final_message=True,
    )
    assert closed('{"a": 1}') and not closed('<think>why</think>{"a": 1}')


@pytest.mark.parametrize(
    "held_as",
    [
        {"choice": ["yes", "no"]},
        {"regex": "yes|no"},
        {"grammar": 'start: "yes" | "no"'},
        {"grammar": 'root ::= "yes" | "no"'},
        {"structural_tag": {"format": {"type": "regex", "pattern": "yes|no"}}},
    ],
)
def test_every_kind_is_held_behind_reasoning(held: Held, held_as: dict[str, Any]) -> None:
    accepts = held(structured_outputs=held_as, chat_template_kwargs=THINKING)
    assert accepts("why\n</think>\n\nyes") and not accepts("why\n</think>\n\nmaybe") and not accepts("yes")


def test_content_is_held_from_the_first_token_where_the_server_says_so(held: Held) -> None:
    accepts = held(StructuredOutputsConfig(enable_in_reasoning=True), response_format=FORMAT, chat_template_kwargs=THINKING)
    assert accepts('{"a": 1}') and not accepts('why</think>{"a": 1}')


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [function("add"), function("sub")]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUB, WRONG = ADD.replace("add", "sub"), ADD.replace("1", '"b"')
OTHER = ADD.replace("add", "mul")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NAMED = {"type": "function", "function": {"name": "add"}}
CHOICES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"tool_choice": "required"},
        [ADD, f"{ADD}\n{SUB}", f"<think>why</think>\n\n{SUB}"],
        ["", "text", WRONG, OTHER, f"so {ADD}"],
    ),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [ADD, SUB], [f"{ADD}\n{SUB}", ""]),
    ({"tool_choice": NAMED}, [ADD], [SUB, f"{ADD}\n{ADD}", WRONG, "text"]),
    ({"tool_choice": allowed("required", "sub")}, [SUB], [ADD, "text"]),
    ({"tool_choice": allowed("auto", "sub")}, [SUB, "text", f"text {SUB}", "", SUB.replace("1", '"b"')], [ADD, f"text {ADD}"]),
    (
        {"tools": [function("add", strict=True), function("sub")]},
        [f"so\n{ADD}\n{SUB}", "text", ""],
        [WRONG, OTHER, f"{ADD} text"],
    ),
    ({"response_format": FORMAT}, ['{"a": 1}', ADD, WRONG, f"<think>why</think>{ADD}"], ["text", OTHER, f'{{"a": 1}}{ADD}']),
    ({"response_format": FORMAT, "tool_choice": "none"}, ['{"a": 1}'], [ADD]),
    ({"response_format": FORMAT, "tool_choice": "required"}, [ADD], ['{"a": 1}', WRONG]),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), CHOICES)
def test_calls_are_held(held: Held, fields: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    accepts = held(**{"tools": TOOLS} | fields)
    for text in right:
        assert accepts(text), text
    for text in wrong:
        assert not accepts(text), text


def test_calls_are_held_behind_reasoning_that_the_prompt_opens(held: Held) -> None:
    accepts = held(tools=TOOLS, tool_choice="required", chat_template_kwargs=THINKING)
    assert accepts(f"why\n</think>\n\n{ADD}") and not accepts(ADD)


def test_old_functions_can_be_named(held: Held) -> None:
    accepts = held(functions=[tool["function"] for tool in TOOLS], function_call={"name": "add"})
    assert accepts(ADD) and not accepts(SUB)


def test_a_named_function_ends_with_stop_and_a_cut_one_with_length(made: Tokenizer) -> None:
    for choice, reason in ((NAMED, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")):
        answer = Api(ScriptedLLM(made, [ADD])).chat(tools=TOOLS, tool_choice=choice).json()["choices"][0]
        assert answer["finish_reason"] == reason and answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        cut = Api(ScriptedLLM(made, [ADD])).chat(tools=TOOLS, tool_choice=choice, max_tokens=30).json()["choices"][0]
        assert cut["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tools": [function("add", strict=True)]}, {"response_format": FORMAT}],
)
def test_a_format_whose_arguments_are_no_json_is_held_too(made: Tokenizer, fields: dict[str, Any]) -> None:
    llm = ScriptedLLM(made, [""], tools="gemma4")
    assert Api(llm).chat(tools=TOOLS).status_code == 200 and llm.seen[-1].constraint is None
    assert Api(llm).chat(**{"tools": TOOLS} | fields).status_code == 200 and llm.seen[-1].constraint is not None


def test_a_thinking_budget(held: Held, made: Tokenizer) -> None:
    accepts = held(thinking_token_budget=3, chat_template_kwargs=THINKING)
    assert accepts("why</think>so it is") and not accepts("whyy</think>so") and not accepts("why</think><think>")
    api = Api(ScriptedLLM(made, ["a"]))
    assert api.chat(thinking_token_budget=-1).status_code == 200 and api.llm.seen[-1].constraint is None
    for value in (-2, 2**31, "3"):
        response = api.chat(thinking_token_budget=value)
        assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget"
    without = Api(ScriptedLLM(made, ["a"], reasoning="mistral")).chat(thinking_token_budget=3)
    assert without.status_code == 400 and "not tokens" in without.json()["error"]["message"]
    unknown = Api(ScriptedLLM(made, ["a"], reasoning="none")).chat(thinking_token_budget=3)
    assert unknown.status_code == 400 and "--reasoning-parser" in unknown.json()["error"]["message"]


def test_a_model_that_does_not_reason_keeps_any_thinking_budget(made: Tokenizer) -> None:
    plain = scripted.with_template(made, "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>")
    llm = ScriptedLLM(plain, ["a"], reasoning="none")
    assert Api(llm).chat(thinking_token_budget=0).status_code == 200 and llm.seen[-1].constraint is None
    keys = set()
    for budget in (3, 4):
        assert Api(llm).chat(thinking_token_budget=budget, response_format=FORMAT).status_code == 200
        constraint = llm.seen[-1].constraint
        assert constraint is not None
        keys.add(constraint.grammar)
    assert len(keys) == 1
    assert Api(llm).chat(thinking_token_budget=-2).status_code == 400
