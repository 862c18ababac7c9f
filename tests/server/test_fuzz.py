"""Whatever a client sends, the answer is one of 200 and 4xx, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.server import scripted
from support.server.fakes import FakeLLM
from support.server.harness import client
from support.server.mutations import Route, at_every_place, requests
from support.server.scripted import ScriptedLLM

from headrace.server.fields import FIELDS, rules
from headrace.server.state import Serving
from headrace.server.store import StoredItem

FUZZ = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "completions": {"prompt": "Hi", "max_tokens": 3},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "responses": {"input": "Hi", "max_output_tokens": 3},
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["user", "assistant", "text", "type", "role", "content", "auto", "fake-model", "raw", "\x00", "é🙂"]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["type", "role", "content", "text"]), inner, max_size=4)
    ),
    max_leaves=8,
)
names = st.sampled_from(sorted({rule.name for rule in FIELDS}))
plausible: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2) | st.just(0),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 10),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 4),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 257), max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 257), min_size=1, max_size=3),
    "max_tokens": st.integers(1, 20),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
    "priority": st.integers(-5, 5),
    "cache_salt": st.text(min_size=1, max_size=5),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "top_logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 3),
    "continue_final_message": st.booleans(),
    "add_special_tokens": st.booleans(),
    "logprobs_mode": st.sampled_from(["raw", "processed"]),
}


class Fuzzed:
    """One app for all examples."""

    def __init__(self, llm: FakeLLM) -> None:
        self._runner = asyncio.Runner()
        self.llm = llm
        self._context = client(self.llm)
        self._http = self._runner.run(self._context.__aenter__())

    @property
    def serving(self) -> Serving:
        transport: Any = self._http._transport
        state: Serving = transport.app.state.serving
        return state

    def request(self, method: str, path: str, body: bytes) -> httpx.Response:
        return self._runner.run(self._http.request(method, path, content=body, headers={"content-type": "application/json"}))

    def check(self, path: str, body: bytes, method: str = "POST") -> httpx.Response:
        response = self.request(method, path, body)
        assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, body)
        if response.status_code >= 400:
            error = response.json()["error"]
            if path.startswith(PATHS["messages"]):
                assert error.keys() - {"details"} == {"message", "type"}
            else:
                assert error.keys() == {"message", "type", "param", "code"}
            assert isinstance(error["message"], str) and isinstance(error["type"], str)
            assert error.get("param") is None or isinstance(error["param"], str)
        else:
            assert '"error":{' not in response.text.rsplit("data: {", 1)[-1]
        assert not self.llm.running
        return response

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    started = Fuzzed(FakeLLM())
    yield started
    started.close()


@pytest.mark.parametrize("endpoint", PATHS)
@FUZZ
@given(changes=st.dictionaries(names, values, max_size=4))
@example(changes={"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]})
@example(changes={"logit_bias": {"1": True}})
def test_any_value_in_any_field(fuzzed: Fuzzed, endpoint: str, changes: dict[str, Any]) -> None:
    fuzzed.check(PATHS[endpoint], json.dumps(BASE[endpoint] | changes).encode())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@FUZZ
@given(data=st.data())
def test_any_mixture_of_sampling_parameters(fuzzed: Fuzzed, endpoint: Any, data: st.DataObject) -> None:
    known = sorted(plausible.keys() & rules(endpoint).keys())
    chosen = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=8))
    body = BASE[endpoint] | {name: data.draw(plausible[name]) for name in chosen}
    response = fuzzed.check(PATHS[endpoint], json.dumps(body).encode())
    if response.status_code == 400:
        assert response.json()["error"]["param"].split("[")[0].split(".")[0] in body


@pytest.mark.parametrize("path", [*PATHS.values(), "/tokenize", "/detokenize"])
@FUZZ
@given(body=values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_any_body(fuzzed: Fuzzed, path: str, body: bytes) -> None:
    fuzzed.check(path, body)


@FUZZ
@given(cut=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_good_body_with_one_byte_wrong(fuzzed: Fuzzed, cut: int, byte: int) -> None:
    body = bytearray(json.dumps(BASE["chat"] | {"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1}}).encode())
    body[cut % len(body)] = byte
    fuzzed.check(PATHS["chat"], bytes(body))


STORED = StoredItem("msg_0", b'{"type":"message","role":"assistant","content":"Hi","id":"msg_0"}')


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 700), *(pytest.param(seed, 6000, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_any_value_at_any_place_of_any_route(tmp_path: Path, seed: int, count: int) -> None:
    check_all(tmp_path, requests(seed, count))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([{"name": []}], marks=pytest.mark.slow),
        pytest.param([None, "x", True, -1, 2**31, 1e300, "", [], {}, [None], ["x"], [{}]], marks=pytest.mark.slow),
        pytest.param([{"type": ["x"]}, {"": 0}, {"type": "x"}, {"$ref": "#"}, [["x"]], "\x00"], marks=pytest.mark.slow),
    ],
    ids=["few", "plain", "nested"],
)
def test_a_value_at_every_place_of_every_route(tmp_path: Path, values: list[Any]) -> None:
    check_all(tmp_path, at_every_place(values))


def check_all(folder: Path, asked: Iterable[tuple[Route, bytes]]) -> None:
    fuzzed = Fuzzed(ScriptedLLM(scripted.tokenizer(folder), ["Hi"]))
    try:
        store = fuzzed.serving.responses
        for index, (route, body) in enumerate(asked):
            if index % 20 == 0:
                store.begin("", "resp_0", (), ())
                store.finish("", "resp_0", b"{}", (STORED,))
            fuzzed.check(route.path, body, route.method)
    finally:
        fuzzed.close()
