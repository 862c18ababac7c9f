"""Snapshots of states: where they are taken, and what finds them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.core.small_tiles import small_tiles
from support.core.world import World, make_cache, make_config, make_request

from headrace.core.points import ChunkGrid, snapshot_points
from headrace.errors import ConfigError
from headrace.kv import Item
from headrace.outputs import Failure

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_tiles():
        yield


def world(states: tuple[int, int, int] = (1, 40, 20), blocks: int = 200, caching: bool = True, **config: object) -> World:
    return World(make_config(**{"max_num_batched_tokens": 32} | config), make_cache(blocks, states=states, caching=caching))


def run(own: World, name: str, prompt: list[int], **fields: object) -> int:
    """Returns the prompt's tokens that were not computed."""
    (first, *_) = own.add(make_request(name, prompt, **fields))
    own.run()
    return first.num_cached_tokens


def test_a_prompt_is_found_up_to_its_last_snapshot() -> None:
    own = world()
    assert run(own, "first", PROMPT) == 0
    assert run(own, "again", PROMPT) == 28
    assert own.runner.num_copies
    own.assert_right()


def test_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafts are for models without state layers"):
        world(decode_tokens=3)


def test_kv_without_a_state_is_not_attached() -> None:
    own = world(states=(1, 40, 0))
    run(own, "first", PROMPT)
    (seq,) = own.add(make_request("again", PROMPT))
    own.launch()
    assert seq.num_cached_tokens == 0 and seq.cache is not None and seq.cache.attention == 28
    assert "no snapshot of the states between 1 and 28" in seq.cache.why
    own.run()
    own.assert_right()
    stats = own.scheduler.stats()
    assert stats.prefix_attention_tokens == 28 and stats.prefix_hit_tokens == 0 and stats.state_snapshots == 0


def test_a_minute_without_reuse_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = world(states=(1, 40, 0))
    for number in range(5):
        own.now = 31.0 * number
        run(own, f"{number}", PROMPT)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "the KV of 28 in 1 prompts was found: no snapshot of the states" in told[0]
    caplog.clear()
    own = world()
    for number in range(5):
        own.now = 31.0 * number
        run(own, f"{number}", PROMPT)
    assert not caplog.records, "states were found"


@pytest.mark.parametrize("rest", [9, 3])
def test_the_third_sibling_of_a_branch_hits_at_the_fork(rest: int) -> None:
    """However close behind it the prompts end, whose own snapshots no other finds."""
    own = world()
    found = [run(own, f"{tail}", [*PROMPT[:26], *[tail] * rest]) for tail in (1, 5, 10)]
    assert found == [0, 16, 24], "periodic points are 16 tokens apart here, and a branch is worth one from 6 on"
    own.assert_right()
    stats = own.scheduler.stats()
    assert stats.prefix_limits == {"attention": 2, "state": 1}
    assert stats.state_snapshots_saved["branch"] == 1 and sum(stats.state_snapshots_saved.values()) == stats.state_snapshots


