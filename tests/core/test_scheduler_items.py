"""Scheduling prompts with items: atomic ones, and those that cost encoder work."""

from __future__ import annotations

import pytest
from support.core.world import World, item, make_cache, make_config, make_request

PROMPT = list(range(1, 11))


def test_chunks_end_before_an_atomic_item_they_cannot_take_whole() -> None:
    world = World(make_config(max_num_batched_tokens=8), make_cache())
    world.add(make_request("a", [1] * 20, max_tokens=1, items=(item(5, 12), item(13, 20))))
    rows = []
    while (plan := world.launch()) is not None:
        rows += [(row.num_computed, row.num_tokens) for row in plan.rows]
        world.collect()
    assert rows == [(0, 5), (5, 8), (13, 7)]
    world.assert_right()


@pytest.mark.parametrize("waiting", [True, False])
def test_an_item_of_a_whole_step_gets_its_turn_beside_endless_decoding(waiting: bool) -> None:
    world = World(make_config(max_num_batched_tokens=8, max_num_seqs=3), make_cache())
    world.add(make_request("busy", [1], max_tokens=60))
    world.step()
    start = 0 if waiting else 3
    (seq,) = world.add(make_request("a", [2] * 14, max_tokens=1, items=(item(start, start + 8),)))
    for _ in range(6):
        world.step()
    assert seq.finished
    world.run()
    world.assert_right()


def rows_of(world: World) -> list[list[tuple[int, int, int]]]:
    """Per step: (sequence, first token, tokens) of each row, until nothing is left."""
    steps = []
    while (plan := world.launch()) is not None:
        steps.append([(row.seq_id, row.num_computed, row.num_tokens) for row in plan.rows])
        world.collect()
    world.assert_right()
    return steps


@pytest.mark.parametrize("atomic", [True, False])
def test_a_chunk_ends_before_an_item_that_the_encoder_budget_cannot_pay(atomic: bool) -> None:
    world = World(make_config(max_num_encoder_tokens=10), make_cache())
    images = tuple(item(start, start + 4, atomic=atomic, encoder_tokens=cost) for start, cost in ((1, 6), (6, 0), (10, 5)))
    world.add(make_request("a", [1] * 15, max_tokens=1, items=images))
    assert rows_of(world) == [[(0, 0, 10)], [(0, 10, 5)]]


def test_an_item_in_several_chunks_is_encoded_once() -> None:
    world = World(make_config(max_num_batched_tokens=4, max_num_encoder_tokens=10), make_cache())
    world.add(make_request("a", [1] * 10, max_tokens=1, items=(item(1, 9, atomic=False, encoder_tokens=10),)))
    assert rows_of(world) == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]


def test_sequences_share_the_encoder_budget_and_text_passes_none_of_it() -> None:
    world = World(make_config(max_num_batched_tokens=32, max_num_encoder_tokens=10), make_cache())
    for name, content in (("a", "cat"), ("b", "dog")):
        world.add(make_request(name, [1] * 8, max_tokens=1, items=(item(2, 6, content, encoder_tokens=6),)))
    world.add(make_request("c", [2] * 8, max_tokens=1))
    assert rows_of(world) == [[(0, 0, 8), (1, 0, 2), (2, 0, 8)], [(1, 2, 6)]]


def test_a_hit_inside_an_item_pays_for_its_encoder() -> None:
    world = World(make_config(max_num_encoder_tokens=10), make_cache(block_size=2))
    image = item(1, 7, atomic=False, encoder_tokens=10)
    world.add(make_request("a", [1] * 9, max_tokens=1, items=(image,)))
    assert rows_of(world) == [[(0, 0, 9)]]
    world.add(make_request("b", [1] * 5 + [1] * 2, max_tokens=1, items=(image,)))
    world.add(make_request("c", [1] * 5 + [1] * 2, max_tokens=1, items=(image,)))
    assert rows_of(world) == [[(1, 6, 1)], [(2, 6, 1)]]


def test_a_preempted_sequence_encodes_its_items_again() -> None:
    world = World(make_config(max_num_encoder_tokens=10), make_cache(caching=False))
    (seq,) = world.add(make_request("a", [1] * 8, max_tokens=3, items=(item(2, 6, encoder_tokens=10),)))
    world.step()
    world.scheduler._preempt(seq)
    (other,) = world.add(make_request("b", [1] * 8, max_tokens=1, items=(item(2, 6, encoder_tokens=1),)))
    plan = world.launch()
    assert plan is not None
    assert [(row.seq_id, row.num_tokens) for row in plan.rows] == [(seq.seq_id, 9), (other.seq_id, 2)]
    world.collect()
    world.run()
    world.assert_right()
