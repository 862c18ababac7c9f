"""Adapters of a runner's rows: in graphs and kernel by kernel, on few places, and in plans that break the contract."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest
import torch
from support.runner.graphs import DeviceAttention, Immediate
from support.runner.harness import Engine, Outcomes, World, model, prompt, request, same, token_bytes
from support.runner.plans import new, plan, row

from headrace.config import EngineConfig
from headrace.core.request import AdapterRef, Request
from headrace.errors import EngineError
from headrace.kernels.lora import LowRank, Segment, reference
from headrace.layers.lora import LoraPart
from headrace.layers.mlp import GatedMLP
from headrace.models import registry
from headrace.models.adapters import AdapterTargets, LoadedAdapter, add_tables
from headrace.models.decoder import Decoder
from headrace.runner.part import StepExtras
from headrace.runner.parts import adapter_copies
from headrace.runner.parts.adapter_copies import PlaceCopies
from headrace.runner.parts.adapters import AdapterTables, adapter_tables
from headrace.runner.runner import ModelRunner
from headrace.runner.slots import RowArrays
from headrace.sources.adapter import AdapterFiles

RANK = 4


class Adapted(World):
    """A world whose scheduler admits two adapters."""

    def config(self) -> EngineConfig:
        config = super().config()
        return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_loras=2))


def adapted(world: World, places: int = 2) -> Decoder:
    spec = world.config().model
    made = registry.build(spec, "float32", "cpu")
    made.load_state_dict(model(world.family).state_dict())
    made.adapter_targets = add_tables(made, registry.name_table(made.spec), (), places, RANK, torch.float32, "cpu")
    return made


def load(runner: ModelRunner, decoder: Decoder, names: Sequence[str]) -> AdapterTables:
    tables = adapter_tables(runner.parts)
    for seed, name in enumerate(names):
        generator = torch.Generator().manual_seed(seed)
        found: LoadedAdapter = {
            path: [
                LoraPart(
                    0,
                    0,
                    torch.randn(RANK, layer.in_features, generator=generator),
                    torch.randn(layer.tables.ends[0], RANK, generator=generator),
                )
            ]
            for path, layer in decoder.adapter_targets.layers.items()
        }
        tables._loaded[name] = functools.partial(tables._targets.put, adapter=found)
    return tables


def requests() -> list[Request]:
    found = []
    for number, name in enumerate(("a", None, "b", "c")):
        one = request(f"r{number}", prompt(number, 3 + number), max_tokens=3, ignore_eos=True)
        found.append(msgspec.structs.replace(one, adapter=None if name is None else AdapterRef(name, name)))
    return found


def eager(world: World, asked: list[Request]) -> Outcomes:
    decoder = adapted(world)
    runner = ModelRunner(decoder, world.config(), token_bytes())
    load(runner, decoder, "abc")
    engine = Engine(world, runner)
    engine.add(*asked)
    return engine.run()


class ByPlaces:
    """The kernels' calls, which ``tests/kernels`` interprets: what they compute of places that are on the device."""

    @staticmethod
    def segments(places: torch.Tensor) -> list[Segment]:
        return [Segment(token, token + 1, place) for token, place in enumerate(places.tolist()) if place >= 0]

    @classmethod
    def shrink(cls, x: torch.Tensor, a: torch.Tensor, places: torch.Tensor, *, batch_invariant: bool) -> torch.Tensor:
        return reference.shrink(x, a, cls.segments(places))

    @classmethod
    def expand(cls, added: LowRank, places: torch.Tensor, y: torch.Tensor, *, batch_invariant: bool) -> None:
        reference.expand(dataclasses.replace(added, segments=cls.segments(places)), y)


def test_the_last_layer_computes_wanted_tokens_with_their_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    mlp = GatedMLP.forward
    monkeypatch.setattr(GatedMLP, "forward", lambda self, x: (counts.append(len(x)), mlp(self, x))[1])
    found = eager(Adapted(), requests())
    fewer = counts.copy()
    monkeypatch.setattr(Decoder, "selects", lambda *given: False)
    same(found, eager(Adapted(), requests()))
    assert sum(fewer) < sum(counts) - sum(fewer)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels of graphs need Triton")
def test_graphs_with_adapters_and_without_bring_what_kernels_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapted(max_num_batched_tokens=24, max_num_seqs=3)
    monkeypatch.setattr("headrace.runner.runner.StepGraphs", Immediate)
    expected = eager(Adapted(), requests())
    monkeypatch.setattr("headrace.runner.parts.adapters.takes", lambda tensor: True)
    monkeypatch.setattr("headrace.kernels.lora.kernels", ByPlaces)
    config = dataclasses.replace(world.config(), graph_rows=(3,), graph_prompt_tokens=(24,))
    decoder = adapted(world)
    made = ModelRunner(decoder, config, token_bytes(), backends=[DeviceAttention()] * config.model.num_layers)
    load(made, decoder, "abc")
    graphs = made._graphs
    assert isinstance(graphs, Immediate)
    graphs.models, graphs.draws = [], []
    while (count := made.capture_next()).captured < count.total:
        assert not count.failure
    engine = Engine(world, made)
    engine.add(*requests())
    with torch.inference_mode():
        found = engine.run()
        same(found, expected)
        engine.add(request("plain", prompt(0, 3), max_tokens=2, ignore_eos=True))
        engine.run()
    assert {shape.adapters for shape in graphs.models} == {True, False}
    assert graphs.models[-1].adapters is False, "steps of the base alone replay graphs without adapters"


