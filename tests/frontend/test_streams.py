"""A reader that is behind gets waiting deltas as one: what they add up to, and its order, is what single deltas say."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from headrace.core.request import Request
from headrace.frontend.streams import Inbox, OutputStream
from headrace.outputs import Event, Message, OutputDelta, RequestTimes, TokenLogprobs
from headrace.sampling_params import SamplingParams


def delta(number: int, **fields: Any) -> OutputDelta:
    """One token's."""
    return OutputDelta(request_id="r", token_ids=[number], **({"text": f"{number} "} | fields))


def read(deltas: list[OutputDelta], waiting: list[int], samples: int = 1) -> list[OutputDelta]:
    """Returns the deltas of a reader that comes whenever as many wait as ``waiting`` says."""

    async def main() -> list[OutputDelta]:
        inbox = Inbox(
            [Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(n=samples), max_tokens=500, seed=0)]
        )
        stream = OutputStream(inbox, lambda names: None)
        found, rest = [], iter(deltas)
        for count in itertools.cycle(waiting):
            if not (some := [*itertools.islice(rest, count)]):
                return found
            for each in some:
                inbox.put(each)
            while (ready := stream.ready()) is not None:
                found.append(ready)
        raise AssertionError

    return asyncio.run(main())


def folded(deltas: list[OutputDelta], index: int) -> dict[str, Any]:
    """Returns the sum of the deltas of one sample."""
    mine, message = [each for each in deltas if each.index == index], Message()
    for each in mine:
        message.add(each.events)
    return {
        "text": "".join(each.text for each in mine),
        "message": message,
        "kinds": [kind for kind, _ in itertools.groupby((event.kind, event.index) for each in mine for event in each.events)],
        "tokens": [token for each in mine for token in each.token_ids],
        "cached": [each.num_cached_tokens for each in mine if each.num_cached_tokens is not None][-1:],
        "end": msgspec.structs.replace(mine[-1], text="", events=[], token_ids=[], num_cached_tokens=None),
    }


EVENTS = [
    Event("reasoning", "hm ", tokens=2),
    Event("reasoning", "so", tokens=1),
    Event("content", "a"),
    Event("content", "b"),
    Event("call_started", index=0, name="f", id="1"),
    Event("arguments", "{", index=0),
    Event("arguments", "}", index=0),
    Event("call_ended", index=0),
    Event("call_started", index=1, name="g", id="2"),
    Event("arguments", "[]", index=1),
    Event("call_ended", index=1),
]
END = {"finish_reason": "stop", "stop_reason": "x", "times": RequestTimes(0.0, 1.0, 2.0, 3.0)}
PLAIN = [delta(0, num_cached_tokens=5), *map(delta, range(1, 40)), delta(40, **END)]
PARSED = [*(delta(number, text="", events=[event]) for number, event in enumerate(EVENTS)), delta(99, text="", **END)]


@pytest.mark.parametrize("deltas", [PLAIN, PARSED], ids=["plain", "parsed"])
def test_waiting_deltas_are_one(deltas: list[OutputDelta]) -> None:
    rng = random.Random(0)
    single = read(deltas, [1])
    assert single == deltas
    for waiting in ([2], [3], [500], [rng.randint(1, 9) for _ in range(20)]):
        found = read(deltas, waiting)
        assert folded(found, 0) == folded(deltas, 0)
        assert len(found) < len(deltas)


def test_as_many_as_wait_up_to_a_limit() -> None:
    assert [len(each.token_ids) for each in read(PLAIN, [5])] == [5] * 8 + [1]
    assert [len(each.token_ids) for each in read(PLAIN, [500])] == [32, 9]
    assert len(read(PARSED, [500])[0].events) == 8, "texts of one kind and call are joined"


