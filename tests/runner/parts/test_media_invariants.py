"""The invariants with pictures in the batch: nothing changes what a request gets, and features are freed after use."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.runner.graphs import runner as graph_runner
from support.runner.harness import (
    MEDIA_IN_FP8,
    SPECS,
    WITH_MEDIA,
    Encoder,
    Engine,
    Outcomes,
    World,
    alone,
    media_of,
    prompt,
    request,
    same,
    serve,
)

from headrace.core.media import ItemInputs, TensorData
from headrace.core.request import Request
from headrace.core.sequence import Sequence
from headrace.kernels.inputs import RowTensors
from headrace.kv import Item
from headrace.models.vision.interface import EncodedItem, encoded_item
from headrace.multimodal.processor import Run, rope_positions
from headrace.runner.parts.media import _token_slots
from headrace.runner.replay import replay

HIDDEN = 32
PLACEHOLDER = 5
Place = tuple[int, tuple[int, int, int], int, bool]
"""Start in the prompt, block of tokens, number of the content, whether it comes encoded."""

PROMPTS: dict[str, tuple[int, list[Place]]] = {
    "first": (30, [(0, (1, 2, 4), 1, False)]),
    "last": (23, [(15, (1, 4, 2), 2, False)]),
    "two": (44, [(5, (1, 3, 3), 3, False), (17, (1, 1, 8), 1, True)]),
    "beside": (40, [(9, (1, 2, 5), 4, True), (19, (1, 2, 5), 4, True)]),
    "long": (52, [(3, (4, 2, 2), 5, False), (30, (1, 2, 3), 6, False)]),
    "text": (27, []),
    "generates": (19, [(4, (2, 2, 2), 7, False)]),
}
"""Name -> length and items of the prompt. Contents 1 and 4 are there twice."""


def content(number: int, rows: int, deep: bool, encoded: bool) -> dict[str, TensorData]:
    values = np.random.default_rng(number).normal(size=(rows, HIDDEN)).astype(np.float32)

    def data(array: np.ndarray) -> TensorData:
        array = np.ascontiguousarray(array, dtype=np.float32)
        return TensorData("float32", array.shape, memoryview(array.tobytes()))

    if not encoded:
        return {"pixels": data(values)} | ({"deep": data(values[:0])} if deep else {})
    return {"features": data(np.tanh(values))} | ({"deepstack": data(np.cos(values)[None])} if deep else {})


def with_pictures(family: str, name: str, index: int, **sampling: Any) -> Request:
    spec = SPECS[family]
    assert spec.vision is not None
    length, places = PROMPTS[name]
    tokens = prompt(index, length)
    items, media, runs = [], [], []
    both, deep, end = spec.vision.bidirectional, bool(spec.vision.deepstack_layers), 0
    for start, block, number, encoded in places:
        rows = int(np.prod(block))
        begin = start - (spec.vision.own_experts and start > end)  # A marker before the features.
        end = start + rows
        tokens[start : start + rows] = [PLACEHOLDER] * rows
        name_of = f"{number}{'e' * encoded}"
        items.append(Item(begin, end, both, both, name_of, 0 if encoded else rows))
        media.append(ItemInputs("image", ((start - begin, rows),), content(number, rows, deep, encoded), encoded))
        runs.append(Run(start, rows, block, 3.0 if block[0] > 1 else 1.0))
    made = request(name, tokens, **sampling)
    rope = rope_positions(length, runs) if spec.sectioned_rope and runs else None
    return msgspec.structs.replace(made, items=tuple(items), media=tuple(media), rope=rope)


@functools.cache
def requests(family: str) -> list[Request]:
    own: dict[str, dict[str, Any]] = {
        "two": {"logprobs": 2, "max_tokens": 20, "ignore_eos": True},
        "long": {"temperature": 1.0, "seed": 4},
        "beside": {"n": 2, "temperature": 0.9, "seed": 5},
        "generates": {"logit_bias": {PLACEHOLDER: 40.0}, "max_tokens": 9, "ignore_eos": True, "logprobs": 0},
        "last": {"prompt_logprobs": 1},
    }
    return [with_pictures(family, name, index, **own.get(name, {})) for index, name in enumerate(PROMPTS)]


@functools.cache
def expected(family: str) -> Outcomes:
    return alone(World(family), requests(family))


def shuffled(family: str, seed: int) -> list[Request]:
    mixed = requests(family).copy()
    random.Random(seed).shuffle(mixed)
    return mixed


def finished(engine: Engine) -> None:
    """No slot holds features any more."""
    media = media_of(engine.runner)
    # The last plan's slots are released by the next one.
    media.release(list(media._slots))
    assert media.cache.num_used == 0


families = pytest.mark.parametrize("family", WITH_MEDIA)
slow = pytest.mark.slow


def quick(names: Iterable[str], one: str) -> list[Any]:
    """All but one are slow."""
    return [name if name == one else pytest.param(name, marks=slow) for name in names]


@families
def test_pictures_do_something(family: str) -> None:
    """Equality of what does nothing would prove nothing: content, positions and masks all count."""
    outcomes = expected(family)
    assert all(outcome.error is None for samples in outcomes.values() for outcome in samples)
    assert outcomes["generates"][0].token_ids == [PLACEHOLDER] * 9
    own = next(each for each in requests(family) if each.request_id == "two")
    tensors = content(9, 8, "deepstack" in own.media[1].tensors, True)
    media = (own.media[0], msgspec.structs.replace(own.media[1], tensors=tensors))
    unmasked = tuple(msgspec.structs.replace(item, bidirectional=False) for item in own.items)
    changed = [
        msgspec.structs.replace(own, media=media),
        msgspec.structs.replace(own, items=unmasked) if own.rope is None else msgspec.structs.replace(own, rope=None),
    ]
    for each in changed:
        found = serve(World(family), [each])["two"][0]
        assert [entry.logprobs for entry in found.logprobs] != [entry.logprobs for entry in outcomes["two"][0].logprobs]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="the kernels of graphs need Triton")
@pytest.mark.parametrize(
    "family", quick([name for name in WITH_MEDIA if SPECS[name].sectioned_rope], "positions in three sections")
)
def test_padding_rows_of_a_graph_have_positions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of a sequence with pictures are behind those of its tokens; those of padding rows must not be negative."""
    world = World(family)
    made, graphs = graph_runner(world, monkeypatch)
    least: list[int] = []
    forward = made._forward._model.forward

    def noted(inputs: Any, context: Any) -> torch.Tensor:
        least.append(int(inputs.rope_positions.min()))
        return forward(inputs, context)

    monkeypatch.setattr(made._forward._model, "forward", noted)
    three = [msgspec.structs.replace(with_pictures(family, "beside", 0, max_tokens=4), request_id=str(i)) for i in range(3)]
    assert three[0].rope is not None and three[0].rope.delta < 0
    engine = Engine(world, made)
    engine.add(*three)
    with torch.inference_mode():
        same(engine.run(), serve(world, three))
    assert graphs.models and graphs.models[0].rows > 3, "three rows and padding"
    assert min(least) == 0


