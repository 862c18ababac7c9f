"""A step in two phases: rows that keep fewer tokens than they have logits rows, and masks that arrive between the phases."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runner.harness import VOCAB, World, prompt
from support.runner.plans import blocks_for, masked, new, plan, row

from headrace.core.plan import SamplePlan, StepPlan, StepResult
from headrace.errors import EngineError
from headrace.runner.replay import read_plans, replay
from headrace.runner.runner import ModelRunner
from headrace.sampling.feature import LogitsRows
from headrace.sampling.sampler import NOTHING_ALLOWED, Sampled

WORLD = World(max_num_seqs=8, num_blocks=90)
PROMPTS = {10: prompt(1, 6), 11: prompt(2, 9)}
BLOCKS = {10: blocks_for(40), 11: blocks_for(40, 11)}


def done(runner: ModelRunner, step: StepPlan, masks: SamplePlan | None = None) -> StepResult:
    handle = runner.execute(step)
    runner.sample(handle, SamplePlan(step.step) if masks is None else masks)
    return runner.collect(handle)


def prefilled(runner: ModelRunner, **sampling: Any) -> dict[int, list[int]]:
    """Two sequences whose prompts are computed; their tokens, with the first output."""
    rows = [row(seq, slot, 0, len(PROMPTS[seq]), BLOCKS[seq]) for slot, seq in enumerate(PROMPTS)]
    news = [new(seq, slot, PROMPTS[seq], **sampling) for slot, seq in enumerate(PROMPTS)]
    found = done(runner, plan(*rows, new=news))
    return {seq: PROMPTS[seq] + own for seq, own in zip(found.seq_ids, found.token_ids, strict=True)}


@torch.inference_mode()
def propose(runner: ModelRunner, slot: int, length: int, drafts: list[int]) -> None:
    """Puts drafts behind the slot's tokens."""
    runner.slots.token_ids.tensor[slot, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)


def decoded(count: int, **sampling: Any) -> dict[int, list[int]]:
    """Token by token."""
    runner = WORLD.runner()
    known = prefilled(runner, **sampling)
    for _ in range(count):
        rows = [row(seq, slot, len(known[seq]) - 1, 1) for slot, seq in enumerate(known)]
        for seq, own in zip(known, done(runner, plan(*rows, decode=2)).token_ids, strict=True):
            known[seq] += own
    return known


class Verdict:
    """Stands for the sampler: samples as it does, and keeps the given number of tokens of each row."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] | None = None
        self._sample = runner.sampler.sample
        monkeypatch.setattr(runner.sampler, "sample", self)

    def __call__(self, logits: torch.Tensor, rows: LogitsRows, masks: Any = None) -> Sampled:
        bounds = rows.num_outputs + self.prompts(rows)
        assert (np.diff(rows.row) >= 0).all() and (bounds >= rows.positions.numpy()).all()
        sampled = self._sample(logits, rows, masks)
        return sampled if self.counts is None else dataclasses.replace(sampled, counts=torch.tensor(self.counts))

    def prompts(self, rows: LogitsRows) -> np.ndarray:
        return np.array([len(list(PROMPTS.values())[slot]) for slot in rows.slots.tolist()])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kept", [(1, 2), (2, 1), (3, 3), (0, 2), (1, 1)])
def test_rows_that_keep_fewer_tokens(kept: tuple[int, int], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are right up to what is kept, and wrong behind; what comes after is as if tokens had come one by one."""
    expected = decoded(9, **sampling)
    runner = WORLD.runner()
    known, verdict = prefilled(runner, **sampling), Verdict(runner, monkeypatch)
    for _ in range(2):
        rows = []
        for slot, (seq, own) in enumerate(known.items()):
            length = len(own)
            right = expected[seq][length : length + max(kept[slot] - 1, 0)]
            drafts = [*right, (expected[seq][length + len(right)] + 1) % VOCAB, 7][:2]
            propose(runner, slot, length, drafts)
            rows.append(row(seq, slot, length - 1, 3, logits=3))
        verdict.counts = list(kept)
        found = done(runner, plan(*rows, decode=2))
        assert [len(own) for own in found.token_ids] == list(kept)
        for seq, own in zip(found.seq_ids, found.token_ids, strict=True):
            known[seq] += own
            assert known[seq] == expected[seq][: len(known[seq])]
        verdict.counts = None
        for slot, own in enumerate(known.values()):
            assert runner.slots.num_tokens[slot] == runner.slots.host_num_tokens[slot] == len(own)
            assert runner.slots.num_computed[slot] == runner.slots.host_num_computed[slot] == len(own) - 1
            assert runner.slots.token_ids.tensor[slot, : len(own)].tolist() == own
            assert runner.slots.block_tables[0].tensor[slot, :10].tolist() == BLOCKS[10 + slot]
        rows = [row(seq, slot, len(own) - 1, 1) for slot, (seq, own) in enumerate(known.items())]
        for seq, own in zip(known, done(runner, plan(*rows, decode=2)).token_ids, strict=True):
            known[seq] += own
            assert known[seq] == expected[seq][: len(known[seq])]