def test_samples_keep_their_order() -> None:
    deltas = [msgspec.structs.replace(each, index=place // 3 % 2) for place, each in enumerate(PLAIN[:-1])]
    found = read([*deltas, delta(40, **END), delta(41, index=1, **END)], [500], samples=2)
    assert [token for each in found for token in each.token_ids] == list(range(42))
    assert folded(found, 1) == folded([*deltas, delta(41, index=1, **END)], 1)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_comes_before_an_error_is_apart_from_it(reason: Any) -> None:
    broken = OutputDelta(request_id="r", finish_reason=reason, error="died")
    assert [each.text for each in read([*PLAIN[:3], broken], [500])] == ["0 1 2 ", ""]


def test_logprobs_stay_with_their_tokens() -> None:
    entry = TokenLogprobs([7], [-1.0], 1)
    deltas = [
        delta(0, prompt_logprobs=[None]),
        delta(1),
        delta(2),
        *(delta(3 + i, logprobs=[entry]) for i in range(2)),
        delta(5),
    ]
    assert [each.token_ids for each in read(deltas, [9])] == [[0], [1, 2], [3], [4], [5]]


def taken(
    script: Callable[[Inbox, OutputStream, list[list[OutputDelta]]], Coroutine[Any, Any, None]],
) -> list[list[OutputDelta]]:
    """Runs a script with the stream of one request; returns what it collected, call by call."""

    async def main() -> list[list[OutputDelta]]:
        inbox = Inbox(
            [Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=500), max_tokens=500, seed=0)]
        )
        calls: list[list[OutputDelta]] = []
        await script(inbox, OutputStream(inbox, lambda names: None), calls)
        return calls

    return asyncio.run(main())


def all_ready(stream: OutputStream) -> list[OutputDelta]:
    return [*iter(stream.ready, None)]


def taker(stream: OutputStream, calls: list[list[OutputDelta]], *, more: bool) -> Callable[[], bool]:
    """Takes all that is ready. ``more``: whether it wants to be called again."""

    def take() -> bool:
        calls.append(all_ready(stream))
        return more

    return take


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_deltas_of_one_turn_are_taken_together() -> None:
    async def script(inbox: Inbox, stream: OutputStream, calls: list[list[OutputDelta]]) -> None:
        waiting = asyncio.create_task(stream.each(taker(stream, calls, more=True)))
        await turns()
        for numbers in ([0], [1, 2, 3], [4]):
            for number in numbers:
                inbox.put(delta(number))
            await turns()
        assert not waiting.done()
        inbox.put(delta(5, **END))
        await waiting
        assert not await stream.more()

    assert [[each.token_ids for each in call] for call in taken(script)] == [[[0]], [[1, 2, 3]], [[4]], [[5]]]


def test_what_arrived_before_each_is_taken() -> None:
    async def script(inbox: Inbox, stream: OutputStream, calls: list[list[OutputDelta]]) -> None:
        def take() -> bool:
            calls.append([ready] if (ready := stream.ready()) is not None else [])
            return True

        inbox.put(delta(0, logprobs=[TokenLogprobs([0], [-1.0], 1)]))
        inbox.put(delta(1, **END))
        # ``take`` leaves a delta behind, and is called again for it.
        await stream.each(take)
        assert len(calls) == 2
        await stream.each(take)

    assert [[each.token_ids for each in call] for call in taken(script)] == [[[0]], [[1]], []]


def test_a_taker_that_must_wait_is_called_no_more() -> None:
    async def script(inbox: Inbox, stream: OutputStream, calls: list[list[OutputDelta]]) -> None:
        for number in (0, 1):
            waiting = asyncio.create_task(stream.each(taker(stream, calls, more=False)))
            await turns()
            inbox.put(delta(number))
            await waiting
        inbox.put(delta(2))
        await turns()
        assert len(calls) == 2 and await stream.more()
        calls.append(all_ready(stream))

    assert [[each.token_ids for each in call] for call in taken(script)] == [[[0]], [[1]], [[2]]]


def test_an_error_of_a_taker_reaches_the_reader() -> None:
    async def script(inbox: Inbox, stream: OutputStream, calls: list[list[OutputDelta]]) -> None:
        def take() -> bool:
            raise ValueError("broken")

        waiting = asyncio.create_task(stream.each(take))
        await turns()
        inbox.put(delta(0))
        with pytest.raises(ValueError, match="broken"):
            await waiting
        calls.append(all_ready(stream))

    assert [each.token_ids for call in taken(script) for each in call] == [[0]]


def test_a_cancelled_reader_takes_nothing() -> None:
    async def script(inbox: Inbox, stream: OutputStream, calls: list[list[OutputDelta]]) -> None:
        waiting = asyncio.create_task(stream.each(taker(stream, calls, more=True)))
        await turns()
        inbox.put(delta(0))
        waiting.cancel()
        await turns()
        inbox.put(delta(1))
        await turns()
        assert waiting.cancelled() and len(inbox.deltas) == 2

    assert taken(script) == []
