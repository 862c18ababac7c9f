"""Sparse prompts end to end: the engine comes to what an independent forward comes to, however it schedules the work."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.runner.harness import Engine, Outcomes, alone, prompt, request, same
from support.runner.sparse_world import Reference, SparseWorld, elastic

from headrace.attention.sparse import Watch, WithSparsePrompts
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.sparse import SparsePrompt
from headrace.errors import ConfigError, EngineError
from headrace.model_spec import ELASTIC_MODES
from headrace.model_spec.kv import FP8_KV
from headrace.runner.parts.attention import AttentionWatch
from headrace.runner.replay import replay


def outcome(
    world: SparseWorld, tokens: list[int], count: int = 4, watch: Watch | None = None
) -> tuple[Engine, list[int], torch.Tensor]:
    """Greedy tokens, and the log-probabilities of the first one's position by token."""
    engine = Engine(world)
    for backend in engine.runner.backends:
        assert isinstance(backend, WithSparsePrompts)
        backend.sparse.watch = watch
    engine.add(request("r", tokens, max_tokens=count, eos=(), logprobs=-1))
    (sample,) = engine.run()["r"]
    first = sample.logprobs[0]
    row = torch.empty(len(set(first.token_ids)), dtype=torch.float64)
    for token, logprob in zip(first.token_ids, first.logprobs, strict=True):
        row[token] = logprob
    return engine, sample.token_ids, row


def decisions(engine: Engine) -> list[list[list[int]]]:
    """Per layer and segment, the classes of heads that the router gave."""
    parts = [bytearray(outcome.decision) for result in engine.results for outcome in result.sparse.values()]
    segments = torch.stack([torch.frombuffer(part, dtype=torch.int8).view(2, 3) for part in parts])
    return segments.transpose(0, 1).tolist()


@pytest.mark.parametrize("modes", ELASTIC_MODES)
@pytest.mark.parametrize("architecture", ["PawQwen3ForCausalLM", "PawLlamaForCausalLM"])
def test_elastic_attention_is_what_it_is_described_as(modes: tuple[str, str], architecture: str) -> None:
    world = SparseWorld(elastic=elastic(*modes), architecture=architecture)
    tokens = prompt(3, 500)
    reference = Reference(world)
    expected, first = reference.generate(tokens, 4)
    trace = reference(tokens, len(tokens))
    masks: dict[int, torch.Tensor] = {}
    engine, found, row = outcome(world, tokens, watch=lambda layer, first, attended: masks.update({layer: attended}))
    assert decisions(engine) == trace.classes
    assert all(torch.equal(masks[layer], blocks) for layer, blocks in enumerate(trace.blocks))
    assert len({answer for layer in trace.classes for one in layer for answer in one}) == 2, "there are heads of both classes"
    assert found == expected
    torch.testing.assert_close(row, first, atol=1e-4, rtol=0)
    ((result,),) = [list(result.sparse.values()) for result in engine.results if result.sparse]
    assert result.kept == [int(blocks.sum()) for blocks in trace.blocks]


MODES: dict[str, SparseWorld] = {
    "elastic": SparseWorld(elastic=elastic("xattn", "streaming")),
    "xattn": SparseWorld(selector="xattn"),
    "mean": SparseWorld(selector="mean", threshold=0.6),
}
"""A router with two kinds of sparse heads, and both selectors that need no training."""
EXACT = ["elastic", "xattn", "mean"]


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(SparseWorld(elastic=elastic("full", "xattn"), upstream=True), marks=pytest.mark.slow),
        SparseWorld(selector="xattn", upstream=True),
    ],
)
def test_blocks_are_selected_as_published_on_request(world: SparseWorld) -> None:
    """More of them than by the threshold alone; in chunks too; and KV is not shared between prompts of different lengths."""
    tokens = prompt(3, 500)
    reference = Reference(world)
    expected, first = reference.generate(tokens, 4)
    engine, found, row = outcome(world, tokens)
    assert found == expected
    torch.testing.assert_close(row, first, atol=1e-4, rtol=0)
    ((result,),) = [list(result.sparse.values()) for result in engine.results if result.sparse]
    assert result.kept == [int(blocks.sum()) for blocks in reference(tokens, len(tokens)).blocks]
    assert sum(result.kept) > sum(
        int(b.sum()) for b in Reference(dataclasses.replace(world, upstream=False))(tokens, 500).blocks
    )
    _, chunked, again = outcome(dataclasses.replace(world, max_num_batched_tokens=150), tokens)
    assert chunked == expected
    torch.testing.assert_close(again, first, atol=1e-4, rtol=0)
    hits, _ = in_turn(world, [request(f"r{i}", tokens[:length], max_tokens=1) for i, length in enumerate((500, 400, 400))])
    assert hits == [0, 0, 384]


