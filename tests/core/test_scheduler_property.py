"""Random worlds: whatever happens, every sequence generates what it would have generated alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core.oracle_runner import EOS, VOCAB
from support.core.world import World, make_cache, make_request

from headrace.config import SchedulerConfig
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence, SequenceUpdate
from headrace.core.step import StepBuilder
from headrace.errors import RequestError
from headrace.kv import Item
from headrace.outputs import Failure

BASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 1, 4, 1, 5, 9, 2, 6, 5]
"""Prompts begin with a piece of this, so that prefixes are shared."""


@dataclasses.dataclass
class Arrival:
    request: Request
    at: int
    abort_at: int | None
    host_stop: int | None
    error_at: int | None


ITEMS = [[(2, 6)], [(0, 4), (4, 7)], [(3, 11)], [(1, 2), (5, 9), (12, 20)], [(7, 30)]]
"""Few, so that prompts share prefixes with the same items, and with others."""


@st.composite
def item_lists(draw: st.DrawFn, length: int, config: SchedulerConfig) -> tuple[Item, ...]:
    items = []
    for start, end in draw(st.sampled_from(ITEMS)):
        atomic = draw(st.sampled_from([True, True, False]))
        end = min(end, length, start + config.max_num_batched_tokens if atomic else length)
        cost = draw(st.integers(0, config.max_num_encoder_tokens))
        if start < end:
            items.append(Item(start, end, atomic, atomic and draw(st.booleans()), draw(st.sampled_from("aab")), cost))
    return tuple(items)


@st.composite
def arrivals(draw: st.DrawFn, number: int, config: SchedulerConfig) -> Arrival:
    shared = draw(st.integers(0, 30))
    own = draw(st.lists(st.integers(1, VOCAB - 1), min_size=0 if shared else 1, max_size=4))
    prompt = BASE[:shared] + own
    if draw(st.integers(0, 2)) == 0:
        prompt[draw(st.integers(0, len(prompt) - 1))] = draw(st.integers(1, VOCAB - 1))
    with_items = draw(st.integers(0, 2)) == 0
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    request = make_request(
        f"r{number}",
        prompt,
        max_tokens=draw(st.integers(1, 20)),
        n=n,
        seed=draw(st.integers(0, 3)),
        eos_token_ids=[EOS] if draw(st.booleans()) else [],
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 1])),
        stop_token_ids=draw(st.sampled_from([None, None, [5, 7]])),
        logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from([None, None, None, "salt"])),
        items=draw(item_lists(len(prompt), config)) if with_items else (),
    )
    rare = st.integers(0, 5).map(lambda x: x == 0)
    return Arrival(
        request,
        at=draw(st.sampled_from([0, 0, 1, 3, 8, 15, 25])),
        abort_at=draw(st.integers(0, 50)) if draw(rare) else None,
        host_stop=draw(st.integers(1, 6)) if draw(rare) else None,
        error_at=draw(st.integers(1, 40)) if draw(rare) else None,
    )


@st.composite
def worlds(draw: st.DrawFn, decode_tokens: tuple[int, ...] = (1,)) -> tuple[World, list[Arrival]]:
    config = SchedulerConfig(
        max_model_len=draw(st.integers(24, 48)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(4, 24)),
        max_queue_len=draw(st.sampled_from([3, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        pipeline_depth=draw(st.integers(1, 3)),
        max_num_encoder_tokens=draw(st.integers(0, 4)),
        max_prefill_tokens_beside_decode=draw(st.sampled_from([None, None, 1, 5])),
        decode_tokens=draw(st.sampled_from(decode_tokens)),
        max_step_seconds=draw(st.sampled_from([None, 1.0])),
    )
    windows = draw(st.sampled_from([(None,), (None,), (None, 5), (None, 5), (6,), (1,), (None, 9, 3), (None, 12, 7, 2)]))
    block_size = draw(st.sampled_from([1, 2, 4]))
    blocks = tuple(1 + draw(st.integers(16, 72)) // block_size for _ in windows)
    widths = tuple(draw(st.sampled_from([1, 1, 2, 3, 5])) for _ in windows)
    cache = make_cache(blocks, block_size, windows, caching=draw(st.integers(0, 3)) > 0, widths=widths)
    count = draw(st.integers(1, 9))
    world = World(config, cache)
    slow = draw(st.sampled_from([0.02, 0.5, 2.0]))
    world.seconds = lambda plan: slow * sum(row.num_tokens for row in plan.rows) * (1 + plan.step % 3)
    return world, [draw(arrivals(number, config)) for number in range(count)]


RESETS = 17
"""The prefix cache is forgotten every so many ticks."""


def play(world: World, script: list[Arrival], collects: list[bool], disturb: Callable[[int], None] = lambda tick: None) -> None:
    """Runs the script tick by tick; ``collects`` decides at each tick whether a step is collected or another launched.
    ``disturb`` is called with each of the first ticks."""
    for tick in range(3000):
        if tick < 60:
            disturb(tick)
        for arrival in script:
            if arrival.at == tick:
                admit(world, arrival)
            if arrival.abort_at == tick:
                world.abort(arrival.request.request_id)
        if tick % RESETS == RESETS - 1:
            world.scheduler.kv.reset_prefix_cache()
        if tick >= 60 and not world.scheduler.has_work():
            return
        stuck = world.launch() is None
        if world.launched and (stuck or collects[tick % len(collects)]):
            world.collect()
        elif stuck and tick >= 60:
            raise AssertionError("work is left, but nothing can be launched")
    raise AssertionError("somebody starves")


def admit(world: World, arrival: Arrival) -> None:
    if len(arrival.request.prompt_token_ids) >= world.scheduler.config.max_model_len:
        return  # InputProcessor refuses these.
    try:
        sequences = world.add(arrival.request)
    except RequestError:
        return
    for seq in sequences:
        if arrival.host_stop is not None:
            world.host_stops[seq.seq_id] = arrival.host_stop
        if arrival.error_at is not None:
            world.errors[seq.seq_id] = arrival.error_at + seq.index


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds(), st.lists(st.booleans(), min_size=1, max_size=7))
def test_everyone_gets_their_own_tokens(world_and_script: tuple[World, list[Arrival]], collects: list[bool]) -> None:
    world, script = world_and_script
    play(world, script, collects)
    world.assert_right()


@pytest.mark.slow
@settings(max_examples=900, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds(), st.lists(st.booleans(), min_size=1, max_size=7))
def test_everyone_gets_their_own_tokens_in_many_worlds(
    world_and_script: tuple[World, list[Arrival]], collects: list[bool]
) -> None:
    world, script = world_and_script
    play(world, script, collects)
    world.assert_right()


@settings(max_examples=50, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds((2, 3, 6)), st.lists(st.booleans(), min_size=1, max_size=7))
def test_drafts_change_no_tokens(world_and_script: tuple[World, list[Arrival]], collects: list[bool]) -> None:
    world, script = world_and_script
    play(world, script, collects)
    world.assert_right()


@settings(max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET)
@given(worlds(), st.lists(st.booleans(), min_size=1, max_size=7))
def test_the_short_paths_of_a_decoding_row_change_nothing(drawn: tuple[World, list[Arrival]], collects: list[bool]) -> None:
    world, script = drawn
    plain = [dataclasses.replace(one, request=without_logprobs(one.request)) for one in script]
    play(world, plain, collects)
    other = World(world.config, world.cache)
    other.seconds = world.seconds
    with without_short_paths():
        play(other, plain, collects)
    assert other.recording == world.recording
    assert other.outcomes == world.outcomes
    assert other.scheduler.stats() == world.scheduler.stats()


@contextlib.contextmanager
def without_short_paths() -> Iterator[None]:
    """Every row of a plan and of a result takes the long path."""
    update = Scheduler.update

    def long(self: Scheduler, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        return update(self, plan, msgspec.structs.replace(result, errors=result.errors | {-1: Failure("of nobody")}))

    def longer(step: StepBuilder, sequences: Iterator[Sequence]) -> Sequence | None:
        return next(sequences, None) if step.budget.tokens else None

    with mock.patch.object(Scheduler, "update", long), mock.patch.object(StepBuilder, "add_next_tokens", longer):
        yield


def without_logprobs(request: Request) -> Request:
    """A step with logprobs takes the other path."""
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, logprobs=None))
