"""The scheduler in situations made to measure, on the oracle runner."""

from __future__ import annotations

import pytest
from support.core.oracle_runner import EOS, expected_outputs, expected_prompt_logprobs
from support.core.world import World, item, make_cache, make_config, make_request

from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Constraint
from headrace.core.sequence import Status
from headrace.errors import EngineError
from headrace.outputs import Failure

PROMPT = list(range(1, 11))


def test_long_prompts_go_in_chunks_and_sample_once() -> None:
    world = World(make_config(max_num_batched_tokens=4), make_cache())
    world.add(make_request("a", PROMPT, max_tokens=2))
    rows = []
    while world.scheduler.has_work():
        plan = world.launch()
        assert plan is not None
        rows.append([(row.num_computed, row.num_tokens, bool(row.num_logits)) for row in plan.rows])
        updates = world.collect()
        assert len(updates) == rows[-1][0][2]
    assert rows == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)], [(10, 1, True)]]
    world.assert_right()


def test_a_one_token_last_chunk_is_prefill() -> None:
    world = World(make_config(max_num_batched_tokens=3), make_cache())
    world.add(make_request("a", [1, 2, 3, 4], max_tokens=2))
    decode_rows = []
    while (plan := world.launch()) is not None:
        decode_rows.append(plan.num_decode_rows)
        world.collect()
    assert decode_rows == [0, 0, 1]


def test_a_long_prompt_leaves_a_token_to_every_decoding_sequence_behind_it() -> None:
    world = World(make_config(policy="priority", max_num_batched_tokens=6), make_cache())
    for name in "ab":
        world.add(make_request(name, [1, 2], max_tokens=20, priority=1))
    world.step()
    world.add(make_request("urgent", [3] * 12, priority=0))
    plan = world.launch()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [1, 1, 4]
    world.collect()
    plan = world.launch()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [1, 1, 4], "the prompt comes before both, and takes the rest"
    world.collect()
    world.run()
    world.assert_right()


def test_prompts_take_few_tokens_of_a_step_while_others_generate() -> None:
    world = World(make_config(max_num_batched_tokens=12, max_prefill_tokens_beside_decode=3), make_cache())
    world.add(make_request("a", [1] * 10, max_tokens=6))
    world.step()  # alone, a prompt is computed at once
    for name in "bc":
        world.add(make_request(name, [2] * 5, max_tokens=1))
    rows = []
    while (plan := world.launch()) is not None:
        rows.append([row.num_tokens for row in plan.rows])
        world.collect()
    assert rows == [[1, 3], [1, 2, 1], [1, 3], [1, 1], [1]]
    world.assert_right()


def test_samples_share_the_set_of_stop_tokens() -> None:
    world = World(make_config(), make_cache())
    first, *others = world.scheduler.add(make_request("a", [1, 2], n=3, stop_token_ids=[7, 8, 7]))
    assert first.stop_token_ids == {7, 8}
    assert all(other.stop_token_ids is first.stop_token_ids for other in others)


def test_waiting_sequences_start_in_policy_order() -> None:
    world = World(make_config(policy="priority", max_num_seqs=1), make_cache())
    for name, priority in (("low", 5), ("high", -1), ("mid", 0)):
        world.add(make_request(name, [1, 2], max_tokens=2, priority=priority))
    order = []
    while world.scheduler.has_work():
        for update in world.step():
            if update.finish_reason:
                order.append(update.seq.request.request_id)
    assert order == ["high", "mid", "low"]


# ---------------------------------------------------------------------- preemption


def test_the_last_by_policy_is_preempted_and_comes_back_whole() -> None:
    world = World(make_config(), make_cache(7, caching=False))
    (first,) = world.add(make_request("a", [1] * 8, max_tokens=16))
    (second,) = world.add(make_request("b", [2] * 8, max_tokens=12))
    plans = []
    while second.status is not Status.PREEMPTED:
        plan = world.launch()
        assert plan is not None
        plans.append(plan)
        world.collect()
    assert first.status is Status.RUNNING
    assert world.scheduler.stats().num_preemptions == 1
    slot = next(new.slot for new in plans[0].new if new.seq_id == second.seq_id)
    assert slot in plans[-1].released
    known = list(second.token_ids)
    while second.status is Status.PREEMPTED:
        plan = world.launch()
        assert plan is not None
        world.collect()
    (again,) = plan.new
    assert (again.seq_id, again.prompt_len) == (second.seq_id, 8)
    assert list(again.token_ids) == known
    assert plan.num_decode_rows == len(plan.rows) - 1, "what is recomputed is prefill"
    world.run()
    world.assert_right()


