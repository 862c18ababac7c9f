"""Plans that break the contract are refused with what is wrong; those that keep it are done, the empty one included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runner.harness import BLOCK, EOS, MAX_LEN, VOCAB, World, model, prompt, request, serve
from support.runner.plans import blocks_for, new, plan, row

from headrace.core.plan import NewSequence, Row, SamplePlan, StepPlan, StepResult, pack_tokens
from headrace.errors import ConfigError, EngineError
from headrace.runner.part import StepHandle
from headrace.runner.runner import BROKEN, ModelRunner

PROMPT = prompt(1, 6)


@pytest.fixture
def runner() -> ModelRunner:
    """Slot 0 holds sequence 10, prefilled and one step on; slot 1 sequence 11, of whose prompt 4 tokens are computed."""
    made = World(max_num_seqs=4, num_blocks=60).runner()
    first = plan(
        row(10, 0, 0, 6, [1, 2]),
        row(11, 1, 0, 4, [3], logits=0),
        new=[new(10, 0, PROMPT), new(11, 1, prompt(2, 9))],
    )
    assert done(made, first).seq_ids == [10]
    return made


def done(runner: ModelRunner, step: StepPlan) -> StepResult:
    return runner.collect(launched(runner, step))


def launched(runner: ModelRunner, step: StepPlan) -> StepHandle:
    handle = runner.execute(step)
    runner.sample(handle, SamplePlan(step.step))
    return handle


GOOD = (row(10, 0, 6, 1), row(11, 1, 4, 5, [4, 5]))


def test_the_good_plan_is_good(runner: ModelRunner) -> None:
    result = done(runner, plan(*GOOD, decode=1))
    assert result.seq_ids == [10, 11] and all(len(tokens) == 1 for tokens in result.token_ids)
    assert result.forward_seconds > 0 and result.sample_seconds > 0


@pytest.mark.parametrize(
    ("rows", "decode", "complaint"),
    [
        ((row(10, 0, 6, 1), row(11, 1, 4, 5, [4, 5])), 2, "out of order"),
        ((row(11, 1, 4, 5, [4, 5]), row(10, 0, 6, 1)), 1, "out of order"),
        ((row(10, 0, 6, 1),), 0, "out of order"),
        ((row(10, 0, 5, 1),), 1, "does not start at its num_computed, 6"),
        ((row(10, 0, 7, 1),), 1, "does not start at its num_computed, 6"),
        ((row(10, 0, 6, 2),), 1, "is not of its tokens, of which there are 7"),
        ((row(10, 0, 6, 0),), 1, "is not of its tokens"),
        ((row(10, 0, 6, 1, logits=0),), 1, "must sample if and only if it ends at token 7"),
        ((row(11, 1, 4, 3, [4]),), 0, "must sample if and only if it ends at token 9"),
        ((row(11, 0, 6, 1),), 1, "is in a slot that holds sequence 10"),
        ((row(10, 2, 6, 1),), 1, "is in a slot that holds sequence -1"),
        ((row(10, 9, 6, 1),), 1, "slot that does not exist"),
        ((row(10, -1, 6, 1),), 1, "slot that does not exist"),
        ((row(10, 0, 6, 1), row(10, 0, 6, 1)), 2, "two rows for one slot"),
        ((row(11, 1, 4, 5, [4]),), 0, "too few blocks in group 0: they hold 8"),
        ((row(11, 1, 4, 5, [4, 60]),), 0, "group 0, which has 60"),
        ((row(11, 1, 4, 5, [4, -1]),), 0, "group 0, which has 60"),
        ((row(11, 1, 4, 5, range(4, 4 + MAX_LEN // BLOCK)),), 0, "24 fit"),
        ((row(11, 1, 4, 5, [4, 5], groups=2),), 0, "blocks for 2 cache groups, not 1"),
    ],
)
def test_broken_rows_are_named(runner: ModelRunner, rows: tuple[Row, ...], decode: int, complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        runner.execute(plan(*rows, decode=decode))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"new": [new(12, 0, PROMPT)]}, "slot 0, which sequence 10 holds"),
        ({"new": [new(12, 4, PROMPT)]}, "slot 4 of 4"),
        ({"new": [new(12, 2, [])]}, "has 0 tokens"),
        ({"new": [new(12, 2, PROMPT * 20)]}, "at most 96 fit"),
        ({"new": [new(12, 2, PROMPT, 7)]}, "7 of them its prompt"),
        ({"released": [3]}, "releases slot 3, which holds no sequence"),
        ({"released": [7]}, "releases slot 7"),
        ({"released": [0, 0]}, "releases slot 0"),
    ],
)
def test_broken_slots_are_named(runner: ModelRunner, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        runner.execute(plan(**changes))


def test_the_empty_plan(runner: ModelRunner) -> None:
    before = done(runner, plan(step=7))
    assert before == StepResult(7, [], [])
    result = done(runner, plan(released=[0, 1]))
    assert result.seq_ids == [] and runner.slots.idle


def test_a_slot_may_change_hands_within_a_plan(runner: ModelRunner) -> None:
    tokens = prompt(8, 3)
    found = done(runner, plan(row(12, 0, 0, 3, [9]), released=[0], new=[new(12, 0, tokens)])).token_ids
    fresh = World(max_num_seqs=4, num_blocks=60).runner()
    assert found == done(fresh, plan(row(12, 0, 0, 3, [9]), new=[new(12, 0, tokens)])).token_ids
    table = runner.slots.block_tables[0].tensor[0]
    assert table[0] == 9 and not table[1:].any()


def test_results_are_tagged_with_their_own_step(runner: ModelRunner) -> None:
    """Two steps in flight, of different rows; they may even be read in the wrong order."""
    first = launched(runner, plan(*GOOD, decode=1, step=5))
    second = launched(runner, plan(row(11, 1, 9, 1), row(10, 0, 7, 1), decode=2, step=6))
    later, earlier = runner.collect(second), runner.collect(first)
    assert (earlier.step, earlier.seq_ids) == (5, [10, 11])
    assert (later.step, later.seq_ids) == (6, [11, 10])


def test_the_next_step_takes_the_token_from_the_device(runner: ModelRunner) -> None:
    """The host has not read it yet."""
    first = launched(runner, plan(row(10, 0, 6, 1), decode=1))
    following = launched(runner, plan(row(10, 0, 7, 1), decode=1))
    tokens = [runner.collect(step).token_ids[0][0] for step in (first, following)]
    known = runner.slots.token_ids.tensor[0, :9].tolist()
    assert known[:6] == PROMPT and known[7:] == tokens


def test_a_cached_prefix_starts_where_the_first_row_says(runner: ModelRunner) -> None:
    """Sequence 12 shares sequence 10's first block, and computes the same."""
    reference = World(max_num_seqs=4, num_blocks=60).runner()
    expected = done(reference, plan(row(12, 2, 0, 6, [9, 10]), new=[new(12, 2, PROMPT)])).token_ids
    found = done(runner, plan(row(12, 2, 4, 2, [1, 10]), new=[new(12, 2, PROMPT)])).token_ids
    assert found == expected


