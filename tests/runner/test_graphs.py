"""Steps as graphs bring what steps kernel by kernel bring. Without a GPU, a replay runs what a capture would have recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.runner.features import FEATURES
from support.runner.graphs import PROMPTS, ROWS, DeviceAttention, Immediate, runner
from support.runner.harness import VOCAB, Engine, Outcomes, World, model, prompt, request, same, serve, token_bytes
from support.runner.plans import blocks_for, masked, new, plan, row

from headrace.core.plan import NewSequence, Row, SamplePlan
from headrace.core.request import Request
from headrace.errors import EngineError
from headrace.runner import graphs as graphs_module
from headrace.runner.graphs import Captured, SampleShape, Shape
from headrace.runner.inputs import PROMPT_ROWS
from headrace.runner.runner import ModelRunner
from headrace.sampling.feature import Feature, Indices, LogitsRows
from headrace.sampling.sampler import NOTHING_ALLOWED

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels of graphs need Triton")

PLAIN = [msgspec.structs.replace(FEATURES[name], max_tokens=6) for name in ("greedy", "short", "long", "drawn")]


def through_graphs(
    world: World, requests: list[Request], monkeypatch: pytest.MonkeyPatch, arriving: bool = False
) -> tuple[Outcomes, Immediate]:
    made, graphs = runner(world, monkeypatch)
    engine = Engine(world, made)
    if not arriving:
        engine.add(*requests)
    with torch.inference_mode():
        outcomes = engine.run(arrivals=requests if arriving else ())
    return outcomes, graphs


def test_launches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 9 tokens in room for 1 + 16; then 3 rows in room for 6; the prompt that gives logprobs is not a graph."""
    world = World()
    made, graphs = runner(world, monkeypatch)
    engine = Engine(world, made)
    engine.add(*[request(f"r{number}", prompt(number, 3), max_tokens=3, ignore_eos=True) for number in range(3)])
    with torch.inference_mode():
        engine.run()
        found = [(result.replayed, result.padding_tokens) for result in engine.results]
        engine.add(msgspec.structs.replace(FEATURES["prompt logprobs"], max_tokens=1))
        engine.run()
    assert found == [(True, shape.tokens - tokens) for shape, tokens in zip(graphs.models, (9, 3, 3), strict=True)]
    assert found[1:] == [(True, 3)] * 2
    assert (engine.results[-1].replayed, engine.results[-1].padding_tokens) == (False, 0)