def test_cached_tokens_that_a_preemption_loses_are_computed_ones() -> None:
    world = World(make_config(), make_cache(9))
    world.add(make_request("earlier", [2] * 9, max_tokens=2))
    world.run()
    world.add(make_request("a", [1] * 8, max_tokens=24))
    (second,) = world.add(make_request("b", [2] * 9, max_tokens=12))
    world.step()
    assert second.num_cached_tokens == 8
    world.run()
    assert world.scheduler.stats().num_preemptions == 1
    assert second.num_cached_tokens == 0
    world.assert_right()


def test_priority_decides_who_is_preempted() -> None:
    world = World(make_config(policy="priority"), make_cache(7, caching=False))
    (low,) = world.add(make_request("low", [1] * 8, max_tokens=16, priority=1))
    (high,) = world.add(make_request("high", [2] * 8, max_tokens=12, priority=0))
    while world.scheduler.stats().num_preemptions == 0:
        world.step()
    assert (low.status, high.status) == (Status.PREEMPTED, Status.RUNNING)
    world.run()
    world.assert_right()


def test_blocks_on_their_way_back_stop_further_preemption() -> None:
    """A victim's blocks come late with steps in flight: that must not cost the next one its blocks as well."""
    world = World(make_config(pipeline_depth=2), make_cache(10, caching=False))
    sequences = [world.add(make_request(name, [i + 1] * 11, max_tokens=16))[0] for i, name in enumerate("abc")]
    while world.scheduler.stats().num_preemptions == 0:
        world.step()
    assert [seq.status for seq in sequences] == [Status.RUNNING, Status.RUNNING, Status.PREEMPTED]
    world.step()
    assert world.scheduler.stats().num_preemptions == 1
    world.run()
    world.assert_right()


def test_nobody_is_let_in_while_a_running_sequence_waits_for_blocks() -> None:
    world = World(make_config(max_num_batched_tokens=8), make_cache(9))
    world.add(make_request("a", [1], max_tokens=20))
    (waits,) = world.add(make_request("b", [2] * 12, items=(item(4, 12),)))
    world.step()
    world.step()
    pool = world.scheduler.kv.pools[0]
    pool.allocate(pool.num_free - 1, owner=999)
    world.add_unchecked(make_request("c", [3]))
    plan = world.scheduler.schedule()
    assert plan is not None
    assert [row.seq_id for row in plan.rows] == [0], "b needs two blocks, and c must not take the one that is left"
    assert waits.status is Status.RUNNING


def test_a_row_of_this_step_is_not_preempted_in_it() -> None:
    world = World(make_config(max_num_batched_tokens=8), make_cache(6, caching=False))
    for name in "ab":
        world.add(make_request(name, [1, 2], max_tokens=9))
    world.step()
    (long,) = world.add(make_request("long", [3] * 10, items=(item(3, 10),)))
    world.step()
    world.step()
    plan = world.launch()
    assert plan is not None
    assert long.seq_id in [row.seq_id for row in plan.rows], "its item had to wait: it goes first"
    assert long.status is Status.RUNNING
    world.collect()
    world.run()
    world.assert_right()


def test_a_preempted_sequence_waits_for_its_tokens_in_flight() -> None:
    world = World(make_config(pipeline_depth=2), make_cache(caching=False))
    (seq,) = world.add(make_request("a", PROMPT, max_tokens=9))
    world.launch()
    world.launch()
    assert seq.num_placeholders == 2
    world.scheduler._preempt(seq)
    world.collect()
    assert seq.status is Status.PREEMPTED
    assert world.launch() is None, "one token is still unknown"
    world.collect()
    plan = world.launch()
    assert plan is not None
    assert len(plan.new[0].token_ids) == len(PROMPT) + 2, "tokens sampled before count"
    world.run()
    world.assert_right()


