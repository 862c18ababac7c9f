"""Scheduling the samples of one request, which share its prompt's blocks."""

from __future__ import annotations

import pytest
from support.core.world import World, make_cache, make_config, make_request

from headrace.core.sequence import Status

PROMPT = list(range(1, 11))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (3,)])
def test_samples_share_the_prompts_blocks(caching: bool, depth: int, windows: tuple[int | None, ...]) -> None:
    world = World(make_config(pipeline_depth=depth), make_cache(windows=windows, caching=caching))
    sequences = world.add(make_request("a", PROMPT, max_tokens=6, n=3, ignore_eos=True))
    while sequences[2].status is Status.WAITING:
        world.step()
    shared = {sequence.blocks.tables[0][1] for sequence in sequences if sequence.blocks.num_passed[0] < 2}
    assert len(shared) <= 1, "block 1 of the prompt is one block"
    world.run()
    stats = world.scheduler.stats()
    assert world.runner.num_hit_tokens == 2 * 8, "each sample starts at the prompt's last, partial block"
    assert stats.computed_prompt_tokens == 10 + 2 + 2
    assert stats.prompt_tokens == 10
    assert [seq.num_cached_tokens for seq in sequences] == [0, 0, 0]
    world.assert_right()


def test_more_samples_than_slots_take_turns() -> None:
    world = World(make_config(max_num_seqs=2), make_cache())
    world.add(make_request("a", PROMPT, n=7))
    world.run()
    world.assert_right()


@pytest.mark.parametrize("end", ["error", "preempt", "finish"])
def test_samples_proceed_when_the_first_goes_before_its_prompt_is_computed(end: str) -> None:
    world = World(make_config(max_num_batched_tokens=4), make_cache(windows=(None, 5)))
    first, *rest = world.add(make_request("a", PROMPT, n=3))
    if end == "error":
        world.errors[first.seq_id] = 8
    world.step()
    if end == "preempt":
        world.scheduler._preempt(first)
    elif end == "finish":
        world.scheduler.finish(first, "abort")
        world.outcomes[first.seq_id].reason = "abort"
    world.run()
    assert all(seq.finish_reason == "length" for seq in rest)
    world.assert_right()


def test_samples_proceed_when_the_first_is_preempted_with_its_token_in_flight() -> None:
    """Its prompt is computed, but its blocks are gone: on its way back its windows may pass the point of the fork."""
    world = World(make_config(pipeline_depth=2), make_cache(windows=(3,)))
    first, *rest = world.add(make_request("a", PROMPT[:8], n=3, max_tokens=5))
    world.launch()
    world.scheduler._preempt(first)
    world.run()
    assert all(seq.finish_reason == "length" for seq in rest)
    world.assert_right()


def test_samples_that_can_no_longer_fork_start_on_their_own() -> None:
    world = World(make_config(pipeline_depth=2), make_cache(windows=(3,)))
    prompt = PROMPT[:8]
    leader, *rest = world.add(make_request("a", prompt, n=3, max_tokens=5))
    world.add(make_request("longer", [*prompt, 9, 1, 2, 3]))
    world.launch()
    world.scheduler._preempt(leader)
    world.run()
    assert all(seq.finish_reason == "length" for seq in rest)
    world.assert_right()


def test_waiting_samples_give_up_shared_blocks_that_a_running_sequence_needs() -> None:
    world = World(make_config(max_num_seqs=1), make_cache(6, caching=False))
    sequences = world.add(make_request("a", [1] * 12, max_tokens=8, n=3))
    world.run()
    assert all(seq.finish_reason == "length" for seq in sequences)
    world.assert_right()
