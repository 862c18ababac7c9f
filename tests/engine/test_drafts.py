"""Rows with drafts give the tokens that rows without drafts give, with and without constraints.

The proposer knows what the sequences say, and errs on purpose. A draft counts as right if the sampler samples the same token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support.constrained import Engine, constrained
from support.runner.harness import VOCAB, World, prompt, request

from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.sequence import Sequence, Status
from headrace.runner.runner import ModelRunner
from headrace.sampling.feature import LogitsRows
from headrace.sampling.sampler import Sampled

WORLD = World(max_num_seqs=8, num_blocks=90)
REQUESTS = [
    constrained("regex"),
    constrained("schema", 1),
    request("free", prompt(5, 7), temperature=1.0, max_tokens=25, ignore_eos=True),
    request("greedy", prompt(6, 11), max_tokens=24, ignore_eos=True),
]


class Proposer:
    """Proposes before each step, for all sequences whose tokens are known: right drafts and then a wrong one, or none."""

    def __init__(self, engine: Engine, expected: dict[tuple[str, int], list[int]], count: int, *, drains: bool) -> None:
        self._scheduler, self._expected, self._count = engine.core.scheduler, expected, count
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._next  # type: ignore[method-assign]
        self._add = self._scheduler.add
        self._sequences: list[Sequence] = []
        self._scheduler.add = self._added  # type: ignore[method-assign]
        self._drains = drains
        """Whether every third plan waits until all steps are collected: else a deep pipeline always has tokens in flight."""
        self.plans: list[StepPlan] = []

    def _added(self, request: Request) -> list[Sequence]:
        sequences = self._add(request)
        self._sequences += sequences
        return sequences

    def _next(self) -> StepPlan | None:
        if self._drains and len(self.plans) % 3 == 0 and self._scheduler._in_flight:
            return None
        for seq in self._sequences:
            if seq.status is Status.RUNNING and seq.decoding and not seq.num_placeholders:
                self._scheduler.propose(seq, self._drafts(seq))
        plan = self._schedule()
        self.plans += [] if plan is None else [plan]
        return plan

    def _drafts(self, seq: Sequence) -> tuple[int, ...]:
        right = self._expected[seq.request.request_id, seq.index][seq.num_outputs :]
        drafts = right[: (seq.num_outputs + seq.seq_id) % (self._count + 1)]
        return (*drafts, (right[len(drafts)] + 1) % VOCAB)[: self._count] if len(drafts) < len(right) else tuple(drafts)


def verifying(runner: ModelRunner) -> list[int]:
    """Lets the sampler keep drafts up to the first that it samples otherwise. Returns how many each row keeps."""
    sample, kept = runner.sampler.sample, []

    def verified(logits: torch.Tensor, rows: LogitsRows, masks: Any = None) -> Sampled:
        sampled = sample(logits, rows, masks)
        # The token behind a logits row is the draft, where the row has one more.
        behind = runner.slots.token_ids.tensor[rows.slots_device, rows.positions].numpy()
        right = sampled.tokens.numpy() == behind
        counts = [1 + int(np.cumprod(right[rows.row == row][:-1]).sum()) for row in np.unique(rows.row)]
        kept.extend(counts)
        return dataclasses.replace(sampled, counts=torch.tensor(counts))

    runner.sampler.sample = verified  # type: ignore[method-assign]
    return kept


def served(world: World) -> Engine:
    engine = Engine(world)
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    return engine.run()


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (1, 3), (2, 3)])
def test_drafts_change_no_tokens(depth: int, count: int) -> None:
    expected = served(WORLD)
    engine = Engine(dataclasses.replace(WORLD, depth=depth, decode_tokens=1 + count))
    proposer, kept = Proposer(engine, expected.tokens, count, drains=depth > 1), verifying(engine.runner)
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    engine.run()
    assert (engine.tokens, engine.finish, engine.errors) == (expected.tokens, expected.finish, expected.errors)
    asked = [row.num_logits for plan in proposer.plans for row in plan.rows if row.num_logits]
    accepted = sum(kept) - len(kept)
    assert len(kept) == len(asked) and 0 < accepted < sum(asked) - len(asked), "some drafts are right, and some wrong"
    assert max(asked) == 1 + count
    engine.core.check_integrity()
    assert engine.core.stats().kv_blocks_used == 0


def test_a_draft_that_the_constraint_refuses_is_replaced() -> None:
    """Every draft is wrong: a mask of its place does not allow it, and what is behind it counts for nothing."""
    expected = served(WORLD)
    engine = Engine(dataclasses.replace(WORLD, decode_tokens=4))
    proposer, kept = Proposer(engine, expected.tokens, 3, drains=False), verifying(engine.runner)
    proposer._drafts = lambda seq: (0, 0, 0)  # type: ignore[method-assign]
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    assert engine.run().tokens == expected.tokens
    assert set(kept) == {1}