def test_a_sequence_stopped_while_preempted_does_not_come_back() -> None:
    world = World(make_config(pipeline_depth=2), make_cache())
    (seq,) = world.add(make_request("a", PROMPT, max_tokens=1))
    world.launch()
    world.scheduler._preempt(seq)
    (update,) = world.collect()
    assert (update.finish_reason, seq.finished) == ("length", True)
    world.assert_right()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_too_big_for_the_cache_fails_alone(depth: int) -> None:
    world = World(make_config(pipeline_depth=depth), make_cache(5))
    (big,) = world.add(make_request("big", [1] * 12, max_tokens=40))
    world.add(make_request("small", [2] * 4, max_tokens=9))
    world.run()
    outcome = world.outcomes[big.seq_id]
    assert outcome.reason == "error"
    assert "17 tokens need 5 KV blocks of 4 tokens in the cache group 'full', which has 4" in str(outcome.error)
    world.assert_right()


def test_a_preempted_sequence_too_big_for_the_cache_fails() -> None:
    world = World(make_config(pipeline_depth=2), make_cache(3))
    (seq,) = world.add(make_request("a", [1] * 7, max_tokens=40))
    while len(seq.token_ids) + seq.num_placeholders < 9:
        world.launch()
        if len(world.launched) == 2:
            world.collect()
    world.scheduler._preempt(seq)
    world.run()
    assert world.outcomes[seq.seq_id].reason == "error"
    world.assert_right()


# ---------------------------------------------------------------------- pipeline


def test_a_late_stop_is_cut_back() -> None:
    request = next(
        r
        for seed in range(100)
        if len(expected_outputs(r := make_request("a", PROMPT, 9, seed=seed, eos_token_ids=[EOS], ignore_eos=False), 0, 64)[0])
        == 3
    )
    world = World(make_config(pipeline_depth=3), make_cache())
    (seq,) = world.add(request)
    world.run()
    assert (len(seq.token_ids[seq.num_prompt :]), seq.finish_reason) == (3, "stop")
    assert sum(isinstance(event, bytes) for event in world.recording) == 5, "two steps too many were launched"
    world.assert_right()


def test_no_step_is_launched_beyond_max_tokens() -> None:
    world = World(make_config(pipeline_depth=3), make_cache())
    world.add(make_request("a", PROMPT, max_tokens=4))
    world.run()
    assert sum(isinstance(event, bytes) for event in world.recording) == 4


def test_the_context_ends_a_sequence() -> None:
    world = World(make_config(max_model_len=16, pipeline_depth=2), make_cache())
    (seq,) = world.add(make_request("a", PROMPT, max_tokens=50))
    world.run()
    assert (len(seq.token_ids), seq.finish_reason) == (16, "length")
    world.assert_right()


def test_results_must_come_in_order() -> None:
    world = World(make_config(pipeline_depth=2), make_cache())
    world.add(make_request("a", PROMPT))
    first, second = world.launch(), world.launch()
    assert first is not None and second is not None
    with pytest.raises(EngineError, match="oldest step in flight is 1"):
        world.scheduler.update(second, StepResult(second.step, [], []))
    assert world.launch() is None, "the pipeline is full"


def test_a_row_without_its_token_fails_its_sequence_alone() -> None:
    world = World(make_config(), make_cache())
    bad, good = (world.add(make_request(name, PROMPT[:4]))[0] for name in "ab")
    plan = world.launch()
    assert plan is not None
    updates = world.scheduler.update(plan, StepResult(plan.step, [good.seq_id], [[5]]))
    assert [(u.seq, u.finish_reason) for u in updates] == [(bad, "error"), (good, None)]
    assert "no token" in str(updates[0].error)
    world.scheduler.check_integrity()