def test_branches_in_small_chunks_leave_turns_in_a_small_budget() -> None:
    """Ends of chunks are not points of snapshots: these would displace the turn that all branches share."""
    own = world(states=(1, 40, 5), max_num_batched_tokens=9)
    tails = [[1 + number % 10, 1 + number // 10, *PROMPT[:12]] for number in range(40)]
    found = [run(own, f"{number}", [*PROMPT[:17], *tail], boundaries=(17,), max_tokens=2) for number, tail in enumerate(tails)]
    assert found == [0, *[16] * 39]
    own.assert_right()
    saved = own.scheduler.stats().state_snapshots_saved
    assert saved["turn"] == 1 and saved["prompt"] == 40 and sum(saved.values()) == 41


def test_shared_lengths_that_fall_are_found_at_the_next() -> None:
    """Each prompt shares a little less than the one before: the branch of one is not a snapshot of the next."""
    own = world()
    found = [run(own, f"{number}", [*PROMPT[:shared], *[number + 1] * 8]) for number, shared in enumerate((15, 14, 11, 9))]
    assert found == [0, 0, 0, 8]
    own.assert_right()


def test_ends_of_turns_have_snapshots_however_close() -> None:
    own = world()
    (first,) = own.add(make_request("first", PROMPT, boundaries=(10, 27)))
    own.launch()
    assert first.chunks is not None and first.chunks.points == (8, 16, 24, 28)
    own.run()
    assert run(own, "shared instructions", [*PROMPT[:10], 1, 1, 1, 1]) == 8
    assert run(own, "another answer", [*PROMPT[:26], 1, 1, 1, 1]) == 24
    own.assert_right()


def test_periodic_snapshots_are_evicted_before_those_of_turns() -> None:
    own = world(states=(1, 40, 3))
    run(own, "first", PROMPT, boundaries=(5,), max_tokens=1)
    assert run(own, "other", [1, 1, 1, 1, 1, 1], max_tokens=1) == 0
    states = own.scheduler.kv.states
    assert states is not None and states.num_findable == 3
    assert run(own, "shared instructions", [*PROMPT[:6], 1, 1], max_tokens=1) == 4
    assert run(own, "again", PROMPT, boundaries=(5,), max_tokens=1) == 28
    # The hit behind the turn has renewed it.
    for number in range(2):
        run(own, f"more {number}", [number + 2] * 6, max_tokens=1)
    assert run(own, "instructions again", [*PROMPT[:6], 2, 2], max_tokens=1) == 4
    own.assert_right()


def test_the_next_turn_finds_the_answer_of_the_last() -> None:
    """The shadow is at the last multiple of 4 at which a decode row began."""
    own = world()
    (first,) = own.add(make_request("first", PROMPT[:9], max_tokens=14))
    own.run()
    told = list(first.token_ids)
    assert run(own, "second", [*told, 1, 2, 3]) == 20
    own.assert_right()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [7, 8, 9, 12, 13])
def test_ends_beside_the_grid_leave_true_states(depth: int, length: int) -> None:
    """A step that is launched behind the end has advanced the live state, never the shadow. The oracle checks who finds it."""
    own = world(pipeline_depth=depth)
    (first,) = own.add(make_request("first", PROMPT[:5], max_tokens=20))
    own.host_stops[first.seq_id] = length - 5
    own.run()
    run(own, "second", [*first.token_ids, 1, 2, 3])
    own.assert_right()


def test_samples_start_from_the_state_of_the_first() -> None:
    own = world(caching=False)
    own.add(make_request("four", PROMPT, n=4))
    own.run()
    assert own.scheduler.stats().computed_prompt_tokens == 30 + 3 * 2
    assert own.runner.num_copies == 4
    own.assert_right()


def test_samples_compute_the_prompt_where_no_block_is_left_for_its_state() -> None:
    own = World(make_config(max_num_seqs=1, max_num_batched_tokens=32), make_cache(9, states=(1, 1, 0), caching=False))
    own.add(make_request("two", PROMPT[:25], max_tokens=7, n=2))
    own.run()
    own.assert_right()
    assert own.scheduler.stats().computed_prompt_tokens == 50 and not own.runner.num_copies


def test_snapshots_stay_within_their_budget_and_are_counted_when_skipped() -> None:
    own = world(states=(1, 40, 2), max_num_batched_tokens=128)
    states = own.scheduler.kv.states
    assert states is not None
    for start in range(8):
        own.add(make_request(f"{start}", PROMPT[start:], max_tokens=3))
    while own.scheduler.has_work():
        own.step()
        assert states.num_findable <= 2
    own.assert_right()
    stats = own.scheduler.stats()
    assert stats.state_snapshots == 2 and stats.state_snapshots_skipped["budget"] > 0


def test_a_cache_for_the_live_states_alone_serves() -> None:
    own = World(make_config(max_num_seqs=2, max_num_batched_tokens=32), make_cache(17, states=(4, 1, 9)))
    for turn in range(2):
        for start in range(3):
            own.add(make_request(f"{turn} {start}", PROMPT[: 20 + start], max_tokens=8))
        own.run()
    own.assert_right()
    assert own.scheduler.stats().state_snapshots_skipped["memory"] > 0


def test_a_lone_snapshot_becomes_the_state_where_there_is_no_room_for_a_copy() -> None:
    own = World(make_config(max_num_seqs=1, max_num_batched_tokens=32), make_cache(9, states=(8, 1, 1)))
    prompt = PROMPT[:28]
    assert run(own, "first", prompt, max_tokens=1) == 0
    before = own.runner.num_copies
    found = run(own, "again", prompt, max_tokens=1)
    assert (found, own.runner.num_copies - before) in ((24, 0), (0, 0)), "a hit here copies nothing"
    own.assert_right()


def test_a_failed_sequence_publishes_no_state() -> None:
    own = world(pipeline_depth=2)
    (seq,) = own.add(make_request("sick", PROMPT))
    own.errors[seq.seq_id] = 20
    own.run()
    assert own.outcomes[seq.seq_id].error == Failure("injected")
    states = own.scheduler.kv.states
    assert states is not None and states.skipped == {"ended": 1}
    run(own, "well", PROMPT)
    assert own.outcomes[seq.seq_id + 1].reason == "length"


def test_new_weights_find_no_old_states() -> None:
    own = world()
    run(own, "first", PROMPT)
    own.scheduler.kv.bump_weight_version()
    own.runner.weights += 1
    (seq,) = own.add(make_request("again", PROMPT))
    own.run()
    assert seq.num_cached_tokens == 0
    own.scheduler.check_integrity()


def test_salts_keep_states_apart() -> None:
    own = world()
    run(own, "first", PROMPT)
    assert run(own, "other", PROMPT, cache_salt="salt") == 0


def test_a_state_is_dropped_with_the_kv_that_ends_there() -> None:
    own = world(states=(1, 40, 20), blocks=20)
    states = own.scheduler.kv.states
    assert states is not None
    for start in range(6):
        run(own, f"{start}", [start + 1, *PROMPT], max_tokens=2)
        for key in states.pool.index._keys.values():
            assert own.scheduler.kv.pools[0].index.find(key) is not None
    assert len(states.pool.index)
    own.assert_right()


def test_chunks_end_on_the_grid_at_points_and_at_the_edges_of_items() -> None:
    grid = ChunkGrid(64, (128, 150))
    assert grid.cut(0, 300, 100, ()) == 64 and grid.cut(0, 300, 200, ()) == 128
    assert grid.cut(128, 300, 200, ()) == 22 and grid.cut(150, 300, 100, ()) == 42
    assert grid.cut(150, 300, 20, ()) == 0 and grid.least(150, 300, ()) == 42
    assert grid.cut(192, 200, 100, ()) == 8 and grid.least(192, 200, ()) == 8
    item = Item(40, 90, True, True, "cat")
    assert grid.cut(0, 300, 70, (item,)) == 40 and grid.least(0, 300, (item,)) == 40
    assert grid.cut(40, 300, 64, (item,)) == 50 and grid.cut(40, 300, 30, (item,)) == 0


def test_close_points_merge_into_the_later() -> None:
    def boundary(count: int) -> int:
        return count - count % 4

    assert snapshot_points((), (10, 14, 30), 0, 40, boundary) == (12, 28)
    assert snapshot_points((10,), (14, 30), 0, 40, boundary) == (8, 12, 28)
    assert snapshot_points((), (10, 14, 30, 43), 12, 28, boundary) == ()
