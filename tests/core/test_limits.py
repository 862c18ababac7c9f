"""Small parts of the scheduler: stop conditions, chunk ends, policies, slots, admission."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core.world import item, make_cache, make_config, make_request

from headrace.core.budget import StepBudget
from headrace.core.items import affordable_length, chunk_length, encoder_cost, least_chunk
from headrace.core.ordered import OrderedSequences, running_order, waiting_order
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence, Status
from headrace.core.slots import Slots
from headrace.core.stops import Stop, check_stop
from headrace.errors import QueueFullError, RequestError
from headrace.kv import CacheIdentity, Item, KVCacheManager


def sequence(outputs: list[int], *, max_model_len: int = 100, seq_id: int = 0, **fields: object) -> Sequence:
    request = make_request("r", [7, 7, 7], **{"max_tokens": 50} | fields)
    blocks = KVCacheManager(make_cache()).open(seq_id, [7, 7, 7], CacheIdentity())
    seq = Sequence(seq_id, request, 0, blocks, max_model_len)
    seq.token_ids.extend(outputs)
    return seq


# ---------------------------------------------------------------------- stops


def test_end_of_sequence_stops_unless_ignored() -> None:
    assert check_stop(sequence([5, 2], eos_token_ids=[2, 3])) == Stop("stop", None, by_token=True)
    assert check_stop(sequence([5, 4], eos_token_ids=[2, 3])) is None
    # Not as many as a power of two: what would fill a list up ends nothing.
    assert check_stop(sequence([5, 0], eos_token_ids=[2, 3, 4], stop_token_ids=[7, 8, 9])) is None
    assert check_stop(sequence([5, 2], eos_token_ids=[2], ignore_eos=True)) is None


def test_stop_token_names_itself() -> None:
    assert check_stop(sequence([5, 9], stop_token_ids=[8, 9])) == Stop("stop", 9, by_token=True)
    assert check_stop(sequence([5, 9], stop_token_ids=[8, 9], ignore_eos=True, eos_token_ids=[9])) == Stop(
        "stop", 9, by_token=True
    )
    assert check_stop(sequence([9, 5], stop_token_ids=[9])) is None


@pytest.mark.parametrize(("outputs", "stops"), [(1, False), (2, False), (3, True), (4, True)])
def test_nothing_but_length_stops_before_min_tokens(outputs: int, stops: bool) -> None:
    for fields in ({"eos_token_ids": [2]}, {"stop_token_ids": [2]}):
        stop = check_stop(sequence([2] * outputs, min_tokens=3, **fields))
        assert (stop is not None) == stops


def test_length_is_max_tokens_or_the_context() -> None:
    assert check_stop(sequence([1] * 4, max_tokens=5)) is None
    assert check_stop(sequence([1] * 5, max_tokens=5)) == Stop("length", None)
    assert check_stop(sequence([1] * 6, max_model_len=10)) is None
    assert check_stop(sequence([1] * 7, max_model_len=10)) == Stop("length", None)
    assert check_stop(sequence([1] * 4 + [2], max_tokens=5, eos_token_ids=[2])) == Stop("stop", None, by_token=True)


# ---------------------------------------------------------------------- chunks


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.sets(st.integers(0, 30), max_size=8), st.integers(1, 30), st.integers(1, 35), st.data())
def test_a_chunk_is_as_long_as_the_items_allow(cuts: set[int], end: int, limit: int, data: st.DataObject) -> None:
    bounds = [cut for cut in sorted(cuts) if cut <= end]
    items = [item(s, e, atomic=data.draw(st.booleans())) for s, e in zip(bounds[::2], bounds[1::2], strict=False)]

    def allowed(position: int) -> bool:
        return not any(one.atomic and one.start < position < one.end for one in items)

    start = data.draw(st.sampled_from([p for p in range(end) if allowed(p)]))
    best = max(n for n in range(min(limit, end - start) + 1) if allowed(start + n))
    assert chunk_length(start, end, limit, items) == best
    least = next(n for n in itertools.count(1) if allowed(start + n))
    assert least_chunk(start, items) == least


@pytest.mark.parametrize(
    ("start", "encoded", "left", "length", "cost"),
    [(0, 0, 9, 12, 9), (0, 0, 8, 6, 4), (0, 0, 3, 2, 0), (3, 0, 3, 0, 0), (3, 3, 5, 9, 5), (3, 3, 4, 3, 0), (6, 6, 9, 6, 5)],
)
def test_a_chunk_is_as_long_as_the_encoder_budget_pays_for(start: int, encoded: int, left: int, length: int, cost: int) -> None:
    items = [item(2, 5, atomic=False, encoder_tokens=4), item(6, 9, encoder_tokens=5), item(12, 14, encoder_tokens=7)]
    assert affordable_length(start, 12 - start, items, encoded, left) == length
    assert encoder_cost(start, start + length, items, encoded) == cost


# ---------------------------------------------------------------------- order


def test_first_come_first_served_and_preempted_first() -> None:
    early, late = sequence([], seq_id=1, priority=9), sequence([], seq_id=2)
    back = sequence([], seq_id=3)
    back.status = Status.PREEMPTED
    assert sorted([late, back, early], key=lambda seq: waiting_order("fcfs", seq)) == [back, early, late]
    assert sorted([back, late, early], key=lambda seq: running_order("fcfs", seq)) == [early, late, back]


def test_priority_goes_before_arrival_and_preempted_to_the_front_of_their_class() -> None:
    low, high, high_later = (sequence([], seq_id=i, priority=p) for i, p in ((1, 5), (2, -1), (3, -1)))
    back = sequence([], seq_id=4, priority=-1)
    back.status = Status.PREEMPTED
    order = sorted([low, high_later, high, back], key=lambda seq: waiting_order("priority", seq))
    assert order == [back, high, high_later, low]


def test_ordered_sequences_find_their_members() -> None:
    queue = OrderedSequences(lambda seq: (seq.seq_id,))
    members = [sequence([], seq_id=i) for i in (4, 1, 3)]
    for member in members:
        queue.add(member)
    assert [seq.seq_id for seq in queue] == [1, 3, 4]
    assert [seq.seq_id for seq in reversed(queue)] == [4, 3, 1]
    stranger = sequence([], seq_id=3)
    assert stranger not in queue
    with pytest.raises(KeyError):
        queue.remove(stranger)
    queue.remove(members[2])
    assert members[2] not in queue
    assert next(iter(queue)) is members[1]


def test_slots_are_reused_lowest_first_and_released_once() -> None:
    slots = Slots(3)
    assert [slots.take(), slots.take()] == [0, 1]
    slots.release(0)
    assert slots.take() == 0
    assert slots.take_released() == (0,)
    assert slots.take_released() == ()
    assert slots.num_free == 1


@pytest.mark.parametrize(("budget", "reserved", "spendable"), [(8, 3, 5), (8, 8, 1), (3, 8, 1), (0, 8, 0)])
def test_decoding_sequences_never_take_the_last_token_from_a_prompt_before_them(
    budget: int, reserved: int, spendable: int
) -> None:
    assert StepBudget(budget, 0, reserved).spendable == spendable


# ---------------------------------------------------------------------- admission


def refused(
    request: object,
    *,
    num_blocks: int | tuple[int, ...] = 64,
    windows: tuple[int | None, ...] = (None,),
    max_num_encoder_tokens: int = 0,
) -> RequestError:
    config = make_config(max_num_encoder_tokens=max_num_encoder_tokens)
    scheduler = Scheduler(config, make_cache(num_blocks, windows=windows))
    with pytest.raises(RequestError) as caught:
        scheduler.add(request)
    assert not scheduler.has_work()
    scheduler.check_integrity()
    return caught.value


def test_prompts_that_cannot_be_served() -> None:
    assert "can never fit in the KV cache" in refused(make_request("r", [1] * 21), num_blocks=6).message


def test_prompts_at_the_limits_are_served() -> None:
    Scheduler(make_config(), make_cache()).add(make_request("r", [1] * 63))
    Scheduler(make_config(), make_cache(6)).add(make_request("r", [1] * 20))


def test_a_window_takes_long_prompts_in_few_blocks() -> None:
    Scheduler(make_config(), make_cache(4, windows=(8,))).add(make_request("r", [1] * 60))
    assert "'window 8', which has 2" in refused(make_request("r", [1] * 60), num_blocks=3, windows=(8,)).message
    items = (item(0, 16),)
    assert refused(make_request("r", [1] * 60, items=items), num_blocks=4, windows=(8,)).param == "prompt"


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([item(0, 17)], r"items\[0\] \(0, 17\) is atomic and has 17 tokens; a step takes at most 16"),
        ([item(0, 4, encoder_tokens=9)], "has 9 encoder tokens; a step takes at most 8"),
    ],
)
def test_items_that_cannot_be_served(items: list[Item], why: str) -> None:
    error = refused(make_request("r", [1] * 20, items=tuple(items)), max_num_encoder_tokens=8)
    assert error.param == "items"
    assert re.search(why, error.message)


def test_touching_items_and_one_of_a_whole_step_are_served() -> None:
    Scheduler(make_config(), make_cache()).add(make_request("r", [1] * 20, items=(item(0, 16), item(16, 20))))
    longer = item(0, 20, atomic=False, encoder_tokens=8)
    Scheduler(make_config(max_num_encoder_tokens=8), make_cache()).add(make_request("r", [1] * 20, items=(longer,)))


def test_the_queue_has_an_end() -> None:
    scheduler = Scheduler(make_config(max_queue_len=3), make_cache())
    scheduler.add(make_request("a", [1], n=2))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("b", [1], n=2))
    scheduler.add(make_request("c", [1]))
    with pytest.raises(QueueFullError) as caught:
        scheduler.add(make_request("d", [1]))
    assert caught.value.status == 429
    scheduler.abort("a")
    scheduler.add(make_request("d", [1]))


def test_more_samples_than_the_queue_is_long_can_never_be_served() -> None:
    scheduler = Scheduler(make_config(max_queue_len=3), make_cache())
    with pytest.raises(RequestError) as caught:
        scheduler.add(make_request("a", [1], n=4))
    assert (caught.value.param, caught.value.status) == ("n", 400)


def test_a_request_id_in_use_is_refused() -> None:
    scheduler = Scheduler(make_config(), make_cache())
    scheduler.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="being served already"):
        scheduler.add(make_request("a", [2]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [2]))