def test_a_result_of_several_tokens_is_cut_at_the_stop() -> None:
    world = World(make_config(), make_cache())
    (seq,) = world.add(make_request("a", PROMPT[:4], max_tokens=9, stop_token_ids=[8]))
    plan = world.launch()
    assert plan is not None
    (update,) = world.scheduler.update(plan, StepResult(plan.step, [seq.seq_id], [[5, 8, 9]]))
    assert (update.token_ids, update.finish_reason, update.stop_reason) == ([5, 8], "stop", 8)
    assert seq.token_ids[seq.num_prompt :] == [5, 8]


# ---------------------------------------------------------------------- aborts, errors, ends by the host


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_step_frees_every_block_within_a_step(depth: int, steps: int) -> None:
    world = World(make_config(pipeline_depth=depth, max_num_batched_tokens=4), make_cache(windows=(None, 5)))
    world.add(make_request("a", PROMPT, max_tokens=9, n=2))
    for _ in range(steps):
        world.launch()
        if len(world.launched) == depth:
            world.collect()
    ended = world.abort("a")
    assert {seq.finish_reason for seq in ended} == {"abort"}
    assert world.scheduler.kv.num_used == world.scheduler.kv.num_pending
    while world.launched:
        world.collect()
    assert world.scheduler.kv.num_used == 0
    assert not world.scheduler.has_work()
    assert world.abort("a") == []
    world.assert_right()


def test_a_failing_row_takes_nobody_along() -> None:
    world = World(make_config(pipeline_depth=2), make_cache())
    (bad,) = world.add(make_request("bad", PROMPT, max_tokens=9))
    world.add(make_request("good", PROMPT, max_tokens=9))
    world.errors[bad.seq_id] = 12
    world.run()
    assert world.outcomes[bad.seq_id].error == Failure("injected")
    world.assert_right()


def test_a_failed_row_leaves_no_kv_to_others() -> None:
    world = World(make_config(), make_cache())
    (bad,) = world.add(make_request("bad", PROMPT[:8]))
    world.errors[bad.seq_id] = 8
    world.run()
    (seq,) = world.add(make_request("next", PROMPT))
    world.run()
    assert seq.num_cached_tokens == 0
    world.assert_right()


def test_ending_twice_does_nothing() -> None:
    world = World(make_config(), make_cache())
    (seq,) = world.add(make_request("a", PROMPT))
    world.step()
    world.scheduler.finish(seq, "stop", "END")
    world.scheduler.finish(seq, "abort")
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "END")
    assert world.scheduler.stats().finished == {"stop": 1}


# ---------------------------------------------------------------------- prefix cache


def test_a_hit_is_counted_and_reported() -> None:
    world = World(make_config(), make_cache())
    for name in "ab":
        (seq,) = world.add(make_request(name, PROMPT, max_tokens=2))
        world.run()
    assert seq.num_cached_tokens == 8
    stats = world.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)
    assert (stats.prompt_tokens, stats.computed_prompt_tokens, stats.generation_tokens) == (20, 12, 4)
    world.assert_right()


def test_a_full_hit_recomputes_the_last_token() -> None:
    world = World(make_config(), make_cache())
    for name in "ab":
        (seq,) = world.add(make_request(name, PROMPT[:8], max_tokens=2))
        world.run()
    assert seq.num_cached_tokens == 4
    world.assert_right()


def test_generated_tokens_can_be_hit_too() -> None:
    world = World(make_config(), make_cache())
    (seq,) = world.add(make_request("a", PROMPT, max_tokens=7))
    world.run()
    (follow_up,) = world.add(make_request("b", [*seq.token_ids, 5], max_tokens=3))
    world.run()
    assert follow_up.num_cached_tokens == 16
    world.assert_right()


def test_prompt_logprobs_take_no_hits_and_come_once() -> None:
    world = World(make_config(max_num_batched_tokens=4), make_cache())
    world.add(make_request("a", PROMPT))
    world.run()
    request = make_request("b", PROMPT, prompt_logprobs=0, n=2)
    first, second = world.add(request)
    updates = []
    while world.scheduler.has_work():
        updates += world.step()
    assert [u.seq for u in updates if u.prompt_logprobs is not None] == [first]
    assert world.outcomes[first.seq_id].prompt_logprobs == expected_prompt_logprobs(request)
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert world.scheduler.stats().prefix_query_tokens == 10
    world.assert_right()


