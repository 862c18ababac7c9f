"""Random worlds of sequences with states: each row finds the state of exactly its tokens, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core.small_tiles import small_tiles
from support.core.world import World, make_cache

from core.test_scheduler_property import QUIET, Arrival, arrivals, play
from headrace.config import SchedulerConfig


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Arrival]]:
    seqs = draw(st.integers(1, 5))
    config = SchedulerConfig(
        max_model_len=draw(st.integers(24, 48)),
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(4 + seqs, 28)),
        max_queue_len=100,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        pipeline_depth=draw(st.integers(1, 3)),
        max_num_encoder_tokens=draw(st.integers(0, 4)),
        max_prefill_tokens_beside_decode=draw(st.sampled_from([None, None, 1, 5])),
    )
    windows = draw(st.sampled_from([(None,), (None,), (None, 5), (6,), (None, 9, 3)]))
    block_size = draw(st.sampled_from([1, 2, 4]))
    blocks = tuple(1 + draw(st.integers(16, 72)) // block_size for _ in windows)
    widths = tuple(draw(st.sampled_from([1, 2, 3, 5])) for _ in windows)
    states = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2 * seqs)), draw(st.sampled_from([0, 1, 3, 20, 20]))
    caching = draw(st.integers(0, 4)) > 0
    with small_tiles():
        world = World(config, make_cache(blocks, block_size, windows, caching=caching, widths=widths, states=states))
    return world, [draw(arrivals(number, config)) for number in range(draw(st.integers(1, 9)))]


DISTURBANCES = st.lists(st.sampled_from(["", "", "preempt"]), min_size=1, max_size=9) | st.lists(
    st.sampled_from(["", "", "preempt", "update"]), min_size=1, max_size=30
)


def check(world: World, script: list[Arrival], collects: list[bool], disturbances: list[str]) -> None:
    """``disturbances``: what happens in turn, a tick after the other: a sequence is preempted, or the weights change."""
    states = world.scheduler.kv.states
    assert states is not None
    if "update" in disturbances:
        # Samples that begin behind an update share the KV that their first one has.
        script = [arrival for arrival in script if arrival.request.sampling.n == 1]

    def disturb(tick: int) -> None:
        running, what = list(world.scheduler._running), disturbances[tick % len(disturbances)]
        if what == "preempt" and running:
            world.scheduler._preempt(running[tick % len(running)])
        elif what == "update":
            world.scheduler.kv.bump_weight_version()
            world.runner.weights += 1

    with small_tiles():
        play(world, script, collects, disturb)
    if world.runner.weights:
        # Outputs are those of several weights. That no KV and no state is another's has been checked step by step.
        world.scheduler.check_integrity()
        assert world.scheduler.kv.num_used == 0
    else:
        world.assert_right()
    assert states.num_findable <= states.most


@settings(max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds(), st.lists(st.booleans(), min_size=1, max_size=7), DISTURBANCES)
def test_every_row_finds_its_state(drawn: tuple[World, list[Arrival]], collects: list[bool], disturbances: list[str]) -> None:
    check(*drawn, collects, disturbances)


@pytest.mark.slow
@settings(max_examples=900, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds(), st.lists(st.booleans(), min_size=1, max_size=7), DISTURBANCES)
def test_every_row_finds_its_state_in_many_worlds(
    drawn: tuple[World, list[Arrival]], collects: list[bool], disturbances: list[str]
) -> None:
    check(*drawn, collects, disturbances)