def test_plans_ahead_of_the_verdict_are_upper_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in flight starts where the one before it may end; live, and replayed one after the other."""
    expected = decoded(6)
    for pipelined in (True, False):
        runner = dataclasses.replace(WORLD, depth=2).runner()
        known, verdict = prefilled(runner), Verdict(runner, monkeypatch)
        length = len(known[10])
        propose(runner, 0, length, [expected[10][length], (expected[10][length + 1] + 1) % VOCAB])
        verdict.counts = [2]
        first = runner.execute(plan(row(10, 0, length - 1, 3, logits=3), decode=1))
        runner.sample(first, SamplePlan(1))
        results = [] if pipelined else [runner.collect(first)]
        verdict.counts = None
        # As if all three had been kept: two tokens are computed already, and the third is the next one's first.
        second = runner.execute(plan(row(10, 0, length + 2, 1), decode=1))
        runner.sample(second, SamplePlan(1))
        results += [runner.collect(step) for step in ([first, second] if pipelined else [second])]
        tokens = known[10] + [token for result in results for token in result.token_ids[0]]
        assert tokens == expected[10][: length + 3]
        assert runner.slots.host_num_tokens[0] == runner.slots.num_tokens[0] == len(tokens)
        third = done(runner, plan(row(10, 0, len(tokens) - 1, 1), decode=1))
        assert third.token_ids == [[expected[10][len(tokens)]]]
        with pytest.raises(EngineError, match="does not start at"):
            runner.execute(plan(row(10, 0, len(tokens) + 1, 1), decode=1))


@pytest.mark.parametrize("logits", [2, 3])
def test_more_logits_rows_than_tokens_are_refused(logits: int) -> None:
    runner = WORLD.runner()
    known = prefilled(runner)
    with pytest.raises(EngineError, match="is not of its tokens"):
        runner.execute(plan(row(10, 0, len(known[10]) - 1, logits - 1, logits=logits), decode=1))


def masks_of(*allowed: int) -> bytes:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.astype("<u4").tobytes()


def test_masks_arrive_between_the_phases() -> None:
    """The row without one is as it was; a row of which everything is banned fails alone."""
    free = decoded(1)
    for banned in (False, True):
        runner = WORLD.runner()
        known = prefilled(runner)
        step = plan(*[row(seq, slot, len(known[seq]) - 1, 1) for slot, seq in enumerate(known)], decode=2)
        handle = runner.execute(step)
        with pytest.raises(EngineError, match="before step 1 has been sampled"):
            runner.execute(step)
        runner.sample(handle, masked(1, {11: [masks_of() if banned else masks_of(5, 9)]}))
        result = runner.collect(handle)
        assert result.token_ids[0] == free[10][-1:]
        if banned:
            assert result.errors == {11: NOTHING_ALLOWED} and result.token_ids[1] == []
        else:
            assert result.token_ids[1][0] in (5, 9)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (masked(1, {12: [masks_of(1)]}), "has 0 logits rows"),
        (masked(1, {11: [masks_of(1), masks_of(2)]}), "has 1 logits rows"),
        (masked(1, {11: [masks_of(1)[:-4]]}), "needs 20"),
        (SamplePlan(2), "step 2 for step 1"),
    ],
)
def test_masks_that_do_not_fit_are_refused(given: SamplePlan, complaint: str) -> None:
    runner = WORLD.runner()
    known = prefilled(runner)
    handle = runner.execute(plan(row(11, 1, len(known[11]) - 1, 1), decode=1))
    with pytest.raises(EngineError, match=complaint):
        runner.sample(handle, given)


def test_masks_are_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    runner = dataclasses.replace(WORLD, record=str(path)).runner()
    known = prefilled(runner)
    tokens = []
    for number in range(4):
        step = plan(*[row(seq, slot, len(known[seq]) - 1, 1) for slot, seq in enumerate(known)], decode=2)
        masks = masked(1, {10: [masks_of(3, 4, 5)]}) if number % 2 else None
        tokens.append(done(runner, step, masks).token_ids)
        for seq, own in zip(known, tokens[-1], strict=True):
            known[seq] += own
    runner.close()
    kinds = [type(each) for each in read_plans(path)[1]]
    assert kinds == [StepPlan] * 3 + [SamplePlan] + [StepPlan] * 2 + [SamplePlan]
    assert [result.token_ids for result in replay(path, WORLD.runner())][1:] == tokens
    assert tokens[1][0][0] in (3, 4, 5)