def test_prompt_logprobs_survive_preemption_at_any_step() -> None:
    for steps in range(5):
        world = World(make_config(max_num_batched_tokens=4), make_cache())
        (seq,) = world.add(make_request("a", PROMPT, prompt_logprobs=0, max_tokens=5))
        for _ in range(steps):
            world.step()
        if seq.status is Status.RUNNING:
            world.scheduler._preempt(seq)
        world.run()
        world.assert_right()


def test_a_prompt_of_one_token_has_no_prompt_logprobs_to_give() -> None:
    world = World(make_config(), make_cache())
    (seq,) = world.add(make_request("a", [5], prompt_logprobs=0))
    world.run()
    assert world.outcomes[seq.seq_id].prompt_logprobs == []


def test_new_weights_share_nothing_with_old() -> None:
    world = World(make_config(), make_cache())
    world.add(make_request("a", PROMPT))
    world.run()
    assert world.scheduler.kv.bump_weight_version() == 1
    world.runner.weights = 1
    (seq,) = world.add(make_request("b", PROMPT))
    world.run()
    assert seq.num_cached_tokens == 0
    assert seq.token_ids[seq.num_prompt :] == expected_outputs(seq.request, 0, 64, weights=1)[0]


def test_reset_prefix_cache() -> None:
    world = World(make_config(), make_cache())
    world.add(make_request("a", PROMPT))
    world.run()
    assert world.scheduler.kv.reset_prefix_cache()
    (seq,) = world.add(make_request("b", PROMPT))
    world.run()
    assert seq.num_cached_tokens == 0
    assert not World(make_config(), make_cache(caching=False)).scheduler.kv.reset_prefix_cache()


# ---------------------------------------------------------------------- books


def test_times_are_kept_for_each_sequence() -> None:
    world = World(make_config(max_num_seqs=1), make_cache())
    first, second = (world.add(make_request(name, PROMPT, max_tokens=3, arrival_time=-2.0))[0] for name in "ab")
    world.run()
    assert first.times == type(first.times)(-2.0, 0.0, 1.0, 3.0)
    assert second.times == type(second.times)(-2.0, 3.0, 4.0, 6.0, "slots")


def test_stats_tell_what_is_so() -> None:
    world = World(make_config(max_num_seqs=1), make_cache())
    world.add(make_request("a", PROMPT, max_tokens=3, n=2))
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 2, 0)
    world.step()
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (1, 1, 3)
    assert (stats.step, stats.kv_blocks_total) == (1, 63)
    world.run()
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.finished == {"length": 2}


def test_nothing_to_do_is_no_plan() -> None:
    world = World(make_config(), make_cache())
    assert world.launch() is None
    assert not world.scheduler.has_work()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_row_may_keep_fewer_tokens_than_it_has_logits_rows(kept: int) -> None:
    """Plans for tokens that were not kept are taken back, and the next row begins behind those that were."""
    world = World(make_config(decode_tokens=3), make_cache())
    (seq,) = world.add(make_request("r", [1, 2, 3, 4, 5, 6, 7], max_tokens=20))
    world.step()
    with pytest.raises(EngineError, match=r"3 drafts for .*; decode rows have at most 3 tokens"):
        world.scheduler.propose(seq, (9, 8, 7))
    world.scheduler.propose(seq, (9, 8))
    plan = world.scheduler.schedule()
    assert plan is not None
    (row,) = plan.rows
    assert (row.num_tokens, row.num_logits, row.drafts, plan.num_decode_rows) == (3, 3, (9, 8), 1)
    assert seq.num_placeholders == 3
    with pytest.raises(EngineError, match="its last token is not known"):
        world.scheduler.propose(seq, (9,))
    blocks = [list(table) for table in seq.blocks.tables]
    known = len(seq.token_ids)
    (update,) = world.scheduler.update(plan, StepResult(plan.step, [seq.seq_id], [[9, 8, 7][:kept]]))
    assert update.token_ids == [9, 8, 7][:kept] and seq.num_placeholders == 0
    assert seq.num_computed == seq.num_collected == len(seq.token_ids) - 1 == known + kept - 1
    following = world.scheduler.schedule()
    assert following is not None and following.rows[0].num_computed == known + kept - 1
    assert [table[: len(before)] for table, before in zip(seq.blocks.tables, blocks, strict=True)] == blocks
    world.scheduler.check_integrity()


