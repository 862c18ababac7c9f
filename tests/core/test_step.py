"""A step under construction: rows have the numbers that their blocks have when the plan is whole."""

from __future__ import annotations

from headrace.core.budget import StepBudget
from headrace.core.step import StepBuilder
from headrace.kv.manager import Move

from .world import World, make_cache, make_config, make_request


def test_rows_follow_the_moves_made_after_them() -> None:
    world = World(make_config(), make_cache())
    first, second = (world.scheduler.add(make_request(f"r{n}", [1, 2, 3]))[0] for n in range(2))
    first.slot, second.slot = 0, 1
    moves: list[Move] = [(0, 5, 9)]
    step = StepBuilder(StepBudget(16, 0), moves)
    step.add_row(first, 3, ((5, 6), (7,)))
    moves.append((0, 6, 2))
    step.add_row(second, 3, ((6, 8), (2,)))
    moves += [(1, 2, 1), (0, 2, 4), (0, 8, 7)]
    plan = step.build(1, (), tuple(moves))
    # The number 5 was handed out after 5 had moved; what is 6 to the first is not what it is to the second.
    assert [row.new_blocks for row in plan.rows] == [((5, 4), (7,)), ((6, 7), (1,))]
    assert plan.moves == tuple(moves)
    assert step.build(1, ()).rows[0].new_blocks == ((5, 6), (7,))
