"""The invariants: company, chunks, preemption, cache hits, slots, aborts and pipelining never change what a request gets.

Families times features; a new family is an entry of ``harness.FAMILIES``, a new feature an entry of ``FEATURES``.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from support.runner.features import BAD_WORDS, FEATURES
from support.runner.harness import (
    EOS,
    FAMILIES,
    IN_FP8,
    VOCAB,
    Engine,
    Outcomes,
    World,
    alone,
    model,
    prompt,
    request,
    same,
    serve,
    text_of,
)

from headrace.core.request import Request
from headrace.core.sequence import Sequence
from headrace.outputs import TokenLogprobs
from headrace.runner.replay import replay

REQUESTS = list(FEATURES.values())
STATES = "short convolutions"
"""States in the cache's own dtype, and KV in two groups."""
QUICK = ("uneven", "windows" + IN_FP8)
"""One stands for layers of several sizes with windows, one for rounded and shared KV."""


def of(names: Iterable[str], quick: Collection[str] = QUICK) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "family", [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


families = of(FAMILIES)
whatever_is_cached = of(FAMILIES, QUICK[:1])
"""For what does not depend on the cache's format."""
of_the_models_dtype = of(family for family in FAMILIES if not family.endswith(IN_FP8))
short_of_blocks = of(FAMILIES, (*QUICK, STATES))
"""Families with groups of layers that take blocks from each other: also among three, with shared KV, and with states."""
with_states = of(FAMILIES, (*QUICK, STATES))
slow = pytest.mark.slow


@functools.cache
def expected(family: str) -> Outcomes:
    """Every request alone, with all the room there is."""
    return alone(World(family), REQUESTS)


def shuffled(seed: int) -> list[Request]:
    requests = REQUESTS.copy()
    random.Random(seed).shuffle(requests)
    return requests


@whatever_is_cached
def test_the_features_do_something(family: str) -> None:
    """Equality of what does nothing would prove nothing."""
    outcomes = expected(family)
    assert all(outcome.error is None for samples in outcomes.values() for outcome in samples)
    for name in ("penalties", "bad words", "min tokens", "bias", "allowed"):
        own = FEATURES[name]
        without = request(
            name, own.prompt_token_ids, seed=own.seed, temperature=own.sampling.temperature, max_tokens=own.max_tokens
        )
        assert serve(World(family), [without])[name][0].token_ids != outcomes[name][0].token_ids, name
    assert len({tuple(outcome.token_ids) for outcome in outcomes["samples"]}) == 3
    text = text_of(outcomes["bad words"][0].token_ids)
    assert len(text) > 20 and not any(word.encode() in text for word in BAD_WORDS)
    tokens = outcomes["min tokens"][0].token_ids
    assert tokens[-1] == EOS and len(tokens) == 10 and not {EOS, 50, 51} & set(tokens[:9])
    assert set(outcomes["allowed"][0].token_ids) <= {EOS, 20, 30, 40, 44}
    assert len(outcomes["prompt logprobs"][0].prompt_logprobs or []) == 26


@of_the_models_dtype
def test_the_backends_agree(family: str) -> None:
    same(
        alone(World(family, backend="reference"), REQUESTS[:6]),
        {r.request_id: expected(family)[r.request_id] for r in REQUESTS[:6]},
    )


@families
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow)])
def test_company_and_order_change_nothing(family: str, seed: int) -> None:
    same(serve(World(family, max_num_seqs=32), shuffled(seed)), expected(family))


@families
def test_late_arrivals_change_nothing(family: str) -> None:
    engine = Engine(World(family))
    same(engine.run(arrivals=shuffled(5)), expected(family))


@families
@pytest.mark.parametrize("budget", [1, pytest.param(5, marks=slow), 20])
def test_chunks_change_nothing(family: str, budget: int) -> None:
    """The harness checks that a chunk which is not the last brings no token."""
    requests = shuffled(budget)
    if budget == 1:
        requests = [each for each in requests if len(each.prompt_token_ids) < 20]
    wanted = {each.request_id: expected(family)[each.request_id] for each in requests}
    same(serve(World(family, max_num_batched_tokens=budget), requests), wanted)


@short_of_blocks
@pytest.mark.parametrize("depth", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
def test_preemption_for_want_of_blocks_changes_nothing(family: str, depth: int) -> None:
    engine = Engine(World(family, num_blocks=22, depth=depth, max_num_batched_tokens=24))
    engine.add(*shuffled(depth))
    same(engine.run(), expected(family))
    if FAMILIES[family].layers[0].window is None:
        assert engine.scheduler.stats().num_preemptions > 0


@families
@pytest.mark.parametrize(("depth", "seed"), [(1, 0), (2, 1), pytest.param(3, 2, marks=slow)])
def test_preemption_at_any_step_changes_nothing(family: str, depth: int, seed: int) -> None:
    """A sequence loses slot and blocks in every other step: while its prompt is computed, or while it decodes."""
    engine = Engine(World(family, depth=depth, max_num_batched_tokens=64))
    chance = random.Random(seed)

    def preempt(step: int) -> None:
        running: list[Sequence] = list(engine.scheduler._running)
        if running and step % 2 == 0:
            engine.scheduler._preempt(chance.choice(running))

    engine.add(*REQUESTS)
    same(engine.run(before_step=preempt), expected(family))
    assert engine.scheduler.stats().num_preemptions > 12


@with_states
def test_cache_hits_change_nothing(family: str) -> None:
    engine = Engine(World(family, caching=True, num_blocks=900))
    for each in shuffled(0):
        engine.add(each)
        engine.run()
    same(engine.outcomes, expected(family))
    engine.add(*shuffled(1))
    same(engine.run(), expected(family))
    assert engine.scheduler.stats().prefix_hit_tokens > 50


@short_of_blocks
def test_cache_hits_under_pressure_change_nothing(family: str) -> None:
    engine = Engine(World(family, caching=True, num_blocks=26, depth=2, max_num_batched_tokens=16))
    engine.add(*shuffled(3))
    engine.run()
    engine.add(*shuffled(4))
    same(engine.run(), expected(family))
    assert (engine.scheduler.stats().kv_blocks_moved > 0) == engine.world.config().cache.shared


@whatever_is_cached
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=slow)])
def test_a_reused_slot_is_as_new(family: str, slots: int) -> None:
    same(serve(World(family, max_num_seqs=slots), shuffled(slots)), expected(family))