def taken(tables: AdapterTables, slot: int, name: str | None) -> int:
    """Gives a slot a sequence with an adapter; returns the adapter's place."""
    tables.begin(plan(new=[msgspec.structs.replace(new(slot, slot, [1, 2, 3]), adapter=name)]))
    return int(tables._of_slot[slot])


@torch.inference_mode()
def test_the_place_unused_for_longest_is_given_away() -> None:
    world = Adapted()
    decoder = adapted(world)
    tables = load(ModelRunner(decoder, world.config(), token_bytes()), decoder, "abcd")
    first, second = taken(tables, 0, "a"), taken(tables, 1, "b")
    assert {first, second} == {0, 1}
    assert taken(tables, 2, "a") == first, "it is there"
    with pytest.raises(EngineError, match="more than 2 adapters"):
        taken(tables, 3, "c")
    tables.release([1])
    tables.drop("b")
    assert taken(tables, 3, "c") == second
    tables.release([0, 2, 3])
    assert taken(tables, 0, "c") == second
    tables.release([0])
    assert taken(tables, 0, "d") == first, "c was used later than a"
    with pytest.raises(EngineError, match="the adapter b, which is not loaded"):
        taken(tables, 1, "b")


class Counted(PlaceCopies):
    """Copies at once, and counts."""

    def _open(self) -> None:
        self.sent, self.waits = 0, 0
        self.emptied: list[int] = []

    def _pin(self, piece: torch.Tensor) -> torch.Tensor:
        return piece.clone()

    def _copy(self, target: torch.Tensor, piece: torch.Tensor) -> None:
        assert piece.nbytes <= adapter_copies.PIECE
        target.copy_(piece)
        self.sent += 1

    def _wait_for_steps(self, place: int) -> None:
        self.emptied.append(place)

    def _make_steps_wait(self) -> None:
        self.waits += 1


class AtOnce(Executor):
    """Is done with what it is given."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **named))
        return done


@torch.inference_mode()
def test_adapters_go_to_a_gpu_in_pieces_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapted()
    decoder = adapted(world)
    tables = load(ModelRunner(decoder, world.config(), token_bytes()), decoder, "abc")
    found = {name: tables._loaded.pop(name).keywords["adapter"] for name in "abc"}
    monkeypatch.setattr(AdapterTargets, "read", lambda self, files, dtype: found[files.digest])
    monkeypatch.setattr(adapter_copies, "PIECE", tables._targets.memory[0].nbytes // (2 * adapter_copies.AT_ONCE + 3))
    monkeypatch.setattr(tables, "_reader", AtOnce())
    copies = tables._copies = Counted(tables._targets.memory)
    image = {name: tables._targets.image(adapter) for name, adapter in found.items()}
    a, b, c = (AdapterFiles(name, name, ()) for name in "abc")

    def sent(files: AdapterFiles) -> tuple[bool, int]:
        before = copies.sent
        return tables.load(files, wait=False), copies.sent - before

    assert sent(a) == (False, adapter_copies.AT_ONCE)
    assert sent(a) == (False, adapter_copies.AT_ONCE)
    done, rest = sent(a)
    assert done and 0 < rest < adapter_copies.AT_ONCE and not copies.waits
    place, before = taken(tables, 0, "a"), copies.sent
    assert torch.equal(tables._targets.memory[place], image["a"])
    assert taken(tables, 1, "a") == place and (copies.sent, copies.waits) == (before, 1), "the first step waits, and no other"
    # Another on its way keeps its place until a sequence needs it.
    assert sent(b) == (False, adapter_copies.AT_ONCE)
    assert sent(c) == (True, 0)
    other = taken(tables, 2, "c")
    assert other != place and torch.equal(tables._targets.memory[other], image["c"]) and copies.waits == 2
    assert sent(b) == (True, 0)
    tables.release([0, 1])
    assert taken(tables, 0, "b") == place and torch.equal(tables._targets.memory[place], image["b"]) and copies.waits == 3
    assert copies.emptied == [place, other, other, place], "steps in flight may read what they held"


@torch.inference_mode()
def test_neighbours_with_one_adapter_are_one_segment() -> None:
    world = Adapted()
    decoder = adapted(world)
    tables = load(ModelRunner(decoder, world.config(), token_bytes()), decoder, "ab")
    a, _, _, _, b = [taken(tables, slot, name) for slot, name in enumerate(("a", "a", None, "a", "b"))]
    extras = StepExtras()
    tables.take(RowArrays(plan(*(row(slot, slot, 0, 1 + slot) for slot in range(5)))), extras)
    assert [tuple(segment) for segment in extras.segments] == [(0, 3, a), (6, 10, a), (10, 15, b)] and not extras.eager
