"""Small chat templates that write each format, and machines that read it."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import msgspec

from headrace.outputs import Event, Message
from headrace.text.answers import types_of
from headrace.text.parse.engine import Parser, Types
from headrace.text.parse.format import Choice, Machine, Vocabulary
from headrace.text.parse.formats import reasoning_format, tool_format

HEAD = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
TAIL = "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
BODY = "{{ m.content or '' }}"


def _template(calls: str, think: str = THINK) -> str:
    return HEAD + think + BODY + "{% if m.tool_calls %}" + calls + "{% endif %}" + TAIL


def _each(call: str) -> str:
    return "{% for c in m.tool_calls %}" + call + "{% endfor %}"


_JSON = '{"name": {{ c.name | json }}, "arguments": {{ c.arguments | json }}}'
_PYTHON = "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | repr }}{{ '' if loop.last else ', ' }}{% endfor %})"
_LISTED = "[" + _each(_PYTHON + "{{ '' if loop.last else ', ' }}") + "]"
_TAGGED = "{% for k, v in c.arguments.items() %}"
_GEMMA = (
    "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}{% for k, w in v.items() %}"
    "{{ k }}:{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}}{% elif v is sequence %}[{% for w in v %}{{ value(w) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v | json }}{% endif %}{% endmacro %}"
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
NAMED: dict[str, Any] = {
    "start_anchor": "<turn>model\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call>call:(?P<name>\w+)",
            "close": "</call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
INLINE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""Response templates of checkpoints, as ``NAMED`` and ``INLINE``."""