def traffic() -> list[Request]:
    """Sparse prompts of many lengths, prompts that stay dense, and samples of one prompt."""
    lengths = [130, 500, 64, 3, 257, 320]
    requests = [request(f"r{i}", prompt(20 + i, length), max_tokens=5, logprobs=2) for i, length in enumerate(lengths)]
    requests.append(request("dense", prompt(30, 300), max_tokens=6, logprobs=2, sparse_prefill=False))
    requests.append(request("samples", prompt(31, 200), max_tokens=5, n=2, temperature=0.9, logprobs=2))
    requests.append(request("logprobs", prompt(32, 150), max_tokens=2, prompt_logprobs=1))
    return requests


@functools.cache
def expected(mode: str) -> Outcomes:
    return alone(MODES[mode], traffic())


def run(world: SparseWorld, requests: Sequence[Request], **options: Any) -> tuple[Engine, Outcomes]:
    engine = Engine(world)
    engine.add(*requests)
    return engine, engine.run(**options)


@pytest.mark.parametrize("mode", EXACT)
def test_company_changes_nothing(mode: str) -> None:
    requests = traffic()
    random.Random(5).shuffle(requests)
    same(run(MODES[mode], requests)[1], expected(mode))
    # Arrivals one by one: prompts beside sequences that decode.
    same(run(dataclasses.replace(MODES[mode], depth=2), [], arrivals=requests)[1], expected(mode))


def test_a_step_takes_elastic_prompts_dense_ones_and_decoding_rows() -> None:
    """Eight elastic prompts in one launch are eight alone."""
    decoding = request("decoding", prompt(33, 20), max_tokens=5, eos=(), logprobs=2, sparse_prefill=False)
    dense = request("dense", prompt(34, 150), max_tokens=3, logprobs=2, sparse_prefill=False)
    sparse = [request(f"r{i}", prompt(35 + i, 70 + 40 * i), max_tokens=3, logprobs=2) for i in range(8)]
    world = dataclasses.replace(MODES["elastic"], max_num_seqs=10)
    engine, plans = Engine(world), []
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    engine.runner.execute = watched
    engine.add(decoding)
    found = engine.run(before_step=lambda step: engine.add(dense, *sparse) if step == 1 else None)
    mixed = plans[1]
    assert (mixed.num_decode_rows, mixed.layers) == (1, None)
    assert len({outcome.decision for outcome in engine.results[1].sparse.values()}) > 1, "each prompt has its own decision"
    assert [row.num_tokens for row in mixed.rows] == [1, 150, *range(70, 351, 40)]
    same(found, alone(world, [decoding, dense, *sparse]))


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("budget", [64, pytest.param(150, marks=pytest.mark.slow)])
def test_chunks_change_nothing(mode: str, budget: int) -> None:
    _, found = run(dataclasses.replace(MODES[mode], max_num_batched_tokens=budget), traffic())
    same(found, expected(mode))


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.slow] if mode != "elastic" else []) for mode in EXACT])
def test_an_fp8_cache_keeps_the_invariants(mode: str) -> None:
    """Batching, chunking and prefix hits change nothing; the outputs are close to those of a cache of full precision."""
    world = dataclasses.replace(MODES[mode], kv_dtype=FP8_KV)
    requests = traffic()[:4]
    wanted = alone(world, requests)
    same(run(world, requests)[1], wanted)
    same(run(dataclasses.replace(world, max_num_batched_tokens=150), requests)[1], wanted)
    hits, found = in_turn(
        world, [msgspec.structs.replace(each, request_id=f"{each.request_id}{n}") for n in "ab" for each in requests]
    )
    assert sum(hits) > 500
    same({name[:-1]: outcome for name, outcome in found.items() if name.endswith("b")}, wanted)
    for name, (sample,) in wanted.items():
        (full,) = expected(mode)[name]
        assert abs(sample.logprobs[0].logprobs[0] - full.logprobs[0].logprobs[0]) < 0.5, name


