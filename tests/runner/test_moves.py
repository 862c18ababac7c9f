"""Blocks that move: the runner's tables follow, and a plan that cannot be is refused."""

from __future__ import annotations

import random

import pytest
import torch
from support.runner.harness import World

from headrace.core.plan import StepPlan
from headrace.errors import EngineError
from headrace.runner.slots import SlotTables
from headrace.startup.ledger import cache_lines


def test_tables_follow_blocks_that_move_one_after_the_other() -> None:
    """``a -> b`` then ``c -> a``: who had a has b, who had c has a; and what moves on is followed to its end."""
    tables = SlotTables(World("uneven", num_blocks=30).config(), torch.device("cpu"))
    chance = random.Random(0)
    for _ in range(40):
        moves = [(chance.randrange(2), *chance.sample(range(1, 25), 2)) for _ in range(chance.randint(1, 12))]
        before = [torch.randint(25, table.tensor.shape, dtype=torch.int32) for table in tables.block_tables]
        for table, numbers in zip(tables.block_tables, before, strict=True):
            table.tensor.copy_(numbers)
        tables.rename(moves)
        for group, (table, numbers) in enumerate(zip(tables.block_tables, before, strict=True)):
            for moved, source, target in moves:
                if moved == group:
                    numbers[numbers == source] = target
            assert torch.equal(table.tensor, numbers)


def test_one_group_has_nothing_to_move() -> None:
    with pytest.raises(EngineError, match="only one cache group"):
        World("llama").runner().execute(StepPlan(1, (), (), (), 0, ((0, 1, 2),)))


@pytest.mark.parametrize("move", [(2, 1, 2), (-1, 1, 2), (0, 0, 2), (0, 2, 0), (1, 2, 10**6), (1, -1, 2)])
def test_moves_that_cannot_be_are_refused(move: tuple[int, int, int]) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        World("uneven").runner().execute(StepPlan(1, (), (), (), 0, (move,)))


@pytest.mark.parametrize("family", ["llama", "windows between", "uneven", "three sizes"])
def test_the_ledger_is_what_was_allocated(family: str) -> None:
    """The start-up report's KV cache, the configuration and the tensors agree to the byte."""
    config = World(family, num_blocks=30).config()
    held = dict(World(family, num_blocks=30).runner().memory())
    lines = cache_lines(config)
    assert held["KV cache"] == config.cache.nbytes == sum(line.nbytes for line in lines)
    groups, size = config.cache.groups, config.cache.block_size
    exact = {
        group.index: size
        * sum(4 * config.model.layers[i].num_kv_heads * config.model.layers[i].row_width for i in group.layers)
        for group in groups
    }
    assert config.cache.arena.block_bytes == tuple(exact.values())
    if len(groups) > 1:
        assert all(f"{group.name} {exact[group.index]:,} bytes" in lines[0].detail for group in groups)
