"""Suspects: requests that were in flight when the engine crashed, how they are run alone, and when they are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.engine.clock import VirtualTime

from headrace.core.request import Constraint, Request
from headrace.engine.endings import failed
from headrace.processes import quarantine
from headrace.processes.isolation import ALONE_SECONDS, Isolation
from headrace.processes.quarantine import Quarantine
from headrace.sampling_params import SamplingParams


def request(name: str = "x", tokens: tuple[int, ...] = (1, 2), max_tokens: int = 5, **sampling: Any) -> Request:
    params = SamplingParams(**sampling)
    return Request(request_id=name, prompt_token_ids=list(tokens), sampling=params, max_tokens=max_tokens, seed=hash(name))


def named(name: str) -> Request:
    """Of a prompt of its own."""
    return request(name, tuple(name.encode()))


@pytest.fixture
def clock() -> VirtualTime:
    return VirtualTime()


def refused(one: Quarantine, again: Request) -> bool:
    error = one.refusal(again)
    assert error is None or (error.code == "quarantined" and "refused for" in str(error))
    return error is not None


def test_a_suspect_is_refused_once_it_was_alone_under_any_name_for_a_while(clock: VirtualTime) -> None:
    one = Quarantine(60.0, clock.now)
    one.crashed([request("a", temperature=2), request("b")])
    assert one.crashes(request("c", temperature=2)) == one.crashes(request("d")) == 1
    assert not refused(one, request("c", temperature=2)) and not refused(one, request("d"))
    clock.advance(10.0)
    one.crashed([request("d", temperature=2.0, seed=7)])
    assert refused(one, request("f", temperature=2.0))
    for other in (request(temperature=2.1), request(tokens=(1, 2, 3), temperature=2), request(max_tokens=6, temperature=2)):
        assert not refused(one, other) and not one.crashes(other)
    clock.advance(59.0)
    assert refused(one, request(temperature=2)) and not one.crashes(request())
    clock.advance(1.0)
    assert not refused(one, request(temperature=2)) and len(one) == 0


def test_no_request_is_refused_for_crashes_beside_others(clock: VirtualTime) -> None:
    one = Quarantine(60.0, clock.now)
    for _ in range(5):
        one.crashed([named("a"), named("b")])
    assert one.crashes(named("a")) == 5 and not refused(one, named("a"))
    one.crashed([named("a")])
    assert refused(one, named("a")) and not refused(one, named("b"))


def test_requests_with_other_constraints_are_others(clock: VirtualTime) -> None:
    """A prompt as common as "Hi" must not be refused because a grammar crashes the engine with it."""
    one = Quarantine(60.0, clock.now)
    poison = msgspec.structs.replace(request(), constraint=Constraint("regex", "poison"))
    for _ in range(2):
        one.crashed([poison])
    one.served(request())
    assert refused(one, poison) and not refused(one, request())
    assert not refused(one, msgspec.structs.replace(poison, constraint=Constraint("regex", "sound")))


def test_a_request_beside_its_equals_is_alone_and_one_crash_is_no_proof(clock: VirtualTime) -> None:
    one = Quarantine(60.0, clock.now)
    one.crashed([request(str(number)) for number in range(5)])
    assert one.crashes(request()) == 1 and not refused(one, request())
    one.crashed([request(str(number)) for number in range(5)])
    assert refused(one, request())


def test_a_request_that_is_served_is_no_suspect(clock: VirtualTime) -> None:
    one = Quarantine(60.0, clock.now)
    for _ in range(3):
        one.crashed([request()])
        assert not refused(one, request())
        one.served(request("again"))
    assert len(one) == 0


def test_memory_is_bounded_and_zero_seconds_suspect_nothing(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MOST", 3)
    one, never = Quarantine(60.0, clock.now), Quarantine(0.0, clock.now)
    for number in range(10):
        one.crashed([request(tokens=(number,))])
        never.crashed([request()])
    assert one.crashes(request(tokens=(9,))) and not one.crashes(request(tokens=(0,)))
    assert len(one) == 3 and len(never) == 0 and not refused(never, request())


def test_the_suspects_of_one_tenant_leave_those_of_others(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_MOST", 6)
    one = Quarantine(60.0, clock.now)
    mine = msgspec.structs.replace(request(), tenant="few")
    for _ in range(2):
        one.crashed([mine])
    for number in range(10):
        one.crashed([msgspec.structs.replace(request(tokens=(number,)), tenant="many")])
    assert len(one) == 6 and refused(one, mine)


def test_a_refusal_reaches_the_client_of_a_request_in_flight_with_its_code(clock: VirtualTime) -> None:
    one = Quarantine(60.0, clock.now)
    suspect = request(n=2)
    one.crashed([suspect])
    one.crashed([suspect])
    refusal = one.refusal(suspect)
    assert refusal is not None
    deltas = list(failed(suspect, refusal))
    assert [(delta.index, delta.client_error, delta.error_code) for delta in deltas] == [
        (i, True, "quarantined") for i in (0, 1)
    ]


class Engine:
    """What one engine was sent, with the turns of suspects."""

    def __init__(self, clock: VirtualTime, *suspects: str) -> None:
        self.sent: list[str] = []
        self.turns: list[bool] = []
        self.quarantine = Quarantine(600.0, clock.now)
        if suspects:
            self.quarantine.crashed([named(name) for name in (*suspects, "another")])
        self.isolation = Isolation(self.quarantine, self._send, self.turns.append, call_later=clock.call_later, clock=clock.now)

    def _send(self, one: Request) -> None:
        self.sent.append(one.request_id)

    def add(self, *names: str) -> None:
        for name in names:
            self.isolation.add(named(name))

    def end(self, *names: str) -> None:
        for name in names:
            request = self.isolation.sample_ended(name)
            assert request is not None
            self.quarantine.served(request)

    @property
    def has(self) -> list[str]:
        return [one.request_id for one in self.isolation.sent]


def test_without_suspects_requests_are_sent_at_once(clock: VirtualTime) -> None:
    engine = Engine(clock)
    engine.add("a", "b")
    assert engine.has == ["a", "b"] and engine.turns == []
    engine.end("a")
    assert engine.has == ["b"]


def test_suspects_run_alone_one_after_the_other(clock: VirtualTime) -> None:
    engine = Engine(clock, "s", "t")
    engine.add("a", "s", "t", "b")
    assert engine.has == ["a"], "the engine is to be empty first"
    engine.end("a")
    assert engine.has == ["s"]
    clock.advance(1.0)
    engine.end("s")
    assert engine.has == ["b"], "what has waited comes before the next suspect"
    engine.add("c")
    assert engine.has == ["b", "c"]
    engine.end("b", "c")
    assert engine.has == [], "as much time for others as the turn took"
    clock.advance(1.0)
    assert engine.has == ["t"]
    engine.add("d")
    assert engine.has == ["t"]
    engine.end("t")
    assert engine.has == ["d"] and engine.turns == [True, False, True, False]


def test_the_wait_for_a_suspect_is_bounded(clock: VirtualTime) -> None:
    """In both parts: an engine that is never empty, and a suspect that never ends."""
    engine = Engine(clock, "s", "t")
    engine.add("a", "s", "b")
    clock.advance(ALONE_SECONDS - 0.1)
    assert engine.has == ["a"]
    clock.advance(0.1)
    assert engine.has == ["a", "s", "b"]
    engine.end("a", "s", "b")
    clock.advance(ALONE_SECONDS)
    engine.add("t", "c")
    clock.advance(ALONE_SECONDS)
    assert engine.has == ["t", "c"]


def test_each_crash_gives_a_suspect_more_time_alone(clock: VirtualTime) -> None:
    engine = Engine(clock, "s")
    engine.quarantine.crashed([named("s"), named("a")])
    engine.add("s", "b")
    clock.advance(2 * ALONE_SECONDS - 0.1)
    assert engine.has == ["s"]
    clock.advance(0.1)
    assert engine.has == ["s", "b"]


def test_samples_of_a_request_end_one_by_one(clock: VirtualTime) -> None:
    engine = Engine(clock)
    engine.isolation.add(request("a", n=2))
    assert engine.isolation.sample_ended("a") is None and engine.has == ["a"]
    assert engine.isolation.sample_ended("a") is not None and engine.has == []
    assert engine.isolation.sample_ended("a") is None


def test_what_waits_can_be_taken_out_and_released(clock: VirtualTime) -> None:
    engine = Engine(clock, "s", "t")
    engine.add("a", "s", "b", "c")
    assert [one.request_id for one in engine.isolation.remove(["b", "a", "nobody"])] == ["b"]
    assert [one.request_id for one in engine.isolation.remove(["s"])] == ["s"]
    assert engine.has == ["a", "c"], "without its suspect the turn is over"
    clock.advance(ALONE_SECONDS)
    engine.add("t", "d")
    assert engine.has == ["a", "c"]
    engine.isolation.release()
    assert engine.has == ["a", "c", "t", "d"]
    engine.isolation.clear()
    clock.advance(100.0)
    assert engine.has == []


def test_a_refused_suspect_ends_its_turn(clock: VirtualTime) -> None:
    engine = Engine(clock, "s")
    engine.add("s", "a")
    assert engine.has == ["s"]
    engine.isolation.ended("s")
    assert engine.has == ["a"]


def test_a_poison_among_many_is_found_and_only_it_is_refused(clock: VirtualTime) -> None:
    """Clients send again whatever was in flight at a crash."""
    engine, names = Engine(clock), [f"r{number}" for number in range(20)]
    waiting, crashes = list(names), 0
    while waiting:
        engine.add(*(name for name in waiting if not refused(engine.quarantine, named(name))))
        waiting = [name for name in waiting if refused(engine.quarantine, named(name))]
        if waiting:
            break
        while engine.has:
            if "r7" in engine.has:
                crashes += 1
                engine.quarantine.crashed(engine.isolation.sent)
                engine.isolation.clear()
                waiting = [name for name in names if name == "r7" or engine.quarantine.crashes(named(name))]
                break
            engine.end(engine.has[0])
    assert waiting == ["r7"] and crashes == 2
