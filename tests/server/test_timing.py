"""``metrics`` of an answer: the times of one request."""

from __future__ import annotations

import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, error, events

from headrace.outputs import OutputDelta, RequestTimes
from headrace.server.generation import Generation, Piece
from headrace.server.settings import ServerSettings
from headrace.server.state import Serving

NAMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
BASE = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
}
ALWAYS = ServerSettings(enable_per_request_metrics=True)


@pytest.mark.parametrize("path", BASE)
def test_in_the_answer_and_in_the_last_chunk(path: str) -> None:
    api = Api(FakeLLM(step=0.001))
    asked = BASE[path] | {"return_metrics": True}
    times = api.post(path, asked).json()["metrics"]
    assert set(times) == NAMES and all(value >= 0 for value in times.values())
    assert times["generation_time_ms"] == pytest.approx(4 * times["mean_itl_ms"]) and times["generation_time_ms"] >= 4
    for more in ({}, {"stream_options": {"include_usage": True}}):
        *others, last = events(api.post(path, asked | {"stream": True} | more))
        assert set(last["metrics"]) == NAMES
        assert all("metrics" not in chunk for chunk in others)
    assert "metrics" not in api.post(path, BASE[path]).json()
    assert all("metrics" not in chunk for chunk in events(api.post(path, BASE[path] | {"stream": True})))


@pytest.mark.parametrize("path", BASE)
def test_of_one_choice_only(path: str) -> None:
    api = Api(FakeLLM(), ALWAYS)
    assert set(api.post(path, BASE[path]).json()["metrics"]) == NAMES
    assert api.post(path, BASE[path] | {"n": 2}).json()["metrics"] is None
    assert not api.llm.running
    assert error(api.post(path, BASE[path] | {"n": 2, "return_metrics": True}))["param"] == "return_metrics"
    assert len(api.llm.seen) == 2, "a refused request does not start"


def test_of_two_prompts_only_null() -> None:
    api = Api(FakeLLM(), ALWAYS)
    assert api.complete(prompt=["a", "b"]).json()["metrics"] is None
    assert error(api.complete(prompt=["a", "b"], return_metrics=True))["param"] == "return_metrics"


@pytest.mark.parametrize(
    ("times", "tokens", "expected"),
    [
        (RequestTimes(1.0, 1.5, 2.0, 4.0), 5, [500, 2000, 500, 500, 2]),
        (RequestTimes(1.0, 1.5, 2.0, 2.0), 1, [500, 0, 500, None, 2]),
        (RequestTimes(1.0, 1.5, None, 2.0), 0, [None, None, 500, None, 0]),
    ],
)
def test_what_is_told(times: RequestTimes, tokens: int, expected: list[float | None]) -> None:
    llm = FakeLLM()
    request = llm.inputs.request("a", llm.inputs.default_sampling, request_id="r")
    generation = Generation(Serving(llm, ServerSettings()), [request])
    assert generation.timing is None
    generation._note(Piece(0, OutputDelta(request_id="r", token_ids=[1] * tokens, finish_reason="stop", times=times)))
    names = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
    assert generation.timing == dict(zip(names, expected, strict=True))
