"""Requests that were in flight at two deaths of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.request import Request
from headrace.engine import quarantine
from headrace.engine.quarantine import Quarantine
from headrace.engine.streams import failed
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams


def request(name: str = "x", tokens: tuple[int, ...] = (1, 2), max_tokens: int = 5, **sampling: Any) -> Request:
    params = SamplingParams(**sampling)
    return Request(request_id=name, prompt_token_ids=list(tokens), sampling=params, max_tokens=max_tokens, seed=hash(name))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(one: Quarantine, again: Request) -> bool:
    try:
        one.check(again)
    except RequestError as error:
        assert error.code == "quarantined" and "refused for" in str(error)
        return True
    return False


def test_two_deaths_make_a_request_refused_under_any_name_for_a_while(clock: Clock) -> None:
    one = Quarantine(60.0, clock)
    assert one.died([request("a", temperature=2), request("b")]) == {}
    assert not refused(one, request("c", temperature=2))
    clock.now = 10.0
    assert list(one.died([request("d", temperature=2.0, seed=7), request("e", (9,))])) == ["d"]
    assert refused(one, request("f", temperature=2.0))
    for other in (request(temperature=2.1), request(tokens=(1, 2, 3), temperature=2), request(max_tokens=6, temperature=2)):
        assert not refused(one, other)
    clock.now = 69.0
    assert refused(one, request(temperature=2)) and not refused(one, request())
    clock.now = 70.0
    assert not refused(one, request(temperature=2)) and len(one) == 0


def test_requests_of_one_death_count_once(clock: Clock) -> None:
    one = Quarantine(60.0, clock)
    assert one.died([request(str(number)) for number in range(5)]) == {}
    assert len(one.died([request(str(number)) for number in range(5)])) == 5


def test_a_request_that_is_served_is_no_suspect(clock: Clock) -> None:
    one = Quarantine(60.0, clock)
    for _ in range(3):
        assert one.died([request()]) == {}
        one.served(request("again"))
    assert len(one) == 0


def test_memory_is_bounded_and_zero_seconds_refuse_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MOST", 3)
    one, never = Quarantine(60.0, clock), Quarantine(0.0, clock)
    for number in range(10):
        one.died([request(tokens=(number,))])
        never.died([request()])
    assert len(one) == 3 and len(never) == 0 and not refused(never, request())
    assert one.died([request(tokens=(9,))]) and not one.died([request(tokens=(0,))])


def test_a_refusal_reaches_the_client_of_a_request_in_flight_with_its_code(clock: Clock) -> None:
    one = Quarantine(60.0, clock)
    suspect = request(n=2)
    one.died([suspect])
    (refusal,) = one.died([suspect]).values()
    deltas = list(failed(suspect, refusal))
    assert [(delta.index, delta.client_error, delta.error_code) for delta in deltas] == [
        (i, True, "quarantined") for i in (0, 1)
    ]
