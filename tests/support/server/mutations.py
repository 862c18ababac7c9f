"""Request bodies with any value at any place, derived from bodies that each route takes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [7],
    "bad_words": ["zz"],
    "allowed_token_ids": [10, 11],
    "ignore_eos": False,
    "priority": 0,
    "cache_salt": "s",
}
GENERATION = SAMPLING | {
    "stop": ["zz", "yy"],
    "n": 2,
    "min_tokens": 1,
    "prompt_logprobs": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "add_special_tokens": True,
    "structured_outputs": {"choice": ["yes", "no"]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "user": "u",
}


class Route(NamedTuple):
    method: str
    path: str
    required: dict[str, Any]
    optional: dict[str, Any]
    """Each body has some of them."""


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                {"role": "user", "content": "And?", "name": "eve"},
            ],
            "max_tokens": 2,
        },
        GENERATION
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "functions": [FUNCTION],
            "grammar": 'root ::= "a"',
            "function_call": {"name": "add"},
            "parallel_tool_calls": False,
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "mm_processor_kwargs": {"min_pixels": 4},
            "continue_final_message": False,
            "add_generation_prompt": True,
            "reasoning_effort": "low",
            "thinking_token_budget": 5,
            "metadata": {"a": "b"},
            "store": False,
            "modalities": ["text"],
            "service_tier": "auto",
            "prompt_cache_options": {"mode": "implicit"},
        },
    ),
    Route(
        "POST",
        "/v1/completions",
        {"prompt": ["Hi", "Ho"], "max_tokens": 2},
        GENERATION | {"echo": True, "logprobs": 2, "suffix": "end", "best_of": 2, "return_attention_report": False},
    ),
    Route(
        "POST",
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"role": "user", "content": "And?"},
            ],
            "max_output_tokens": 2,
        },
        SAMPLING
        | {
            "input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_0"}],
            "instructions": "Be brief.",
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 2,
            "previous_response_id": "resp_0",
            "metadata": {"a": "b"},
            "client_metadata": {"a": "b"},
            "store": True,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "prompt_cache_key": "k",
            "truncation": "disabled",
        },
    ),
    Route(
        "POST",
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
            ],
            "max_tokens": 2,
        },
        SAMPLING
        | {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "stop_sequences": ["zz"],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
            "stream": True,
        },
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
        },
    ),
    Route(
        "POST",
        "/tokenize",
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True, "chat_template_kwargs": {"a": 1}},
    ),
    Route("POST", "/detokenize", {"tokens": [1, 2, 3]}, {"skip_special_tokens": True, "model": "x"}),
    Route("POST", "/v1/features", {"data": "AAAA"}, {"modality": "image"}),
    Route("GET", "/v1/responses/resp_0", {}, {}),
    Route("GET", "/v1/responses/resp_0/input_items", {"limit": 3, "order": "asc"}, {"after": "a", "include": "x"}),
    Route("DELETE", "/v1/responses/resp_0", {}, {}),
    Route("POST", "/v1/responses/resp_0/cancel", {"a": 1}, {}),
    Route("GET", "/v1/features/feat_0", {}, {}),
    Route("DELETE", "/v1/features/feat_0", {}, {}),
    Route("GET", "/v1/models/x", {}, {}),
    Route("GET", "/v1/inspect/x", {}, {}),
    Route("POST", "/replicas/0/drain", {"a": 1}, {}),
    Route("POST", "/replicas/0/resume", {"a": 1}, {}),
)

NESTED: Any = {"type": "object"}
for _ in range(200):
    NESTED = {"type": "array", "items": NESTED, "content": [NESTED] if _ < 3 else "x"}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30,
    0.0, -0.5, 1e-300, 1e300, 1.5, "", "x", "user", "text", "type", "auto", "0", "\x00", "\ud800", "é🙂", "a" * 5000,
    "/" * 300, "data:,", PNG, "file:///etc/passwd", "http://127.0.0.1:1/x", "{{ x }}", "<|im_start|>", "(" * 500, "{",
    [], {}, [[]], [None], [0], [-1], [2**31], [2**63], ["x"], [[1, 2], "x"], [{}], [[[]]], {"": 0}, {"type": "x"},
    {"type": ["x"]}, {"type": {}}, {"type": "text"}, {"type": "text", "text": 1},
    {"type": "image_url", "image_url": {"url": PNG}}, {"type": "image_url", "image_url": []},
    {"id": []}, {"name": []}, {"name": {"a": 1}}, {"$ref": "#"}, {"role": "user"},
    ["x"] * 300, list(range(2000)), {str(index): index for index in range(300)}, NESTED,
)  # fmt: skip


def requests(seed: int, count: int) -> list[tuple[Route, bytes]]:
    """Requests, the same for a seed. Every route has its turn, and one body in five stays as it is."""
    chance = random.Random(seed)
    made = []
    for index in range(count):
        route = ROUTES[index % len(ROUTES)] if index % 3 == 0 else chance.choice(ROUTES[:8])
        extra = chance.sample(sorted(route.optional), min(len(route.optional), chance.choice((0, 0, 1, 2))))
        body: Any = copy.deepcopy(route.required | {name: route.optional[name] for name in extra})
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            body = _mutated(body, chance)
        made.append((route, json.dumps(body).encode()))
    return made


def at_every_place(values: Sequence[Any]) -> Iterator[tuple[Route, bytes]]:
    """Each body with each of the values at each place: of the required fields, and of each optional field beside them."""
    for route in ROUTES:
        for extra in ({}, *({name: value} for name, value in route.optional.items())):
            body: Any = copy.deepcopy(route.required | extra)
            for holder, key in [*_places(body)]:
                if extra and holder is body and key not in extra:
                    continue
                before = holder[key]
                for value in values:
                    holder[key] = value
                    yield route, json.dumps(body).encode()
                holder[key] = before


def _mutated(body: Any, chance: random.Random) -> Any:
    """``body`` with another value at one place, or one place more or less."""
    places = [*_places(body)] if isinstance(body, (dict, list)) else []
    if not places:
        return chance.choice(VALUES)
    holder, key = chance.choice(places)
    what = chance.random()
    if what < 0.7:
        holder[key] = copy.deepcopy(chance.choice(VALUES))
    elif what < 0.8:
        holder[key] = [holder[key]]
    elif what < 0.9:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[chance.choice((f"{key}x", "", "type", "id", "name", "\x00"))] = copy.deepcopy(chance.choice(VALUES))
    return body


def _places(value: Any) -> Any:
    """(holder, key) of each value in a JSON value."""
    for key, item in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)