@whatever_is_cached
@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=slow)])
def test_pipelining_changes_nothing(family: str, depth: int) -> None:
    same(serve(World(family, depth=depth, max_num_batched_tokens=40), shuffled(depth)), expected(family))


@families
def test_the_null_block_is_never_written(family: str) -> None:
    engine = Engine(World(family, num_blocks=24, depth=2))
    engine.add(*shuffled(0))
    engine.run()
    assert all(not cache.rows[0].any() for cache in engine.runner._caches)
    if engine.runner._blocks is not None:
        assert not engine.runner._blocks.arena[: engine.world.config().cache.arena.reserved].any()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=slow), 2])
def test_abort_at_any_step_frees_every_block(depth: int) -> None:
    """The harness checks at the end that no block is used; those who stay are not disturbed."""
    for step in range(0, 28, 7):
        engine = Engine(World("windows between", depth=depth, num_blocks=60, max_num_batched_tokens=20, caching=True))
        names = [each.request_id for each in REQUESTS]
        gone = set(random.Random(step).sample(names, len(names) // 2))

        def abort(now: int, step: int = step, gone: set[str] = gone, engine: Engine = engine) -> None:
            if now == step:
                for name in gone:
                    engine.scheduler.abort(name)

        engine.add(*REQUESTS)
        outcomes = engine.run(before_step=abort)
        stayed = {name: samples for name, samples in outcomes.items() if name not in gone}
        same(stayed, {name: expected("windows between")[name] for name in stayed})


@with_states
def test_a_replay_equals_the_run(family: str, tmp_path: Path) -> None:
    path = tmp_path / "plans"
    world = World(family, record=str(path), depth=2, num_blocks=30, max_num_batched_tokens=24, caching=True)
    engine = Engine(world)
    engine.add(*shuffled(1))
    engine.run()
    engine.runner.close()
    runner = World(family, depth=2, num_blocks=30, max_num_batched_tokens=24, caching=True).runner()
    again = list(replay(path, runner))
    timeless = {"forward_seconds": 0.0, "sample_seconds": 0.0}
    assert [msgspec.structs.replace(result, **timeless) for result in again] == [
        msgspec.structs.replace(result, **timeless) for result in engine.results
    ]
    if engine.runner._blocks is not None:
        assert runner._blocks is not None
        assert torch.equal(runner._blocks.arena, engine.runner._blocks.arena), "KV and states have the same bits"


@pytest.mark.parametrize("family", [pytest.param("llama", marks=slow), "windows between", "uneven", STATES])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_breaks_down_takes_nobody_along(family: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose embedding is not a number: its KV is none either, in blocks that others then get."""
    outcomes = expected(family)
    meets = {
        each.request_id: {*each.prompt_token_ids, *itertools.chain(*(o.token_ids for o in outcomes[each.request_id]))}
        for each in REQUESTS
    }
    poison = min(range(3, VOCAB), key=lambda token: sum(token in tokens for tokens in meets.values()))
    healthy = [each for each in REQUESTS if poison not in meets[each.request_id]]
    assert len(healthy) > len(REQUESTS) // 2
    weight = model(family).embed_tokens.weight
    whole = weight.data[poison].clone()
    weight.data[poison] = torch.nan
    try:
        engine = Engine(World(family, depth=depth, num_blocks=60, max_num_batched_tokens=32))
        sick = [request(f"sick {i}", [*prompt(i, 7), poison, *prompt(i, i % 3)]) for i in range(6)]
        engine.add(*itertools.chain(*itertools.zip_longest(sick, healthy[:6])), *healthy[6:])
        outcomes = engine.run()
    finally:
        weight.data[poison] = whole
    for each in sick:
        (outcome,) = outcomes.pop(each.request_id)
        assert outcome.finish_reason == "error" and "not finite" in str(outcome.error) and not outcome.token_ids
    same(outcomes, {each.request_id: expected(family)[each.request_id] for each in healthy})


def test_logprobs_are_those_of_the_whole_sequence() -> None:
    """Prompt logprobs of a prompt with the outputs in it are the raw logprobs that the outputs had."""
    first = request("first", prompt(30, 9), logprobs=4, temperature=1.0, top_k=5, max_tokens=10, ignore_eos=True)
    (outcome,) = serve(World("qwen3"), [first])["first"]
    second = request("second", first.prompt_token_ids + outcome.token_ids, prompt_logprobs=4, max_tokens=1)
    (whole,) = serve(World("qwen3", max_num_batched_tokens=5), [second])["second"]
    tail: list[TokenLogprobs] = (whole.prompt_logprobs or [])[-10:]
    assert [entry.token_ids for entry in tail] == [entry.token_ids for entry in outcome.logprobs]
    for one, other in zip(tail, outcome.logprobs, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4) and one.rank == other.rank
