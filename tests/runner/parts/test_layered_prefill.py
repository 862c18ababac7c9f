"""Prompts in one piece advance a few layers a step: the result is that of one step, and decoding rows keep their cadence."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.runner.harness import Engine, Outcomes, alone, prompt, request, same
from support.runner.sparse_world import SparseWorld, captured_runner, elastic

from headrace.core.plan import LayerRange, SamplePlan, StepPlan
from headrace.core.request import Request
from headrace.errors import EngineError
from headrace.kernels import gpu
from headrace.models.capture import no_host_sync
from headrace.runner.parts.pieces import Pieces
from headrace.runner.replay import replay
from headrace.runner.runner import ModelRunner
from runner.parts.test_sparse import strip

LAYERS = 5
WORLD = SparseWorld(elastic=elastic("xattn", "streaming"), num_layers=LAYERS)
DECODING = request("decoding", prompt(1, 5), max_tokens=32, eos=(), logprobs=1, sparse_prefill=False)


def long(number: int = 0, length: int = 512, **sampling: Any) -> Request:
    return request(f"long{number}", prompt(60 + number, length), **{"max_tokens": 3, "eos": (), "logprobs": 2} | sampling)


class Watched(Engine):
    """Keeps the plans."""

    def __init__(self, world: SparseWorld, runner: ModelRunner | None = None) -> None:
        super().__init__(world, runner)
        self.plans: list[StepPlan] = []
        schedule = self.scheduler.schedule

        def watched() -> StepPlan | None:
            if plan := schedule():
                self.plans.append(plan)
            return plan

        self.scheduler.schedule = watched

    def begin(self, *requests: Request) -> None:
        """Adds requests beside a sequence that decodes already."""
        self.add(DECODING)
        for _ in range(2):
            self.step()
        self.add(*requests)

    def step(self) -> None:
        while (plan := self.scheduler.schedule()) is not None:
            handle = self.runner.execute(plan)
            self.runner.sample(handle, SamplePlan(plan.step))
            self._launched.append((plan, handle))
        self._collect()

    def until_layers(self, count: int) -> None:
        """Runs until ``count`` layers of a piece are planned, and the piece is paused."""
        while not (self.plans[-1].layers is not None and self.plans[-1].layers.end >= count):
            self.step()

    @property
    def paused(self) -> int:
        return dict(self.runner.memory())[Pieces.memory_label]

    def parts(self) -> list[tuple[int, StepPlan, LayerRange]]:
        """(sequence, plan, layers) of every step with layers of a piece."""
        return [(plan.rows[-1].seq_id, plan, plan.layers) for plan in self.plans if plan.layers is not None]


@functools.cache
def expected(number: int = 0, length: int = 512) -> Outcomes:
    return alone(WORLD, [long(number, length)])


@functools.cache
def decoded() -> Outcomes:
    return alone(WORLD, [DECODING])


def kv(engine: Engine, seq_id: int, length: int) -> list[torch.Tensor]:
    (slot,) = (engine.runner.slots.seq_id == seq_id).nonzero()[0].tolist()
    blocks = engine.runner.slots.block_tables[0].tensor[slot, : length // engine.runner.slots.block_size].long()
    return [cache.rows[blocks].clone() for cache in engine.runner._caches]


depths = pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])


@pytest.mark.parametrize("architecture", ["PawQwen3ForCausalLM", "PawLlamaForCausalLM"])
@pytest.mark.parametrize("limit", [30, 210])
def test_layers_in_turn_are_one_piece_bit_for_bit(architecture: str, limit: int) -> None:
    """KV of every layer, decisions of the routers and the blocks attended to."""
    world = dataclasses.replace(WORLD, architecture=architecture)
    at_once, in_turn = Watched(world), Watched(dataclasses.replace(world, beside_decode=limit))
    at_once.add(long())
    at_once.step()
    assert not at_once.parts()
    in_turn.begin(long())
    in_turn.until_layers(LAYERS)
    seq_id = in_turn.parts()[-1][0]
    assert len(in_turn.parts()) == {30: 5, 210: 3}[limit]
    for ours, theirs in zip(kv(in_turn, seq_id, 512), kv(at_once, 0, 512), strict=True):
        assert ours.any() and torch.equal(ours, theirs)
    ((one,), (other,)) = ([r.sparse[s] for r in e.results if s in r.sparse] for e, s in ((at_once, 0), (in_turn, seq_id)))
    assert one == other and len(one.decision) == LAYERS * 3
    assert in_turn.paused == 0


@depths
@pytest.mark.parametrize(
    ("tokens", "limit"),
    [
        (4096, 512),
        pytest.param(4096, 210, marks=pytest.mark.slow),
        pytest.param(4096, 60, marks=pytest.mark.slow),
        (4096, 30),
        (130, None),
    ],
)
def test_decoding_rows_keep_their_cadence(tokens: int, limit: int | None, depth: int) -> None:
    """Every step beside them has a row of theirs, and no more prefill than the budget's or one layer; on average, no more than
    the limit. Two prompts take turns, whole."""
    world = dataclasses.replace(WORLD, max_num_batched_tokens=tokens, beside_decode=limit, depth=depth)
    engine = Watched(world)
    engine.begin(long(0), long(1, 500))
    same(engine.run(), decoded() | expected(0) | expected(1, 500))
    budget, parts = limit or tokens - 1, engine.parts()
    work = [
        plan.num_tokens - plan.num_decode_rows for plan in engine.plans if plan.rows[0].seq_id == 0 and plan.num_decode_rows
    ]
    assert len(work) == 31 and max(work) <= max(budget, -(-512 // LAYERS)), work
    shares = {seq_id: [(own.first, own.end) for each, _, own in parts if each == seq_id] for seq_id in (1, 2)}
    for seq_id, own in shares.items():
        assert not own or [(0, own[0][1]), *itertools.pairwise([end for _, end in own])] == own, seq_id
        assert not own or own[-1][1] == LAYERS
    assert [seq_id for seq_id, _ in itertools.groupby(seq_id for seq_id, _, _ in parts)] == [
        seq_id for seq_id, own in shares.items() if own
    ]
    if limit is not None:
        debts = list(itertools.accumulate(work, lambda debt, more: max(0, debt + more - limit), initial=0))
        assert max(debts) <= max(0, -(-512 // LAYERS) - 1), "what is above the limit is paid for before more is computed"


def traffic() -> list[Request]:
    """Routed prompts of many lengths, one that stays dense, samples of one prompt, and logprobs of a prompt."""
    requests = [long(number, length) for number, length in enumerate((512, 500, 130, 64, 3, 320))]
    requests.append(request("dense", prompt(30, 300), max_tokens=6, logprobs=2, sparse_prefill=False))
    requests.append(request("samples", prompt(31, 200), max_tokens=5, n=2, temperature=0.9, logprobs=2))
    requests.append(request("logprobs", prompt(32, 150), max_tokens=2, prompt_logprobs=1))
    return [DECODING, *requests]


@functools.cache
def all_expected() -> Outcomes:
    return alone(WORLD, traffic())


SMALL = dataclasses.replace(WORLD, max_num_batched_tokens=140, beside_decode=110)


@depths
def test_company_chunks_and_pipelining_change_nothing(depth: int) -> None:
    engine = Watched(dataclasses.replace(SMALL, depth=depth))
    same(engine.run(arrivals=traffic()), all_expected())
    assert len({seq_id for seq_id, _, _ in engine.parts()}) > 3


def test_cache_hits_and_reused_slots_change_nothing() -> None:
    engine = Watched(dataclasses.replace(SMALL, caching=True, max_num_seqs=3, depth=2))
    for turn in "ab":
        arrivals = [msgspec.structs.replace(each, request_id=f"{each.request_id}{turn}") for each in traffic()]
        same({name[:-1]: found for name, found in engine.run(arrivals=arrivals).items() if name.endswith(turn)}, all_expected())
    stats = engine.scheduler.stats()
    assert engine.parts() and stats.prefix_hit_tokens >= 448 + 448 + 128 + 256, "equal prompts have equal decisions"


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_preemption_between_layers_changes_nothing(depth: int) -> None:
    """A piece begins again at its first layer; the other prompt may come first."""
    for at in (1, LAYERS - 1):
        engine = Watched(dataclasses.replace(WORLD, beside_decode=100, depth=depth))
        engine.begin(long(0), long(1, 500))
        engine.until_layers(at)
        victim = next(seq for seq in engine.scheduler._running if seq.seq_id == 1)
        assert victim.num_layers == at and engine.paused > 0
        engine.scheduler._preempt(victim)
        assert victim.num_layers == 0
        same(engine.run(), decoded() | expected(0) | expected(1, 500))
        assert engine.paused == 0


def test_preemption_for_want_of_blocks_changes_nothing() -> None:
    """Sequences that decode preempt the piece itself."""
    others = [msgspec.structs.replace(DECODING, request_id=f"decoding{n}", prompt_token_ids=prompt(n, 12)) for n in range(4)]
    engine = Watched(dataclasses.replace(WORLD, beside_decode=25, num_blocks=39, depth=2))
    engine.add(*others)
    engine.step()
    engine.add(long())
    same(engine.run(), alone(WORLD, others) | expected())
    assert engine.scheduler.stats().num_preemptions == 1
    assert 0 < max(own.end for _, _, own in engine.parts()) < LAYERS, "it begins again when the others have ended"


@depths
def test_abort_between_layers_frees_what_is_paused(depth: int) -> None:
    """The next plan frees it with the slot. The harness checks that no block is left."""
    for at in (1, LAYERS - 1):
        engine = Watched(dataclasses.replace(WORLD, beside_decode=100, depth=depth))
        engine.begin(long(0), long(1, 500))
        engine.until_layers(at)
        before = len(engine.parts())
        assert engine.paused == 2 * 512 * WORLD.spec.hidden_size * 4
        engine.scheduler.abort("long0")
        del engine.outcomes["long0"]
        same(engine.run(), decoded() | expected(1, 500))
        assert engine.paused == 0 and {seq_id for seq_id, _, _ in engine.parts()[before:]} == {2}


def test_what_is_paused_is_freed_without_another_request() -> None:
    engine = Watched(dataclasses.replace(WORLD, beside_decode=100, depth=2))
    engine.begin(long())
    engine.until_layers(2)
    for each in (DECODING, long()):
        engine.scheduler.abort(each.request_id)
    engine.run()
    assert engine.paused == 0 and not engine.plans[-1].rows and not engine.scheduler.has_work()


def test_a_piece_has_the_rest_at_once_when_nothing_decodes() -> None:
    engine = Watched(dataclasses.replace(WORLD, beside_decode=100))
    engine.begin(long())
    engine.until_layers(2)
    engine.scheduler.abort("decoding")
    del engine.outcomes["decoding"]
    same(engine.run(), expected())
    assert [(own.first, own.end) for _, _, own in engine.parts()] == [(0, 1), (1, 2), (2, 5)]


def test_segments_of_a_long_prompt_advance_by_layers() -> None:
    world = dataclasses.replace(WORLD, max_exact_tokens=256)
    wanted = alone(world, [long(3, 700)])
    engine = Watched(dataclasses.replace(world, beside_decode=100, depth=2))
    engine.begin(long(3, 700))
    same(engine.run(), decoded() | wanted)
    assert sorted({plan.rows[-1].num_computed for _, plan, _ in engine.parts()}) == [0, 192, 384, 576]


def test_a_replay_is_the_run(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    world = dataclasses.replace(SMALL, record=str(path), caching=True, max_num_seqs=3, depth=2)
    engine = Watched(world)
    engine.run(arrivals=traffic())
    engine.runner.close()
    assert engine.parts()
    replayed = list(replay(path, dataclasses.replace(world, record=None).runner()))
    assert [strip(result) for result in replayed] == [strip(result) for result in engine.results]


def test_decoding_rows_are_replayed_beside_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding rows change nothing of the piece."""
    world = dataclasses.replace(WORLD, beside_decode=210)
    engine = Watched(world, captured_runner(world, (2, 4), monkeypatch))
    engine.begin(long())
    with torch.inference_mode():
        same(engine.run(), decoded() | expected())
    steps = [plan.step for _, plan, _ in engine.parts()]
    beside = [result for result in engine.results if result.step in steps]
    assert len(beside) == 3 and all(result.replayed and result.padding_tokens == 1 for result in beside)


