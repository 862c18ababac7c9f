"""State blocks in the runner: what a step reads of blocks that others have left, and steps without a sequence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.runner.harness import Engine, World, model, prompt, request, same, serve

from headrace.cache.planes import allocate
from headrace.core.plan import StepPlan
from headrace.errors import EngineError
from headrace.kernels.inputs import RowTensors
from headrace.kv import StateOp
from headrace.runner.build import make_backends
from headrace.runner.parts.states import StateTables
from headrace.runner.slots import Bounds
from headrace.startup.profile import _largest_step

FAMILIES = ("short convolutions", "delta rule")
REQUESTS = [request(f"{seed}", prompt(seed, 10 + 9 * seed), ignore_eos=True) for seed in range(5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_read_of_what_a_block_held(family: str) -> None:
    """Every state begins with zeros or as a copy, whatever its bytes were."""
    expected = serve(World(family), REQUESTS)
    engine = Engine(World(family, caching=True))
    blocks, arena = engine.runner._blocks, engine.world.config().cache.arena
    assert blocks is not None
    states = engine.scheduler.kv.states
    assert states is not None
    for each in REQUESTS * 2:
        for block in states.pool.blocks:
            if states.pool.is_free(block) and states.pool.index.key_of(block) is None:
                blocks.block(len(arena.block_bytes) - 1, block).fill_(0xFF)
        engine.add(each)
        engine.run()
    same(engine.outcomes, expected)
    assert not blocks.arena[: arena.reserved].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_step_needs_no_states(family: str) -> None:
    config = World(family).config()
    few = dataclasses.replace(config.cache, nbytes=config.cache.arena.reserved)
    caches = allocate(few, config.model, "cpu", few.dtype)
    with torch.inference_mode():
        _largest_step(model(family), config, caches, make_backends(config))
    assert not caches[0].rows.any()


def test_operations_on_blocks_that_do_not_exist_are_refused() -> None:
    runner = World("short convolutions").runner()
    for block in (0, -1, 10**6):
        with pytest.raises(EngineError, match="has no block"):
            runner.execute(StepPlan(1, (), (), (), 0, state_before=(StateOp("zero", 0, block),)))
        runner._unsampled = None


def test_blocks_are_cleared_alone() -> None:
    blocks = World("delta rule").runner()._blocks
    assert blocks is not None
    blocks.arena.fill_(0xFF)
    with torch.inference_mode():
        blocks.clear([[2, 4]])
    assert not blocks.block(0, 2).any() and not blocks.block(0, 4).any()
    assert all((blocks.block(0, other) == 0xFF).all() for other in (1, 3, 5))


def test_tables_give_the_blocks_of_slots() -> None:
    """Padding rows have none, also where every slot has one; a block that moves is found at its new place."""
    runner = World("delta rule").runner()
    tables = next(part for part in runner.parts if isinstance(part, StateTables))
    tables.of_slot[:-1] = np.arange(1, len(tables.of_slot))
    with torch.inference_mode():
        tables.begin(StepPlan(1, (), (), (), 0, moves=((tables._group, 2, 9),)))
        rows = RowTensors(torch.tensor([1, -1, 0], dtype=torch.int32), torch.arange(4, dtype=torch.int32), torch.zeros(4))
        bounds = Bounds(3, np.arange(4), np.ones(3, dtype=np.int64), captured=True)
        step = tables.context(rows, bounds, runner.slots)["states"].rows
    assert step.blocks.tolist() == [9, -1, 1]
    assert step.padded and not step.by_token and step.num_tokens == 3
