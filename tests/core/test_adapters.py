"""Scheduling sequences with adapters: few run at once, and none waits for ever."""

from __future__ import annotations

import pytest
from support.core.world import World, make_cache, make_config, make_request

from headrace.core.request import AdapterRef
from headrace.core.sequence import Sequence, Status
from headrace.core.slots import PATIENCE


def make(world: World, name: str, adapter: str | None, **fields: object) -> Sequence:
    ref = None if adapter is None else AdapterRef(adapter, f"digest of {adapter}")
    (seq,) = world.add(make_request(name, [1, 2, 3], adapter=ref, ignore_eos=True, **fields))
    return seq


def running(world: World) -> set[str]:
    return {seq.request.adapter.digest for seq in world.scheduler._running if seq.request.adapter is not None}


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_adapters_run_than_there_is_room_for(depth: int) -> None:
    world = World(make_config(pipeline_depth=depth, max_loras=2), make_cache())
    for number in range(24):
        make(world, f"{number}", (None, "a", "b", "c", "d")[number % 5], max_tokens=1 + number % 7)
    while world.scheduler.has_work():
        assert len(running(world)) <= 2
        world.step()
    world.assert_right()


def test_a_sequence_without_room_holds_up_no_other() -> None:
    world = World(make_config(max_loras=1), make_cache())
    first, waits, same, base = (
        make(world, f"{adapter} {n}", adapter, max_tokens=6) for n, adapter in enumerate(("a", "b", "a", None))
    )
    world.step()
    assert [seq.status for seq in (first, same, base)] == [Status.RUNNING] * 3
    assert waits.status is Status.WAITING
    world.run()
    assert waits.finish_reason == "length"
    world.assert_right()


@pytest.mark.parametrize("count", [1, 2])
def test_an_adapter_that_always_has_requests_makes_room(count: int) -> None:
    """However many requests for others arrive, the wait is at most patience and the longest sequence."""
    length = 8
    world = World(make_config(max_loras=count, max_num_seqs=4), make_cache())
    for number in range(3):
        make(world, f"early {number}", "ab"[number % count], max_tokens=length)
    world.step()
    waits = make(world, "waits", "c", max_tokens=2)
    for step in range(PATIENCE + length + 2):
        if waits.status is not Status.WAITING:
            break
        make(world, f"late {step}", "ab"[step % count], max_tokens=length)
        world.step()
    assert waits.status is not Status.WAITING
    world.run()
    world.assert_right()


def test_an_adapter_is_in_use_until_its_last_sequence_ends() -> None:
    world = World(make_config(max_loras=1), make_cache())
    make(world, "one", "a", max_tokens=2)
    assert [seq.request.adapter.name for seq in world.scheduler.unfinished()] == ["a"]
    world.run()
    assert not list(world.scheduler.unfinished())