@families
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow)])
def test_company_and_order_change_nothing(family: str, seed: int) -> None:
    engine = Engine(World(family, max_num_seqs=32))
    engine.add(*shuffled(family, seed))
    same(engine.run(), expected(family))
    finished(engine)
    assert isinstance(media_of(engine.runner)._encoder, Encoder)
    assert media_of(engine.runner)._encoder.num_encoded == 6, "one picture is in two prompts"


@families
@pytest.mark.parametrize("budget", [10, pytest.param(13, marks=slow), 25])
def test_chunks_change_nothing(family: str, budget: int) -> None:
    engine = Engine(World(family, max_num_batched_tokens=max(budget, 16) if family == "both ways" else budget))
    engine.add(*shuffled(family, budget))
    same(engine.run(), expected(family))
    finished(engine)


@families
@pytest.mark.parametrize("depth", [pytest.param(1, marks=slow), 2])
def test_preemption_at_any_step_changes_nothing(family: str, depth: int) -> None:
    engine = Engine(World(family, depth=depth, max_num_batched_tokens=24))
    chance = random.Random(depth)

    def preempt(step: int) -> None:
        running: list[Sequence] = list(engine.scheduler._running)
        if running and step % 2 == 0 and step < 60:
            engine.scheduler._preempt(chance.choice(running))

    engine.add(*requests(family))
    same(engine.run(before_step=preempt), expected(family))
    assert engine.scheduler.stats().num_preemptions > 15
    finished(engine)


@families
def test_preemption_for_want_of_blocks_changes_nothing(family: str) -> None:
    engine = Engine(World(family, num_blocks=22, depth=2, max_num_batched_tokens=24))
    engine.add(*shuffled(family, 1))
    same(engine.run(), expected(family))
    finished(engine)


@families
def test_cache_hits_change_nothing(family: str) -> None:
    engine = Engine(World(family, caching=True, num_blocks=900))
    for each in shuffled(family, 0):
        engine.add(each)
        engine.run()
    same(engine.outcomes, expected(family))
    engine.add(*shuffled(family, 1))
    same(engine.run(), expected(family))
    assert engine.scheduler.stats().prefix_hit_tokens > 50
    assert media_of(engine.runner)._encoder.num_encoded == 6
    finished(engine)


@families
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=slow)])
def test_a_reused_slot_is_as_new(family: str, slots: int) -> None:
    same(serve(World(family, max_num_seqs=slots), shuffled(family, slots)), expected(family))


@families
def test_padding_and_null_blocks_are_never_written(family: str) -> None:
    engine = Engine(World(family, num_blocks=24, depth=2))
    engine.add(*shuffled(family, 0))
    engine.run()
    assert all(not cache.rows[0].any() for cache in engine.runner._caches)