@pytest.mark.parametrize("mode", EXACT)
def test_preemption_changes_nothing(mode: str) -> None:
    chance = random.Random(3)
    engine = Engine(dataclasses.replace(MODES[mode], caching=mode == "mean"))
    engine.add(*traffic())

    def preempt(step: int) -> None:
        running = [seq for seq in engine.scheduler._running if seq.seq_id]
        if running and chance.random() < 0.6:
            engine.scheduler._preempt(chance.choice(running))

    same(engine.run(before_step=preempt), expected(mode))
    assert engine.scheduler.stats().num_preemptions > 5


@pytest.mark.parametrize("mode", EXACT)
def test_cache_hits_change_nothing(mode: str) -> None:
    engine = Engine(dataclasses.replace(MODES[mode], caching=True))
    engine.add(*traffic())
    first = engine.run()
    again = [msgspec.structs.replace(each, request_id=f"{each.request_id}+") for each in traffic()]
    engine.add(*again)
    second = {name.removesuffix("+"): found for name, found in engine.run().items() if name.endswith("+")}
    same({name: found for name, found in first.items() if not name.endswith("+")}, expected(mode))
    same(second, expected(mode))
    stats = engine.scheduler.stats()
    assert stats.prefix_hit_tokens >= 448 + 256 + 256 + 192, "prompts of 500, 320, 257 and 200 tokens start from the cache"


def in_turn(world: SparseWorld, requests: Sequence[Request]) -> tuple[list[int], Outcomes]:
    """Serves requests one after the other; returns the prompt tokens that each found in the cache."""
    engine, hits = Engine(dataclasses.replace(world, caching=True)), []
    for each in requests:
        before = engine.scheduler.stats().prefix_hit_tokens
        engine.add(each)
        engine.run()
        hits.append(engine.scheduler.stats().prefix_hit_tokens - before)
    return hits, engine.outcomes


@pytest.mark.parametrize("mode", ["xattn", "mean"])
def test_kv_is_shared_by_whole_blocks_of_the_sparse_grid(mode: str) -> None:
    """Blocks were selected for all queries of a block: those behind a common prefix change its KV, in the cache's smaller
    blocks too."""
    common = prompt(40, 3 * 64 + 40)
    one, other = common + prompt(41, 100), common + prompt(42, 100)
    requests = [request(name, tokens, max_tokens=4, logprobs=2) for name, tokens in (("a", one), ("b", other), ("c", other))]
    hits, found = in_turn(MODES[mode], requests)
    assert hits == [0, 192, 320]
    same(found, alone(MODES[mode], requests))


@pytest.mark.parametrize(("length", "page"), [(200, 16), (192, 64)])
def test_generated_tokens_are_not_taken_for_a_prompt(length: int, page: int) -> None:
    """They attended densely, and the prompt's last block ended before them."""
    world = dataclasses.replace(MODES["xattn"], page=page, num_blocks=200)
    first = request("first", prompt(43, length), max_tokens=70, eos=(), logprobs=0)
    (answer,) = alone(world, [first])["first"]
    follow = request("follow", first.prompt_token_ids + answer.token_ids + prompt(44, 10), max_tokens=4, logprobs=2)
    hits, found = in_turn(world, [first, follow])
    assert hits == [0, 192]
    same(found, alone(world, [first, follow]))


@pytest.mark.parametrize("mode", EXACT)
def test_dense_and_sparse_kv_never_mix(mode: str) -> None:
    tokens = prompt(45, 300)
    requests = [
        request(name, tokens, max_tokens=4, logprobs=2, sparse_prefill=sparse)
        for name, sparse in (("dense", False), ("sparse", None), ("dense again", False), ("sparse again", True))
    ]
    hits, found = in_turn(MODES[mode], requests)
    assert hits == [0, 0, 288, 256]
    same(found, alone(MODES[mode], requests))
    assert found["dense"][0].logprobs != found["sparse"][0].logprobs