def test_a_token_the_model_lacks_fails_its_sequence_alone(runner: ModelRunner) -> None:
    bad = NewSequence(12, 2, pack_tokens([5, VOCAB]), 2, new(0, 0, [0]).sampling, 0, 0, [], None)
    result = done(runner, plan(row(10, 0, 6, 1), row(12, 2, 0, 2, [9]), new=[bad], decode=1))
    assert result.seq_ids == [10, 12] and result.token_ids[1] == [] and len(result.token_ids[0]) == 1
    assert "outside the vocabulary of 160" in result.errors[12].message
    again = done(runner, plan(row(13, 2, 0, 2, [9]), released=[2], new=[new(13, 2, [5, 6])]))
    assert again.errors == {} and len(again.token_ids[0]) == 1


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": [VOCAB + 5]}], ids=["logit_bias", "allowed_token_ids"]
)
def test_what_cannot_be_sampled_fails_its_sequence_alone(runner: ModelRunner, sampling: dict[str, Any]) -> None:
    result = done(
        runner, plan(row(10, 0, 6, 1), row(12, 2, 0, 1, [9]), new=[new(12, 2, [5], **sampling, prompt_logprobs=1)], decode=1)
    )
    assert next(iter(sampling)) in result.errors[12].message and result.errors[12].client and len(result.token_ids[0]) == 1


def test_a_chunk_that_breaks_down_is_told_at_once(runner: ModelRunner) -> None:
    """Though it draws nothing: what it wrote must not be shared."""
    weight = model("llama").embed_tokens.weight
    whole = weight.data[150].clone()
    weight.data[150] = torch.nan
    try:
        tokens = [150, *prompt(4, 7)]
        result = done(runner, plan(row(10, 0, 6, 1), row(12, 2, 0, 4, [9], logits=0), new=[new(12, 2, tokens)], decode=1))
    finally:
        weight.data[150] = whole
    assert result.seq_ids == [10] and result.errors == {12: BROKEN} and len(result.token_ids[0]) == 1


def test_prompt_logprobs_come_chunk_by_chunk(runner: ModelRunner) -> None:
    tokens = prompt(5, 8)
    first = done(
        runner,
        plan(row(12, 2, 0, 4, [9], logits=0), new=[new(12, 2, [*tokens, 7, 8], 8, prompt_logprobs=1)]),
    )
    second = done(runner, plan(row(12, 2, 4, 6, [10, 11])))
    entries = first.prompt_logprobs[12] + second.prompt_logprobs[12]
    assert [entry.token_ids[0] for entry in entries] == tokens[1:]
    assert len(first.prompt_logprobs[12]) == 4


def test_prompt_logprobs_are_not_those_of_the_slot_s_last_sequence(runner: ModelRunner) -> None:
    tokens = prompt(5, 8)
    first = done(runner, plan(row(12, 2, 0, 8, [9, 10]), new=[new(12, 2, tokens, prompt_logprobs=1)]))
    assert len(first.prompt_logprobs[12]) == 7
    second = done(runner, plan(row(13, 2, 0, 8, [9, 10]), released=[2], new=[new(13, 2, tokens)]))
    assert second.prompt_logprobs == {} and second.token_ids == first.token_ids


def test_memory_is_what_is_held(runner: ModelRunner) -> None:
    memory = dict(runner.memory())
    layers = runner.config.model.layers
    assert memory["KV cache"] == 60 * BLOCK * sum(layer.k_size + layer.v_size for layer in layers) * 4
    assert memory["penalty histograms"] == 0 and memory["slots"] > 4 * MAX_LEN * 4


def test_an_unknown_backend_or_a_wrong_dtype_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match="no attention backend 'fast'"):
        World(backend="fast").runner()


def test_prompt_logits_exist_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model("llama")
    seen: list[int] = []
    whole = decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return whole(hidden)

    monkeypatch.setattr(decoder, "logits", logits)
    monkeypatch.setattr("headrace.runner.prompts._LOGITS_BYTES", 4 * VOCAB * 10)
    (outcome,) = serve(World(), [request("r", prompt(3, 33), prompt_logprobs=0, max_tokens=1, eos=[EOS])])["r"]
    assert seen == [10, 10, 10, 2, 1] and len(outcome.prompt_logprobs or []) == 32


def test_blocks_cover_their_tokens() -> None:
    assert blocks_for(1) == [1] and blocks_for(BLOCK + 1, 5) == [5, 6]
