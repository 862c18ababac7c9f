"""What a chat request asks of its answer reaches the engine as one grammar, from the first token on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.config import StructuredOutputsConfig
from headrace.constrain.compiler import compiled
from headrace.constrain.factory import GrammarFactory
from headrace.text.tokenizer import Tokenizer
from server import scripted
from server.harness import Api
from server.scripted import ScriptedLLM

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
THINKING = {"enable_thinking": True}
Held = Callable[..., Callable[[str], bool]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return scripted.tokenizer(tmp_path_factory.mktemp("tokenizer"))


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


def test_content_is_held_from_the_first_token_where_the_server_says_so(held: Held) -> None:
    accepts = held(StructuredOutputsConfig(enable_in_reasoning=True), response_format=FORMAT, chat_template_kwargs=THINKING)
    assert accepts('{"a": 1}') and not accepts('why</think>{"a": 1}')