def test_routed_kv_is_found_by_equal_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(46, 300)
    requests = [
        request("a", tokens, max_tokens=3, logprobs=2),
        request("longer", [*tokens, 9], max_tokens=3, logprobs=2),
        request("equal", tokens, max_tokens=3, logprobs=2),
    ]
    hits, found = in_turn(MODES["elastic"], requests)
    assert hits == [0, 0, 256]
    same(found, alone(MODES["elastic"], requests))
    # A decision that is forgotten takes the KV with it.
    monkeypatch.setattr("headrace.core.sparse._DECISIONS_KEPT", 1)
    hits, found = in_turn(MODES["elastic"], requests)
    assert hits == [0, 0, 0]


def test_decisions_are_of_one_prompt_and_salt() -> None:
    """A salt is not taken for a further token."""
    config, seen = MODES["elastic"].sparse, set()
    for tokens, salt in (([5, 6], None), ([5, 6, 7], None), ([5, 6], "a"), ([5, 6], "\7" + "\0" * 7)):
        found = SparsePrompt.of(msgspec.structs.replace(request("r", tokens), cache_salt=salt), config)
        assert found is not None
        seen.add(found.digest)
    assert len(seen) == 4


def dense(requests: Sequence[Request]) -> list[Request]:
    return [
        msgspec.structs.replace(each, sampling=msgspec.structs.replace(each.sampling, sparse_prefill=False))
        for each in requests
    ]


@pytest.mark.parametrize(
    "world",
    [
        SparseWorld(elastic=elastic("full", "full")),
        SparseWorld(elastic=elastic("xattn", "xattn", threshold=1.0)),
        SparseWorld(selector="xattn", threshold=1.0),
        SparseWorld(selector="xattn", min_tokens=2000),
        SparseWorld(elastic=elastic("full", "streaming", local_blocks=16)),
    ],
    ids=["full", "threshold 1, routed", "threshold 1", "short prompts", "a window over all"],
)
def test_nothing_left_out_is_dense_attention(world: SparseWorld) -> None:
    same(run(world, traffic())[1], run(world, dense(traffic()))[1])


@pytest.mark.parametrize("length", [700, 383, 384])
def test_long_prompts_are_routed_in_segments(length: int) -> None:
    """Segments have 192 tokens here; the last one may be longer by less than a block."""
    world = SparseWorld(elastic=elastic("xattn", "streaming"), max_exact_tokens=256)
    tokens, borders = prompt(50, length), {700: [192, 384, 576], 383: [192], 384: [192]}[length]
    reference = Reference(world)
    expected, first = reference.generate(tokens, 3, borders)
    trace = reference(tokens, len(tokens), borders=borders)
    engine, found, row = outcome(world, tokens, 3)
    assert decisions(engine) == trace.classes
    assert found == expected
    torch.testing.assert_close(row, first, atol=1e-4, rtol=0)


def test_segments_keep_the_invariants() -> None:
    world = SparseWorld(elastic=elastic("xattn", "streaming"), max_exact_tokens=256)
    baseline = alone(world, traffic())
    small = dataclasses.replace(world, caching=True, depth=2, max_num_batched_tokens=100, num_blocks=110)
    engine, found = run(small, traffic())
    same(found, baseline)
    engine.add(*(msgspec.structs.replace(each, request_id=f"{each.request_id}+") for each in traffic()))
    same({name.removesuffix("+"): each for name, each in engine.run().items() if name.endswith("+")}, baseline)
    assert engine.scheduler.stats().prefix_hit_tokens > 0


