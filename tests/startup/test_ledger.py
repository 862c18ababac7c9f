"""The memory ledger: what the lines of a GPU are made of, and that they sum up to what was budgeted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from support.gpu_memory import HELD, OTHERS, PEAK, TOTAL, gpu
from support.resolving import GIB, HOPPER, a_device, on_gpu
from support.runner.harness import World, model
from support.runner.sparse_world import SparseWorld, elastic
from support.runner.sparse_world import model as sparse_model

from headrace.config import EngineConfig, MemoryLine
from headrace.resolve.memory import CUDA_SLACK
from headrace.runner.largest import largest_step
from headrace.runner.parts.media import MediaTables
from headrace.startup import profile as profiles
from headrace.startup.ledger import cache_lines, ledger, planned_ledger
from headrace.startup.profile import Profile, measure, paused_states

__all__ = ["a_device", "gpu"]

MEASURED = Profile(total=TOTAL, others=OTHERS, held=HELD, activations=5 * GIB, workspaces=GIB)


def of(lines: list[MemoryLine]) -> dict[str, int]:
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line.nbytes for line in lines}


def summed(lines: list[MemoryLine]) -> int:
    return sum(line.nbytes for line in lines)


def sized(nbytes: int) -> EngineConfig:
    """Makes a configuration with a KV cache of about ``nbytes`` bytes."""
    config = World().config()
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, nbytes=nbytes))


class Keeping:
    """A backend that keeps memory to work in, and takes more where steps are captured."""

    def __init__(self) -> None:
        self.workspaces = [torch.empty(100, dtype=torch.uint8)]

    def reserve(self, device: torch.device) -> None:
        self.workspaces.append(torch.empty(1000, dtype=torch.uint8))

    def replan(self, lengths: object) -> None: ...


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("captured", "workspaces"), [(False, 100), (True, 1100)])
def test_what_the_largest_step_takes_is_measured(captured: bool, workspaces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces apart from the rest, and the null block that the step sees is the cache's."""
    ran: list[Any] = []
    monkeypatch.setattr(profiles, "make_backends", lambda config: [Keeping()] * 2)
    monkeypatch.setattr(profiles, "_largest_step", lambda *given: ran.append(given))
    config = World().config()
    config = dataclasses.replace(
        config,
        graph_rows=(1,) if captured else (),
        args=dataclasses.replace(config.args, gpu_memory_utilization=0.5),
    )
    found = measure(model("llama"), config)
    assert len(ran) == 1
    assert found.workspaces == workspaces
    null = config.cache.arena.reserved
    assert null and found.activations == PEAK - HELD - null - workspaces
    assert (found.total, found.others, found.held) == (TOTAL // 2, OTHERS, HELD)
    assert found.room == TOTAL // 2 - OTHERS - PEAK + null - CUDA_SLACK


@pytest.mark.usefixtures("gpu")
def test_the_largest_step_runs_and_leaves_what_its_backends_keep() -> None:
    assert measure(model("llama"), World().config()).workspaces > 0


@pytest.mark.usefixtures("gpu")
def test_the_longest_piece_is_paused_beside_an_ordinary_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SparseWorld(elastic=elastic(), max_exact_tokens=600, max_num_batched_tokens=200)
    ran: list[int] = []
    monkeypatch.setattr(profiles, "_largest_step", lambda model, config, caches, backends, *tokens: ran.extend(tokens or [0]))
    measure(sparse_model(world.spec), world.config())
    assert ran == [0, 200]
    assert paused_states(world.config(), 600).nbytes == 2 * 600 * world.spec.hidden_size * 4
    assert len(largest_step(world.config(), 200)[1]) == 200 and len(largest_step(world.config())[1]) == 600


@pytest.mark.usefixtures("gpu")
def test_the_encoder_runs_beside_the_largest_step() -> None:
    ran: list[str] = []
    config = World().config()
    plain, found = (
        measure(model("llama"), config, [functools.partial(ran.append, name) for name in names]) for names in ("", "ab")
    )
    assert ran == ["a", "b"] and plain.vision == 0
    assert found.vision == PEAK - HELD + config.args.mm_encoder_cache_bytes == plain.room - found.room


def test_features_are_part_of_what_is_held_back_for_the_encoder() -> None:
    profile = dataclasses.replace(MEASURED, vision=2 * GIB)
    config = sized(profile.room)
    held = [("attention workspaces", GIB), (MediaTables.memory_label, 5000), ("slots", 70)]
    lines = ledger([MemoryLine("weights", HELD)], config, held, profile)
    assert summed(lines) == profile.total and MediaTables.memory_label not in of(lines)
    assert of(lines)["vision encoder, activations and features"] == 2 * GIB


@pytest.mark.parametrize("grown", [0, 1 << 20], ids=["as profiled", "grown"])
@pytest.mark.parametrize("unused", [0, 4096, GIB])
def test_the_lines_sum_up_to_the_budget(grown: int, unused: int) -> None:
    config = sized(MEASURED.room - unused)
    weights = [MemoryLine("weights", HELD - 300), MemoryLine("embeddings", 200)]
    held = [("KV cache", 1), ("attention workspaces", GIB + grown), ("slots", 70), ("none", 0), ("CUDA graphs", GIB)]
    lines = ledger(weights, config, held, MEASURED)
    assert summed(lines) == MEASURED.total
    told = of(lines)
    assert told["activations"] == 5 * GIB and told["attention workspaces"] == GIB + grown
    assert told["slack"] == CUDA_SLACK - GIB - 70 - grown
    assert told["tensors beside the weights"] == 100 and told["in use by others"] == OTHERS
    assert told.get("not used", 0) == unused and "none" not in told
    assert told["KV cache"] == config.cache.nbytes, "the runner's line of it is not counted twice"


def test_a_slack_that_did_not_suffice_says_so() -> None:
    held = [("attention workspaces", GIB), ("CUDA graphs", 3 * GIB)]
    lines = ledger([MemoryLine("weights", HELD)], sized(MEASURED.room), held, MEASURED)
    (slack,) = (line for line in lines if line.name == "slack")
    assert slack.nbytes == 0 and f"{3 * GIB:,} bytes were taken where {CUDA_SLACK:,}" in slack.detail
    assert summed(lines) == MEASURED.total + 3 * GIB - CUDA_SLACK


def test_on_a_cpu_there_is_what_is_held_and_nothing_else() -> None:
    config = World().config()
    lines = ledger(
        [MemoryLine("weights", 10)], config, [("KV cache", 5), ("attention workspaces", 7), ("CUDA graphs", 0)], None
    )
    assert of(lines) == {"weights": 10, "attention workspaces": 7} | of(cache_lines(config))


def test_workspaces_are_the_runners_own() -> None:
    runner = World().runner()
    assert dict(runner.memory())["attention workspaces"] == 0
    backend: Any = runner._backends[0]
    backend._workspace = torch.empty(99, dtype=torch.uint8)
    assert dict(runner.memory())["attention workspaces"] == 99, "one instance serves all layers, and is counted once"


@pytest.mark.parametrize(
    ("asked", "unused"), [({}, False), ({"kv_cache_memory": GIB}, True), ({"gpu_memory_utilization": 0.5}, False)], ids=str
)
def test_what_is_planned_sums_up_too(asked: dict[str, Any], unused: bool) -> None:
    config = on_gpu(**asked)
    lines = planned_ledger(config, HOPPER)
    assert summed(lines) == int(config.args.gpu_memory_utilization * HOPPER.total_memory)
    told = of(lines)
    assert told["slack"] == CUDA_SLACK and told["in use by others"] == 10 * GIB
    assert (told.get("not used", 0) > GIB) == unused
