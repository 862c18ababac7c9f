"""Why a sequence waited for its first step, and how often it was preempted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.core.world import World, make_cache, make_config, make_request

from headrace.core.request import Constraint
from headrace.outputs import RequestTimes


def slots() -> World:
    world = World(make_config(max_num_seqs=1), make_cache())
    world.add(make_request("first", [1] * 4, max_tokens=3))
    return world


def blocks() -> World:
    world = World(make_config(), make_cache(7, caching=False))
    world.add(make_request("first", [1] * 20, max_tokens=3))
    return world


def tokens() -> World:
    world = World(make_config(max_num_batched_tokens=4), make_cache())
    world.add(make_request("first", [1] * 10, max_tokens=3))
    return world


def nothing() -> World:
    return World(make_config(), make_cache())


@pytest.mark.parametrize("before", [slots, blocks, tokens, nothing])
def test_a_limit_that_holds_a_sequence_up_is_named(before: Callable[[], World]) -> None:
    world = before()
    (seq,) = world.add(make_request("late", [2] * 8, max_tokens=2))
    (third,) = world.add(make_request("later", [3] * 8, max_tokens=2)) if before is slots else (seq,)
    world.run()
    cause = "" if before is nothing else before.__name__
    assert (seq.times.waited_for, third.times.waited_for) == (cause, cause)
    (free,) = world.add(make_request("alone", [4] * 8, max_tokens=2, arrival_time=1e9))
    world.run()
    assert free.times.waited_for == "", "nothing stopped it"


def test_a_constraint_that_is_being_compiled_is_named() -> None:
    world = World(make_config(), make_cache())
    (seq,) = world.add(make_request("constrained", [2] * 8, constraint=Constraint("regex", "a")))
    assert world.launch() is None
    seq.request = make_request("constrained", [2] * 8, max_tokens=2)
    world.run()
    assert seq.times.waited_for == "preparation"


def test_preemptions_are_counted() -> None:
    world = World(make_config(), make_cache(7, caching=False))
    (first,) = world.add(make_request("a", [1] * 8, max_tokens=16))
    (second,) = world.add(make_request("b", [2] * 8, max_tokens=12))
    world.run()
    assert (first.times.num_preemptions, second.times.num_preemptions) == (0, world.scheduler.stats().num_preemptions)
    assert second.times.num_preemptions
    assert isinstance(second.times, RequestTimes) and second.times.waited_for == "", "it had its first step at once"
