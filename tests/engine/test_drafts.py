"""Rows with drafts give the tokens and logprobs that rows without drafts give, whatever sequences ask of the sampler.

The proposers know what the sequences say, and err on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.constrained import Engine as ConstrainedEngine
from support.constrained import constrained
from support.runner.harness import VOCAB, Engine, Outcomes, World, prompt, request, serve, text_of

from headrace.core.plan import StepPlan
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Sequence, Status
from headrace.runner.runner import ModelRunner
from headrace.sampling.feature import LogitsRows
from headrace.sampling.sampler import NOTHING_ALLOWED, Sampled

WORLD = World(max_num_seqs=8, num_blocks=90)
CROWDED = World(max_num_seqs=9, num_blocks=60, max_num_batched_tokens=40)
REQUESTS = [
    constrained("regex"),
    constrained("schema", 1),
    request("free", prompt(5, 7), temperature=1.0, max_tokens=25, ignore_eos=True),
    request("greedy", prompt(6, 11), max_tokens=24, ignore_eos=True),
]
_LONG: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
_RANDOM: dict[str, Any] = {"temperature": 0.8} | _LONG
FEATURES = [
    request("repetition", prompt(1, 9), repetition_penalty=1.6, logprobs=2, logprobs_mode="processed", **_LONG),
    request("presence", prompt(2, 5), presence_penalty=2.0, **_LONG),
    request("frequency", prompt(3, 6), frequency_penalty=1.5, logprobs=0, **_LONG),
    request("all penalties", prompt(4, 7), repetition_penalty=0.9, presence_penalty=-1.0, frequency_penalty=1.0, **_RANDOM),
    request("bad words", prompt(5, 6), bad_words=["ab", "ca", "ddd", "bcb"], logprobs=3, logprobs_mode="processed", **_RANDOM),
    request("bad letters", prompt(6, 8), bad_words=["aa", "bb", "cc", "dd"], skip_special_tokens=False, **_LONG),
    request("min tokens", prompt(7, 4), temperature=1.0, min_tokens=13, max_tokens=30, stop_token_ids=[*range(3, 90)]),
    request("stops", prompt(8, 4), temperature=1.0, max_tokens=30, stop_token_ids=[*range(3, 20)], n=2),
    request("logprobs", prompt(9, 9), logprobs=5, prompt_logprobs=1, **_RANDOM),
    request("filters", prompt(10, 9), top_k=9, top_p=0.8, min_p=0.01, logprobs=4, logprobs_mode="processed", **_RANDOM),
    request("lists", prompt(11, 9), logit_bias={5: 3.0, 9: -2.0}, allowed_token_ids=[*range(3, 60)], **_RANDOM),
    request("mixed", prompt(12, 9), repetition_penalty=1.2, bad_words=["ba"], min_tokens=9, logprobs=2, **_RANDOM),
    request("plain", prompt(13, 9), **_RANDOM),
]
Drafts = Callable[[Sequence, list[int]], tuple[int, ...]]
"""(sequence, the tokens that it goes on with) -> drafts"""


def oracle(count: int) -> Drafts:
    return lambda seq, right: tuple(right[:count])


def adversary(count: int) -> Drafts:
    """Every first draft is wrong, those behind it would be right."""
    return lambda seq, right: tuple([(right[0] + 1 + seq.seq_id) % VOCAB, *right[1:]][:count]) if right else ()


def sometimes(count: int) -> Drafts:
    """Right drafts, then a wrong one and again right ones."""

    def drafts(seq: Sequence, right: list[int]) -> tuple[int, ...]:
        wrong = (seq.num_outputs + seq.seq_id) % (count + 1)
        return tuple((token + (place == wrong)) % VOCAB for place, token in enumerate(right[:count]))

    return drafts


class Proposer:
    """Proposes before each step, for all sequences whose tokens are known."""

    def __init__(self, scheduler: Scheduler, expected: dict[tuple[str, int], list[int]], drafts: Drafts) -> None:
        self._scheduler, self._expected, self._drafts = scheduler, expected, drafts
        self._schedule, self._add = scheduler.schedule, scheduler.add
        scheduler.schedule = self._next
        scheduler.add = self._added
        self._sequences: list[Sequence] = []
        self.plans: list[StepPlan] = []

    def _added(self, request: Request) -> list[Sequence]:
        sequences = self._add(request)
        self._sequences += sequences
        return sequences

    def _next(self) -> StepPlan | None:
        for seq in self._sequences:
            if seq.status is Status.RUNNING and seq.decoding and not seq.num_placeholders:
                right = self._expected[seq.request.request_id, seq.index][seq.num_outputs :]
                self._scheduler.propose(seq, self._drafts(seq, right))
        plan = self._schedule()
        self.plans += [] if plan is None else [plan]
        return plan

    @property
    def num_drafts(self) -> int:
        return sum(len(row.drafts) for plan in self.plans for row in plan.rows)


def counting(runner: ModelRunner) -> list[int]:
    """Returns a list that grows by the number of drafts that each row with drafts keeps."""
    sample, kept = runner.sampler.sample, []

    def counted(logits: torch.Tensor, rows: LogitsRows, masks: Any = None) -> Sampled:
        sampled = sample(logits, rows, masks)
        if sampled.counts is not None:
            kept.extend(count - 1 for count in sampled.counts.tolist())
        return sampled

    runner.sampler.sample = counted
    return kept


def served(world: World) -> ConstrainedEngine:
    engine = ConstrainedEngine(world)
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    return engine.run()


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (1, 3), (2, 3)])
def test_drafts_change_no_tokens(depth: int, count: int) -> None:
    expected = served(WORLD)
    engine = ConstrainedEngine(dataclasses.replace(WORLD, depth=depth, decode_tokens=1 + count))
    kept = counting(engine.runner)
    proposer = Proposer(engine.core.scheduler, expected.tokens, sometimes(count))
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    engine.run()
    assert (engine.tokens, engine.finish, engine.errors) == (expected.tokens, expected.finish, expected.errors)
    assert 0 < sum(kept) < proposer.num_drafts, "some drafts are right, and some wrong"
    engine.core.check_integrity()
    assert engine.core.stats().kv_blocks_used == 0


def test_a_draft_that_the_constraint_refuses_is_replaced() -> None:
    """Every draft is wrong: a mask of its place does not allow it, and what is behind it counts for nothing."""
    expected = served(WORLD)
    engine = ConstrainedEngine(dataclasses.replace(WORLD, decode_tokens=4))
    kept = counting(engine.runner)
    Proposer(engine.core.scheduler, expected.tokens, lambda seq, right: (0, 0, 0))
    engine.compile(*REQUESTS)
    engine.add(*REQUESTS)
    assert engine.run().tokens == expected.tokens
    assert kept and not any(kept)


def tokens_of(outcomes: Outcomes) -> dict[tuple[str, int], list[int]]:
    return {(name, index): each.token_ids for name, samples in outcomes.items() for index, each in enumerate(samples)}


@pytest.fixture(scope="module")
def expected() -> Outcomes:
    """Serves the requests that use features without drafts."""
    return serve(CROWDED, FEATURES)


@pytest.mark.parametrize(
    ("drafts", "depth"),
    [
        (oracle, 2),
        (adversary, 1),
        (sometimes, 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((oracle, 1), (adversary, 2), (sometimes, 1))),
    ],
)
def test_features_follow_the_drafts_before_a_token(expected: Outcomes, drafts: Callable[[int], Drafts], depth: int) -> None:
    engine = Engine(dataclasses.replace(CROWDED, depth=depth, decode_tokens=4))
    kept, proposer = counting(engine.runner), Proposer(engine.scheduler, tokens_of(expected), drafts(3))
    engine.add(*FEATURES)
    found = engine.run()
    for name, samples in expected.items():
        for one, other in zip(found[name], samples, strict=True):
            assert (one.token_ids, one.finish_reason, one.error) == (other.token_ids, other.finish_reason, None), name
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                assert (mine.token_ids, mine.rank) == (theirs.token_ids, theirs.rank), name
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=3e-5), name
    assert engine.scheduler.stats().num_preemptions and proposer.num_drafts > 100
    if drafts is oracle:
        assert sum(kept) == proposer.num_drafts
    elif drafts is adversary:
        assert not any(kept)
    else:
        assert 0 < sum(kept) < proposer.num_drafts


def test_the_requests_have_something_to_say(expected: Outcomes) -> None:
    """Each feature changes tokens, so that one that forgot the drafts would show."""
    changed = [each for each in FEATURES if each.request_id not in ("plain", "logprobs")]
    plain = serve(
        CROWDED,
        [
            request(each.request_id, each.prompt_token_ids, **_LONG | {"temperature": each.sampling.temperature})
            for each in changed
        ],
    )
    for name, (outcome, *_) in plain.items():
        assert outcome.token_ids != expected[name][0].token_ids, name
    assert len(plain) == len(changed)
    assert len(expected["min tokens"][0].token_ids) >= 13 > len(expected["stops"][0].token_ids)
    words = ("ab", "ca", "ddd", "bcb")
    assert not any(word.encode() in text_of(expected["bad words"][0].token_ids) for word in words)


def test_nothing_to_sample_behind_a_wrong_draft_fails_nobody() -> None:
    """Behind the draft "a" every token that is allowed is a bad word. What would be sampled there is not the sequence's."""
    a, b = 3, 4
    ask = request("b", prompt(1, 5), allowed_token_ids=[a, b], logit_bias={b: 100.0}, bad_words=["aa", "ab"], max_tokens=6)
    expected = serve(WORLD, [ask])
    engine = Engine(dataclasses.replace(WORLD, decode_tokens=3))
    proposer = Proposer(engine.scheduler, tokens_of(expected), lambda seq, right: (a, a))
    engine.add(ask)
    (outcome,) = engine.run()["b"]
    assert (outcome.token_ids, outcome.error) == ([b] * 6, None) and proposer.num_drafts
    # Where the sequence itself gets there, it fails.
    ask = request("a", prompt(1, 5), allowed_token_ids=[a, b], logit_bias={a: 100.0}, bad_words=["aa", "ab"], max_tokens=6)
    engine = Engine(dataclasses.replace(WORLD, decode_tokens=3))
    Proposer(engine.scheduler, {("a", 0): [a] * 6}, oracle(2))
    engine.add(ask)
    assert engine.run()["a"][0].error == NOTHING_ALLOWED
