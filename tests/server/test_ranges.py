"""Every number that a request may set, at every extreme, through each entrance: a test made from the declarations."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api

from headrace.cli.prompts import parse_line
from headrace.errors import RequestError
from headrace.options import Option, options
from headrace.sampling_params import SamplingParams

EXTREMES: list[Any] = [
    *(1.7976931348623157e308, 1e300, 3.5e38, 3.4028234663852886e38, 1e-40, 5e-324, -5e-324, 0.0, -0.0, -1.0, -2.1, -1e300),
    *(math.inf, -math.inf, math.nan, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, 0, 1, True, False),
    *("1", [], {}),
]
NUMBERS = {name: option for name, option in options(SamplingParams).items() if option.type in (int, float)}


def admitted(option: Option, value: Any) -> bool:
    """The range in other words than the check's: with fractions, so that nothing overflows or rounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, float) and (option.type is int or not math.isfinite(value)):
        return False
    low, high = option.spec.min, option.spec.max
    assert high is not None and (low is not None or option.spec.above is not None), "a number has no range"
    if low is None:
        return option.spec.above < value <= high
    return low <= value <= high


@pytest.mark.parametrize("value", EXTREMES, ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_the_gate_is_the_declared_range(name: str, value: Any) -> None:
    option = NUMBERS[name]
    if admitted(option, value):
        found = getattr(SamplingParams(**{name: value}), name)
        assert found == option.type(value) and type(found) is option.type, "in the type that every message holds"
    else:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert name in str(caught.value) and f"not {value!r}"[:40] in str(caught.value)
        assert "integer in [" in str(caught.value) or "number in " in str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_jsonl_line_passes_the_same_gate(name: str) -> None:
    for value in EXTREMES:
        if isinstance(value, float) and math.isnan(value):
            continue
        job = parse_line(1, json.dumps({"prompt": "a", name: value}))
        assert (job.error is not None) != admitted(NUMBERS[name], value), value
        if job.error is not None:
            assert job.error.param == name


@pytest.fixture(scope="module")
def api() -> Api:
    return Api(FakeLLM())


@pytest.mark.parametrize("name", NUMBERS)
def test_http_passes_the_same_gate(api: Api, name: str) -> None:
    """Values within the range may still be refused: by the context's length, or by a limit of the server. Never more."""
    for value in EXTREMES:
        if isinstance(value, float) and not math.isfinite(value):
            continue
        response = api.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: value})
        assert response.status_code in (200, 400), (value, response.text)
        if not admitted(NUMBERS[name], value) and (name, value) != ("logprobs", -1):
            assert response.status_code == 400, value
        if response.status_code == 400:
            assert response.json()["error"]["param"] == name, (value, response.text)
    assert not api.llm.running


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_holds_no_number_that_is_none(api: Api, value: str) -> None:
    body = f'{{"prompt": "a", "temperature": {value}}}'.encode()
    assert api.post("/v1/completions", content=body, headers={"content-type": "application/json"}).status_code == 400


def test_entries_of_lists_and_objects() -> None:
    for fields, param in [
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
        ({"bad_words": ["a", "\ud800"]}, "bad_words"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": ["a", 1]}, "bad_words"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: 1e300}}, "logit_bias"),
        ({"logit_bias": {1: True}}, "logit_bias"),
        ({"logit_bias": {2**31: 0.0}}, "logit_bias"),
    ]:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**fields)
        assert caught.value.param == param


def test_lists_are_checked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a hundred thousand valid entries must not hold up the event loop."""
    monkeypatch.delattr(Option, "_check_string")
    SamplingParams(stop=["a", "é"])