def test_a_prompt_that_breaks_down_between_layers_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV is not a number in the layers computed so far, and its blocks go to others."""
    poison = 7
    healthy = [
        msgspec.structs.replace(each, prompt_token_ids=[8 if token == poison else token for token in each.prompt_token_ids])
        for each in (DECODING, long(1, 500), long(2, 320))
    ]
    wanted = alone(WORLD, healthy)
    assert all(poison not in sample.token_ids for samples in wanted.values() for sample in samples)
    engine = Watched(dataclasses.replace(WORLD, beside_decode=100, depth=2, num_blocks=50))
    weight = engine.runner._model.embed_tokens.weight
    weight.data[poison] = torch.nan
    engine.add(healthy[0])
    for _ in range(2):
        engine.step()
    sick = msgspec.structs.replace(long(), prompt_token_ids=[*prompt(60, 511), poison])
    engine.add(sick, *healthy[1:])
    found = engine.run()
    ((broken,),) = (found.pop(sick.request_id),)
    assert broken.finish_reason == "error" and "not finite" in str(broken.error)
    assert max(own.end for seq_id, _, own in engine.parts() if seq_id == 1) < LAYERS, "the first part says so"
    same(found, wanted)


def test_layers_out_of_turn_are_refused() -> None:
    def wrong(layers: LayerRange | None, at: int, **changes: Any) -> None:
        engine = Watched(dataclasses.replace(WORLD, beside_decode=100))
        engine.begin(long())
        engine.until_layers(at)
        plan = engine.scheduler.schedule()
        assert plan is not None and plan.layers is not None
        rows: Sequence[Any] = (*plan.rows[:-1], msgspec.structs.replace(plan.rows[-1], **changes))
        with pytest.raises(EngineError):
            engine.runner.execute(msgspec.structs.replace(plan, layers=layers, rows=tuple(rows)))

    wrong(LayerRange(0, 1, LAYERS), 1)
    wrong(LayerRange(2, 3, LAYERS), 1)
    wrong(LayerRange(1, 1, LAYERS), 1)
    wrong(LayerRange(1, 2, LAYERS + 1), 1)
    wrong(LayerRange(1, LAYERS + 1, LAYERS + 1), 1)
    wrong(LayerRange(1, 2, LAYERS), 1, num_tokens=448)
    wrong(None, 1)


FEW = [msgspec.structs.replace(DECODING, max_tokens=4), long(0, 100, max_tokens=2)]
"""Interpreted kernels take their time."""
FEW_LAYERS = dataclasses.replace(WORLD, num_layers=2)


def run_few(world: SparseWorld) -> tuple[Watched, Outcomes]:
    engine = Watched(dataclasses.replace(world, max_num_batched_tokens=80, depth=2))
    engine.add(FEW[0])
    engine.step()
    engine.add(FEW[1])
    return engine, engine.run()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels need Triton")
def test_the_kernels_of_gpus_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = alone(FEW_LAYERS, FEW)
    monkeypatch.setattr(gpu, "takes", lambda x: True)
    engine, found = run_few(dataclasses.replace(FEW_LAYERS, backend="triton"))
    same(found, wanted)
    assert len(engine.parts()) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_the_same_and_pieces_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world, wanted = dataclasses.replace(FEW_LAYERS, backend="triton", device="cuda"), alone(FEW_LAYERS, FEW)
    same(run_few(world)[1], wanted)
    # Its kernels are compiled now: compiling waits.
    run = Pieces.run

    def watched(*args: Any) -> Any:
        with no_host_sync():
            return run(*args)

    monkeypatch.setattr(Pieces, "run", watched)
    engine, found = run_few(world)
    same(found, wanted)
    assert len(engine.parts()) == 2
