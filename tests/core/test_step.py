"""A step under construction: rows have the numbers that their blocks have when the plan is whole."""

from __future__ import annotations

import pytest
from support.core.world import World, make_cache, make_config, make_request

from headrace.core.budget import StepBudget
from headrace.core.step import StepBuilder
from headrace.kv.manager import Move


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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_short_path_of_decoding_rows_changes_no_plan(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules have preemptions, windows, moves of blocks, several samples and a small budget."""

    def record() -> tuple[list[object], int]:
        cache = make_cache((14, 6), windows=(None, 8), widths=(3, 2))
        world = World(make_config(pipeline_depth=depth, max_num_seqs=5, max_num_batched_tokens=7), cache)
        for number in range(14):
            length = 1 + (number * 5) % 17
            world.add(make_request(f"r{number}", [1 + number % 3] * length, 1 + number % 13, n=1 + number % 2))
            if number % 3 == 0:
                world.step()
        world.run()
        world.assert_right()
        return world.recording, world.scheduler.stats().num_preemptions

    short, preemptions = record()
    monkeypatch.setattr(StepBuilder, "add_next_tokens", lambda step, rest: next(rest, None) if step.budget.tokens else None)
    assert (short, preemptions) == record() and preemptions