@pytest.mark.parametrize(("family", "depth"), [("llama", 1), ("qwen3", 2), ("delta rule", 2)])
def test_features_arriving(family: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside decode rows, in chunks; draws by graph and draws by the sampler."""
    world = World(family, max_num_batched_tokens=24, max_num_seqs=6, depth=depth)
    kept = ("long", "drawn", "penalties", "bad words", "min tokens", "logprobs", "prompt logprobs", "samples")
    short = [msgspec.structs.replace(FEATURES[name], max_tokens=5) for name in kept]
    found, graphs = through_graphs(world, short, monkeypatch, arriving=True)
    same(found, serve(World(family), short))
    assert 0 < len(graphs.draws) < len(graphs.models)
    assert any(shape.decode_rows and shape.prompt_tokens for shape in graphs.models)


def test_plain_requests_are_drawn_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, graphs = through_graphs(World(), PLAIN, monkeypatch)
    same(found, serve(World(), PLAIN))
    assert len(graphs.draws) >= len(graphs.models), "a prompt that is too long for a graph is drawn by one all the same"
    assert graphs.models[-1].prompt_tokens == 0


def test_many_rows_are_drawn_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs in a graph for all rows, and the sampler in one for the last few."""
    monkeypatch.setattr(graphs_module, "_MOST_LOGITS", 4 * VOCAB)
    requests = [request(f"r{count}", prompt(count, 3), max_tokens=count + 1, ignore_eos=True) for count in range(6)]
    found, graphs = through_graphs(World(), requests, monkeypatch)
    same(found, serve(World(), requests))
    assert max(shape.decode_rows for shape in graphs.models) == 6 and 1 < max(draw.logits_rows for draw in graphs.draws) <= 4


def test_filters_are_drawn_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that have none; a shape without filters serves those that are left when the others have ended."""
    asked: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 1}, {"top_k": 20, "top_p": 0.9}, {}]
    requests = [
        request(f"f{number}", prompt(number, 4), max_tokens=6 if not kind else 3, temperature=0.8, seed=number, **kind)
        for number, kind in enumerate(asked)
    ]
    found, graphs = through_graphs(World(), requests, monkeypatch)
    same(found, serve(World(), requests))
    assert len(graphs.draws) == 6
    assert graphs.draws[0].filters and not graphs.draws[-1].filters


def test_a_prompt_that_gives_logprobs_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    own = msgspec.structs.replace(FEATURES["prompt logprobs"], max_tokens=3)
    found, graphs = through_graphs(World(), [own], monkeypatch)
    same(found, serve(World(), [own]))
    assert graphs.models and not any(shape.prompt_tokens for shape in graphs.models)


def test_preempted_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and blocks change hands while the rows of a shape stay as many."""
    world = World(num_blocks=12, max_num_seqs=4, depth=2, caching=True)
    requests = [request(f"r{number}", prompt(number, 9), max_tokens=9, ignore_eos=True) for number in range(5)]
    found, _ = through_graphs(world, requests, monkeypatch)
    same(found, serve(World(), requests))


def test_a_broken_row_is_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours get what they would have got, and its blocks are cleared before others have them."""
    made, _ = runner(World(), monkeypatch)
    weights = model("llama").embed_tokens.weight
    poison, token = torch.full_like(weights[5], torch.nan), weights[5].clone()
    fine = request("fine", [7, 8, 9], max_tokens=6, ignore_eos=True)
    try:
        engine = Engine(World(), made)
        weights.data[5] = poison
        engine.add(request("broken", [4, 5, 6], max_tokens=6), fine)
        with torch.inference_mode():
            outcomes = engine.run()
    finally:
        weights.data[5] = token
    assert outcomes["broken"][0].error is not None and outcomes["broken"][0].token_ids == []
    same({"fine": outcomes["fine"]}, serve(World(), [fine]))


def test_shapes_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than any shape has: kernel by kernel."""
    world = World(max_num_seqs=40, num_blocks=900)
    many = [request(f"r{number}", prompt(number, 3), max_tokens=3, ignore_eos=True) for number in range(PROMPT_ROWS + 2)]
    found, graphs = through_graphs(world, many, monkeypatch)
    same(found, serve(world, many))
    assert not graphs.models and not graphs.draws


def test_masks_behind_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with masks is drawn by a graph of its own."""
    made, graphs = runner(World(), monkeypatch)
    tokens = [4, 5, 6]
    words = bytes([0, 1 << 3, 0, 0]) + bytes(16)
    with torch.inference_mode():
        for step, start in ((1, 0), (2, 3), (3, 4)):
            first = [new(7, 0, tokens)] if not start else []
            blocks = blocks_for(8) if not start else []
            handle = made.execute(
                plan(row(7, 0, start, len(tokens) - start, blocks), new=first, decode=int(start > 0), step=step)
            )
            made.sample(handle, masked(step, {7: [words]} if step == 2 else {}))
            tokens += made.collect(handle).token_ids[0]
    assert tokens[4] == 11 and len(tokens) == 6
    assert len(graphs.models) == 3
    assert [shape.masked for shape in graphs.draws] == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_beside_others_are_drawn_as_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Three constrained rows of which two share a mask, and one without; then one that may sample nothing."""
    replayed, graphs = runner(World(), monkeypatch)
    eager = ModelRunner(model(World().family), World().config(), token_bytes())
    some, other = (np.array([7 << place + number for number in range(VOCAB // 32)], dtype=np.uint32) for place in (3, 9))
    masks = {1: some.tobytes(), 2: other.tobytes(), 3: some.tobytes()}
    found = []
    for made in (replayed, eager):
        news = [new(seq, seq, [4, 5, 6 + seq], temperature=temperature, seed=seq) for seq in range(4)]
        news = [msgspec.structs.replace(each, constrained=each.seq_id in masks) for each in news]
        results = []
        with torch.inference_mode():
            rows = [row(seq, seq, 0, 3, blocks_for(8, first=3 * seq)) for seq in range(4)]
            handle = made.execute(plan(*rows, new=news, step=1))
            made.sample(handle, masked(1, {seq: [mask] for seq, mask in masks.items()}))
            results.append(made.collect(handle))
            rows = [row(seq, seq, 3, 1, []) for seq in range(4)]
            handle = made.execute(plan(*rows, decode=4, step=2))
            nothing = masks | {2: bytes(len(masks[2]))}
            made.sample(handle, masked(2, {seq: [mask] for seq, mask in nothing.items()}))
            results.append(made.collect(handle))
            handle = made.execute(plan(*[row(seq, seq, 4, 1, []) for seq in range(4)], decode=4, step=3))
            with pytest.raises(EngineError, match="no token mask"):
                made.sample(handle, SamplePlan(3))
        found.append([(result.token_ids, result.errors) for result in results])
    assert found[0] == found[1]
    assert [shape.masked for shape in graphs.draws] == [True], "a mask that bans all is sampled kernel by kernel"
    assert [*found[0][1][1].values()] == [NOTHING_ALLOWED]


class Forcing(Feature):
    """A sampling feature that the package does not know: sequences whose seed is 5 draw token 77."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.seed == 5:
            self.use(slot)
        return seq.seed == 5

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        logits[users.tolist(), 77] = 1e9
        return True


def test_a_new_feature_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph draws only for steps of which no row has it."""
    made, graphs = runner(World(), monkeypatch)
    made.sampler._features = (*made.sampler._features, Forcing(made.config.scheduler.max_num_seqs))
    engine = Engine(World(), made)
    plain = request("plain", prompt(1, 4), max_tokens=5, ignore_eos=True)
    engine.add(plain, request("forced", prompt(2, 4), max_tokens=3, seed=5, ignore_eos=True))
    with torch.inference_mode():
        outcomes = engine.run()
    assert outcomes["forced"][0].token_ids == [77] * 3
    assert len(graphs.models) == 5 and len(graphs.draws) == 2
    same({"plain": outcomes["plain"]}, serve(World(), [plain]))


def serves_as_usual(world: World, made: ModelRunner, requests: Sequence[Request], **run: Any) -> Engine:
    """Serves the requests with a runner that has graphs, and compares with one that has none."""
    engine = Engine(world, made)
    engine.add(*requests)
    with torch.inference_mode():
        same(engine.run(**run), serve(world, requests))
    return engine


def uncaptured(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, Immediate]:
    monkeypatch.setattr("headrace.runner.runner.StepGraphs", Immediate)
    config = dataclasses.replace(World().config(), graph_rows=ROWS, graph_prompt_tokens=PROMPTS)
    backends: list[Any] = [DeviceAttention()] * config.model.num_layers
    made = ModelRunner(model("llama"), config, token_bytes(), backends=backends)
    graphs = made._graphs
    assert isinstance(graphs, Immediate)
    graphs.models, graphs.draws = [], []
    return made, graphs


def test_the_first_graphs_stand_in_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four cover every plain and filtered step; those with masks come last."""
    made, graphs = uncaptured(monkeypatch)
    order = list(graphs.shapes())
    assert order[:4] == [Shape(6, 0), SampleShape(6, False), Shape(6, 24), SampleShape(6, True)]
    assert len(set(order)) == len(order) == graphs.count().total
    masked = [shape for shape in order if isinstance(shape, SampleShape) and shape.masked]
    assert order[-len(masked) :] == masked
    for number in range(4):
        assert made.capture_next()[:2] == (number + 1, len(order))
    engine = serves_as_usual(World(), made, [request("r", prompt(1, 4), max_tokens=3, ignore_eos=True)])
    assert [result.replayed for result in engine.results] == [True] * 3
    assert graphs.models == [Shape(6, 24), Shape(6, 0), Shape(6, 0)] and graphs.draws == [SampleShape(6, False)] * 3


def test_first_steps_run_without_being_captured_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose graphs are captured first."""
    made, graphs = uncaptured(monkeypatch)
    ran: list[Shape | SampleShape] = []
    run = graphs._run
    monkeypatch.setattr(graphs, "_run", lambda shape: (ran.append(shape), run(shape)))
    assert made.run_first() == 4 and ran == list(itertools.islice(graphs.shapes(), 4))
    assert made.graphs().captured == 0 and not graphs._compiled
    monkeypatch.undo()
    serves_as_usual(World(), made, [request("r", prompt(1, 4), max_tokens=3, ignore_eos=True)])


def test_a_missing_graph_is_captured_by_the_second_step_that_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a larger graph the first step launches the kernels of the missing one; tokens stay the same."""
    made, graphs = uncaptured(monkeypatch)
    engine = serves_as_usual(World(), made, [request("r", prompt(1, 4), max_tokens=5, ignore_eos=True)])
    assert [result.replayed for result in engine.results] == [False, False, True, True, True]
    assert graphs.models == [Shape(1, 0)] * 3 and graphs.draws == [SampleShape(1, False)] * 4
    assert made.graphs().captured == 2


def test_steps_with_a_stand_in_capture_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that most steps have missed is compiled and captured, each after a number of steps that replay a larger one."""
    monkeypatch.setattr("headrace.runner.graphs.STAND_INS", 4)
    made, graphs = uncaptured(monkeypatch)
    for _ in range(4):
        made.capture_next()
    serves_as_usual(World(), made, [request("r", prompt(1, 4), max_tokens=12, ignore_eos=True)])
    # A step misses two graphs, the model's and that of sampling; the prompt's own graph is missed once.
    assert [shape for shape in graphs.models if shape.decode_rows == 1] != []
    assert graphs.models[1] == Shape(6, 0) and graphs.models[-1] == Shape(1, 0)
    assert Shape(0, 16) not in graphs._captured and made.graphs().captured == 6


def test_rows_with_drafts_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three tokens in room for two; rows of unequal length run kernel by kernel."""
    world = World(max_num_seqs=8, decode_tokens=3)
    made, graphs = runner(world, monkeypatch)
    eager = world.runner()
    known = [prompt(1, 6), prompt(2, 9)]
    blocks = [blocks_for(40), blocks_for(40, 11)]
    prompts = [row(10 + slot, slot, 0, len(own), blocks[slot]) for slot, own in enumerate(known)]
    equal = [Row(10 + slot, slot, len(own), 3, 3, ((),), (5, 9)) for slot, own in enumerate(known)]
    # The drafts are wrong: a row keeps its first token.
    unequal = [Row(10, 0, 7, 2, 2, ((),), (7,)), Row(11, 1, 10, 1, 1, ((),))]
    plans = [
        plan(*prompts, new=[new(10 + slot, slot, own) for slot, own in enumerate(known)], step=1),
        plan(*equal, decode=2, step=2),
        plan(*unequal, decode=2, step=3),
    ]
    for each in plans:
        with torch.inference_mode():
            found, expected = (
                (one.sample(step := one.execute(each), SamplePlan(each.step)), one.collect(step))[1] for one in (made, eager)
            )
        assert (found.seq_ids, found.token_ids) == (expected.seq_ids, expected.token_ids)
        assert found.replayed == (each.step != 3) and [len(own) for own in found.token_ids] == [1, 1]
    assert graphs.models == [Shape(0, 16), Shape(2, 0, 3)] and {Shape(6, 0), Shape(6, 0, 3)} <= set(graphs.shapes())


def test_graphs_that_are_dropped_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No old graph is alive while new ones are captured, so that the peak is no higher, and these give the same."""
    world = World(family="delta rule")
    made, graphs = runner(world, monkeypatch)
    old = [weakref.ref(captured) for captured in graphs._captured.values()]
    alive, capture = list[int](), graphs._capture

    def counting(shape: Shape | SampleShape) -> Captured:
        alive.append(sum(one() is not None for one in old))
        return capture(shape)

    monkeypatch.setattr(graphs, "_capture", counting)
    made.drop_graphs()
    assert (made.graphs().captured, graphs.nbytes) == (0, 0)
    while (count := made.capture_next()).captured < count.total:
        pass
    assert alive == [0] * len(old)
    engine = serves_as_usual(world, made, PLAIN[:2])
    assert all(result.replayed for result in engine.results)


def test_captures_between_steps_leave_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are padding: no live state, snapshot, KV or null block changes."""
    world = World(family="delta rule", depth=2, caching=True)
    made, _ = runner(world, monkeypatch)
    blocks = made._blocks
    assert blocks is not None

    def capture(step: int) -> None:
        if step % 4 == 3:
            before = blocks.arena.clone()
            made.drop_graphs()
            while (count := made.capture_next()).captured < count.total:
                pass
            assert torch.equal(blocks.arena, before)

    serves_as_usual(world, made, PLAIN, before_step=capture)


def test_a_failed_capture_leaves_the_graphs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is captured, steps without a graph run kernel by kernel, and the reason names the module."""

    class Failing(Immediate):
        def _capture(self, shape: Shape | SampleShape) -> Captured:
            if len(self._captured) == 2:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            return super()._capture(shape)

    monkeypatch.setattr("headrace.runner.runner.StepGraphs", Failing)
    config = dataclasses.replace(World().config(), graph_rows=ROWS, graph_prompt_tokens=PROMPTS)
    made = ModelRunner(model("llama"), config, token_bytes(), backends=[DeviceAttention()] * config.model.num_layers)
    graphs = made._graphs
    assert isinstance(graphs, Failing) and not made.graphs().failure
    graphs.models, graphs.draws = [], []
    total = len(list(graphs.shapes()))
    assert [made.capture_next()[:2] for _ in range(4)] == [(1, total), (2, total), (2, 2), (2, 2)]
    assert made.graphs().failure.endswith("RuntimeError: operation not permitted when stream is capturing")
    engine = serves_as_usual(World(), made, [request("r", prompt(1, 4), max_tokens=3, ignore_eos=True)])
    assert [result.replayed for result in engine.results] == [False, True, True]