@families
def test_abort_at_any_step_frees_every_block(family: str) -> None:
    for step in range(0, 12, 6):
        engine = Engine(World(family, depth=2, num_blocks=60, max_num_batched_tokens=20, caching=True))
        gone = set(random.Random(step).sample(list(PROMPTS), 3))

        def abort(now: int, step: int = step, gone: set[str] = gone, engine: Engine = engine) -> None:
            if now == step:
                for name in gone:
                    engine.scheduler.abort(name)

        engine.add(*requests(family))
        outcomes = engine.run(before_step=abort)
        stayed = {name: samples for name, samples in outcomes.items() if name not in gone}
        same(stayed, {name: expected(family)[name] for name in stayed})
        finished(engine)


@pytest.mark.parametrize("family", quick(WITH_MEDIA, "positions in three sections"))
def test_a_replay_equals_the_run(family: str, tmp_path: Path) -> None:
    path = tmp_path / "plans"
    engine = Engine(World(family, record=str(path), depth=2, num_blocks=30, max_num_batched_tokens=24, caching=True))
    engine.add(*shuffled(family, 1))
    engine.run()
    engine.runner.close()
    again = list(replay(path, World(family, depth=2, num_blocks=30, max_num_batched_tokens=24, caching=True).runner()))
    timeless = {"forward_seconds": 0.0, "sample_seconds": 0.0}
    assert [msgspec.structs.replace(result, **timeless) for result in again] == [
        msgspec.structs.replace(result, **timeless) for result in engine.results
    ]


def broken(items: Listing[ItemInputs]) -> None:
    raise ValueError("too small")


@pytest.mark.parametrize("family", quick(MEDIA_IN_FP8, "both ways, KV in FP8"))
def test_a_cache_in_fp8_changes_as_little(family: str) -> None:
    """Numbers are rounded by token, whatever is beside it: chunks, preemption and other requests still change nothing."""
    for limits in ({"max_num_batched_tokens": 25, "num_blocks": 22, "depth": 2}, {"caching": True, "max_num_seqs": 3}):
        same(serve(World(family, **limits), shuffled(family, 3)), expected(family))
    plain = expected(next(name for name in WITH_MEDIA if family.startswith(name)))
    found, exact = (outcomes["two"][0].logprobs[0].logprobs for outcomes in (expected(family), plain))
    assert found != exact


@families
def test_a_picture_that_breaks_the_encoder_fails_alone(family: str) -> None:
    engine = Engine(World(family))
    encoder = media_of(engine.runner)._encoder
    usual = encoder.encode

    def encode(items: Listing[ItemInputs]) -> object:
        if any(item.num_rows == 9 for item in items):
            broken(items)
        return usual(items)

    encoder.encode = encode
    engine.add(*requests(family))
    outcomes = engine.run()
    (failed,) = outcomes.pop("two")
    assert failed.finish_reason == "error" and "the image cannot be encoded: ValueError: too small" in str(failed.error)
    same(outcomes, {name: samples for name, samples in expected(family).items() if name != "two"})
    finished(engine)


def test_tokens_of_padding_rows_have_a_slot_that_exists() -> None:
    """Rows padded to a captured size: each token takes its own slot's delta, tokens of no row any."""
    slots = torch.tensor([3, -1, 7, -1], dtype=torch.int32)
    rows = RowTensors(slots, torch.tensor([0, 1, 1, 4, 4], dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    found = _token_slots(rows, 6)
    assert found[:4].tolist() == [3, 7, 7, 7] and (found >= 0).all()


class Delayed:
    """A side stream whose results are not there before it is joined."""

    def __init__(self, device: torch.device) -> None:
        self._open = False
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        self._open = True
        yield
        self._open = False

    def launched(self, value: torch.Tensor) -> torch.Tensor:
        assert self._open
        result = torch.full_like(value, torch.nan)
        self.pending[id(result)] = result, value
        return result

    def join(self, tensors: Iterable[torch.Tensor]) -> None:
        assert not self._open
        for tensor in tensors:
            result, value = self.pending.pop(id(tensor))
            result.copy_(value)


@families
def test_features_are_used_once_they_are_there(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runner.parts.media.SideStream", Delayed)
    engine = Engine(World(family, max_num_batched_tokens=64))
    media: Any = media_of(engine.runner)
    side, encode = media._side, media._encoder.encode

    def delayed(item: EncodedItem) -> EncodedItem:
        return EncodedItem(*(None if part is None else side.launched(part) for part in item))

    monkeypatch.setattr(media._encoder, "encode", lambda items: [delayed(item) for item in encode(items)])
    monkeypatch.setattr("headrace.runner.parts.media.encoded_item", lambda *given: delayed(encoded_item(*given)))
    engine.add(*requests(family))
    same(engine.run(), expected(family))
    assert not side.pending