def test_steps_stay_within_their_bound() -> None:
    """Prompts that are routed as a whole take no more tokens a step than the bound that memory is measured with."""
    world = dataclasses.replace(MODES["elastic"], max_exact_tokens=600, max_num_batched_tokens=100, depth=2)
    engine = Engine(world)
    most, plans, schedule = world.config().scheduler.most_tokens, [], engine.scheduler.schedule

    def watched() -> Any:
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = watched
    longest, *others = sorted(traffic(), key=lambda each: len(each.prompt_token_ids), reverse=True)
    engine.run(arrivals=[longest, *others, *dense([request(f"d{i}", prompt(i, 300), max_tokens=4) for i in range(3)])])
    sizes = [plan.num_tokens for plan in plans if plan is not None]
    assert most == 600 and 500 <= max(sizes) <= most


@pytest.mark.parametrize("mode", EXACT)
def test_abort_at_any_step_frees_every_block(mode: str) -> None:
    for last in range(0, 12, 4):
        engine = Engine(dataclasses.replace(MODES[mode], caching=True, max_num_batched_tokens=192, depth=2))
        engine.add(*traffic())

        def abort(step: int, at: int = last, engine: Engine = engine) -> None:
            if step == at:
                for each in traffic():
                    engine.scheduler.abort(each.request_id)

        engine.run(before_step=abort)  # Checks that no block is left.


@pytest.mark.parametrize("mode", EXACT)
def test_a_reused_slot_is_as_new(mode: str) -> None:
    same(run(dataclasses.replace(MODES[mode], max_num_seqs=1), traffic())[1], expected(mode))


@pytest.mark.parametrize("mode", EXACT)
def test_a_replay_is_the_run(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "plans"
    world = dataclasses.replace(MODES[mode], record=str(path), caching=True, max_num_seqs=3)
    engine, _ = run(world, traffic())
    engine.runner.close()
    replayed = list(replay(path, dataclasses.replace(world, record=None).runner()))
    assert [strip(result) for result in replayed] == [strip(result) for result in engine.results]
    other = dataclasses.replace(world, record=None, selector="xattn", elastic=None, threshold=0.5)
    with pytest.raises(ConfigError, match="attention_backends"):
        replay(path, other.runner())


def strip(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, forward_seconds=0.0, sample_seconds=0.0)


def test_a_known_decision_is_resumed_in_chunks() -> None:
    """The same decision, within the step's budget; and the tokens generated before attend densely again."""
    world = dataclasses.replace(MODES["elastic"], max_num_batched_tokens=100)
    asked = request("r", prompt(51, 500), max_tokens=8, eos=(), logprobs=2)
    plans: list[StepPlan] = []
    engine = Engine(world)
    engine.add(asked)
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    engine.runner.execute = watched

    def preempt(step: int) -> None:
        if step == 4:
            engine.scheduler._preempt(next(iter(engine.scheduler._running)))

    same(engine.run(before_step=preempt), alone(world, [asked]))
    (first, resumed) = [plan.new[0] for plan in plans if plan.new]
    assert (first.sparse, len(resumed.sparse or b"")) == (b"", 2 * 3)
    rows = [(row.num_computed, row.num_tokens) for plan in plans for row in plan.rows]
    assert rows[0] == (0, 500)
    again = rows[rows.index((0, 64)) :]
    assert again[:9] == [(start, min(64, 500 - start)) for start in range(0, 500, 64)] + [(500, 4)]


def test_models_without_sparse_prompts_are_as_ever() -> None:
    """Nothing wraps their attention, no table is made, and plans and results are what they were."""
    engine = Engine(SparseWorld())
    engine.add(request("r", prompt(52, 300), max_tokens=2))
    engine.run()
    assert [type(part) for part in engine.runner.parts] == [AttentionWatch]
    assert not any(isinstance(backend, WithSparsePrompts) for backend in engine.runner.backends)
    assert not any(result.sparse for result in engine.results)


def test_a_plan_that_cuts_a_block_is_refused() -> None:
    engine = Engine(MODES["xattn"])
    engine.add(request("r", prompt(53, 300), max_tokens=2))
    plan = engine.scheduler.schedule()
    assert plan is not None
    cut = msgspec.structs.replace(plan, rows=(msgspec.structs.replace(plan.rows[0], num_tokens=100, num_logits=0),))
    with pytest.raises(EngineError, match="not a chunk of a prompt that attends sparsely"):
        engine.runner.execute(cut)