TEMPLATES: dict[str, str] = {
    "hermes": _template(_each("\n<tool_call>\n" + _JSON + "\n</tool_call>")),
    "qwen3_coder": _template(
        _each(
            "\n<tool_call>\n<function={{ c.name }}>\n"
            + _TAGGED
            + "<parameter={{ k }}>\n{{ v | raw }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        )
    ),
    "llama3_json": _template(
        "<|python_tag|>"
        + _each('{"name": {{ c.name | json }}, "parameters": {{ c.arguments | json }}}{{ "" if loop.last else "; " }}')
    ),
    "llama4_pythonic": _template("<|python_start|>" + _LISTED + "<|python_end|>"),
    "lfm2": _template("<|tool_call_start|>" + _LISTED + "<|tool_call_end|>"),
    "olmo3": _template("<function_calls>" + _each(_PYTHON + "{{ '' if loop.last else '\n' }}") + "</function_calls>"),
    "mistral": _template(
        _each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | json }}"),
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}",
    ),
    "deepseek_v3": _template(
        _DEEPSEEK.format(
            _each(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | json }}\n```"
                "<｜tool▁call▁end｜>{{ '' if loop.last else '\n' }}"
            )
        )
    ),
    "deepseek_v31": _template(
        _DEEPSEEK.format(_each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | json }}<｜tool▁call▁end｜>"))
    ),
    "deepseek_v32": _template(
        "\n\n<｜DSML｜function_calls>\n"
        + _each(
            '<｜DSML｜invoke name="{{ c.name }}">\n'
            + _TAGGED
            + '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">{{ v | raw }}'
            "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>"
    ),
    "openai": (
        "{%- for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
        "{% endif %}{% if m.content %}<|start|>assistant<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% for c in m.tool_calls %}<|start|>assistant<|channel|>commentary "
        "to=functions.{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | json }}<|call|>{% endfor %}"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "glm45": _template(
        _each(
            "\n<tool_call>{{ c.name }}\n"
            + _TAGGED
            + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | raw }}</arg_value>\n{% endfor %}</tool_call>"
        )
    ),
    "kimi_k2": _template(
        "<|tool_calls_section_begin|>"
        + _each(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ c.arguments | json }}"
            "<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>"
    ),
    "gemma4": _GEMMA
    + _template(
        _each(
            "<|tool_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments.items() %}{{ k }}:{{ value(v) }}"
            "{{ '' if loop.last else ',' }}{% endfor %}}<tool_call|>"
        ),
        "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}",
    ),
    "minimax_m2": _template(
        "\n<minimax:tool_call>\n"
        + _each(
            '<invoke name="{{ c.name }}">\n'
            + _TAGGED
            + '<parameter name="{{ k }}">{{ v | raw }}</parameter>\n{% endfor %}</invoke>\n'
        )
        + "</minimax:tool_call>"
    ),
    "ernie45": _template(
        _each("\n<tool_call>\n" + _JSON + "\n</tool_call>\n"),
        THINK + "{% if m.content %}<response>\n{{ m.content }}\n</response>\n{% endif %}",
    ).replace(BODY, ""),
    "granite": _template("<|tool_call|>[" + _each(_JSON + "{{ '' if loop.last else ', ' }}") + "]"),
    "phi4_mini_json": _template("functools[" + _each(_JSON + "{{ '' if loop.last else ', ' }}") + "]"),
    "jamba": _template("<tool_calls>[" + _each(_JSON + "{{ '' if loop.last else ', ' }}") + "]</tool_calls>"),
    "internlm": _template(
        _each('<|action_start|><|plugin|>{"name": {{ c.name | json }}, "parameters": {{ c.arguments | json }}}<|action_end|>')
    ),
}
"""name -> chat template; each is recognised as what it is named after."""
_ARRAY = "[" + _each(_JSON + "{{ '' if loop.last else ', ' }}") + "]"
WRITTEN: dict[str, str] = {
    **TEMPLATES,
    "generic": TEMPLATES["hermes"],
    "pythonic": _template(_LISTED),
    "nemotron_json": _template("<TOOLCALL>" + _ARRAY + "</TOOLCALL>"),
    "xlam": _template(_ARRAY),
}
"""Formats, with those that are not recognised by what they write."""
UNMARKED = {
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    "pythonic": '[f(a=1, b="x, )", c={"k": [1, true]}), g()]',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
}
RAW = {"qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"}
"""Formats whose arguments are raw text."""
REASONING = {"openai": "openai", "mistral": "mistral", "gemma4": "gemma4"}
"""Reasoning formats that are not deepseek_r1."""


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def environment() -> jinja2.Environment:
    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "repr": repr, "raw": _raw}
    return made


@functools.cache
def _compiled(name: str) -> jinja2.Template:
    return environment().from_string(WRITTEN[name])


def written(name: str, message: Message) -> str:
    """An answer as the model writes it, without the end of its turn."""
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.calls]
    answer = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning, "tool_calls": calls}
    text = _compiled(name).render(messages=[answer], add_generation_prompt=False)
    return text.removeprefix("<|im_start|>assistant\n").removeprefix("<|start|>assistant").removesuffix("<|im_end|>\n")


def choice(name: str) -> Choice:
    return Choice(tool_format(name), reasoning_format(REASONING.get(name, "deepseek_r1")))


@functools.cache
def marker_texts(name: str) -> tuple[str, ...]:
    states = choice(name).states(calls=True, reasoning=True).values()
    return tuple(sorted({mark.text for state in states for mark in state.on}))


@functools.cache
def machine(name: str, tokens: bool = False) -> Machine:
    """``tokens``: the vocabulary has every marker that looks like one as a token."""
    found = choice(name)
    texts = [text for text in marker_texts(name) if text[0] in "<[" and text[-1] in ">]"]
    vocabulary = Vocabulary({text: 100 + place for place, text in enumerate(texts)}) if tokens else None
    assert found.tools is not None
    return Machine(found.states(calls=True, reasoning=True), vocabulary, name, found.tools.ids)


def events(machine: Machine, pieces: Iterable[str], types: Types | None = None, tail: str = "") -> list[Event]:
    parser = Parser(machine, types, tail, ids=random.Random(0))
    found = [event for piece in pieces for event in parser.push(piece)]
    return found + parser.finish()


def message(machine: Machine, pieces: Iterable[str], types: Types | None = None, tail: str = "") -> Message:
    """The folded answer; tokens are not compared, since pieces are none."""
    return msgspec.structs.replace(fold(events(machine, pieces, types, tail)), reasoning_tokens=0)


def fold(found: Iterable[Event]) -> Message:
    folded = Message()
    folded.add(found)
    return folded


def plain(message: Message) -> dict[str, Any]:
    """Returns the parts that are compared over a round trip: ids are the parser's own."""
    calls = [(call.name, json.loads(call.arguments), call.ended) for call in message.calls]
    return {"reasoning": message.reasoning, "content": message.content, "calls": calls}


def types(tools: Sequence[dict[str, Any]]) -> Types:
    found = {}
    for tool in tools:
        schema = tool["function"].get("parameters", {})
        found[tool["function"]["name"]] = {
            name: types_of(value, schema) for name, value in schema.get("properties", {}).items()
        }
    return found