def test_drafts_take_no_token_from_decoding_sequences_behind_and_end_with_the_longest_sequence() -> None:
    world = World(make_config(decode_tokens=6, max_num_batched_tokens=7), make_cache())
    for name in "abc":
        world.add_unchecked(make_request(name, [1, 2], max_tokens=9))
    while any(seq.num_outputs == 0 for seq in world.sequences):
        world.scheduler.update(plan := world.scheduler.schedule(), answer(plan))
    for seq in world.sequences:
        world.scheduler.propose(seq, (9,) * 5)
    plan = world.scheduler.schedule()
    assert [row.num_tokens for row in plan.rows] == [5, 1, 1]
    world.scheduler.update(plan, StepResult(plan.step, [0, 1, 2], [[9] * 5, [9], [9]]))
    first = world.sequences[0]
    left = first.max_len - len(first.token_ids)
    world.scheduler.propose(first, (9,) * 5)
    assert world.scheduler.schedule().rows[0].num_tokens == min(left, 5)


def test_the_next_row_waits_until_drafts_are_verified() -> None:
    world = World(make_config(decode_tokens=3, pipeline_depth=2), make_cache())
    first, second = (world.add_unchecked(make_request(name, [1, 2], max_tokens=9))[0] for name in "ab")
    world.scheduler.update(plan := world.scheduler.schedule(), answer(plan))
    world.scheduler.propose(first, (5, 6))
    verifying, beside = world.scheduler.schedule(), world.scheduler.schedule()
    assert verifying is not None and [row.num_tokens for row in verifying.rows] == [3, 1]
    assert beside is None, "the second waits too, since it may be the next to have drafts"
    (third,) = world.add_unchecked(make_request("c", [1, 2], max_tokens=9))
    beside = world.scheduler.schedule()
    assert beside is not None and [row.seq_id for row in beside.rows] == [third.seq_id]
    world.scheduler.update(verifying, StepResult(verifying.step, [0, 1], [[5], [7]]))
    assert first.num_computed == len(first.token_ids) - 1
    world.scheduler.propose(second, (8,))
    following = world.scheduler.schedule()
    assert following is not None
    assert [(row.seq_id, row.num_computed, row.drafts) for row in following.rows] == [(0, 3, ()), (1, 3, (8,))]


def answer(plan: StepPlan) -> StepResult:
    sampled = [row.seq_id for row in plan.rows if row.num_logits]
    return StepResult(plan.step, sampled, [[7]] * len(sampled))


def test_a_row_continues_if_only_its_token_can_end_the_sequence() -> None:
    world = World(make_config(max_num_seqs=6, max_num_batched_tokens=64, decode_tokens=3), make_cache())
    plain, at_its_end, drafting = (
        world.add_unchecked(make_request(name, [1, 2, 3], max_tokens))[0]
        for name, max_tokens in (("plain", 9), ("at its end", 2), ("drafting", 9))
    )
    (constrained,) = world.add_unchecked(make_request("constrained", [1, 2, 3], 9, constraint=Constraint("regex", "a*")))
    constrained.matcher = object()
    world.launch()
    assert not world.scheduler._in_flight[0].continuing, "prompts are others"
    constrained.matcher = None
    world.collect()
    (single,) = world.add_unchecked(make_request("a prompt of one token", [1], 9))
    world.scheduler.propose(drafting, (5, 6))
    plan = world.scheduler.schedule()
    assert plan is not None and len(plan.rows) == 5
    step = world.scheduler._in_flight[0]
    assert list(step.continuing) == [plain.seq_id]
    assert sorted(step.others) == [seq.seq_id for seq in (at_its_end, drafting, constrained, single)]
