"""Chunks of prompts that follow the measured speed."""

from __future__ import annotations

import pytest
from support.core.world import World, item, make_cache, make_config, make_request

from headrace.core.pace import FIRST_TOKENS, LEAST_TOKENS, PrefillPace
from headrace.core.plan import StepPlan


class Machine:
    """Computes so many tokens a second, and reads the weights once a step."""

    def __init__(self, speed: float, overhead: float = 0.05) -> None:
        self.speed, self.overhead = speed, overhead
        self.steps: list[tuple[int, float]] = []
        """Tokens and seconds."""

    def seconds(self, plan: StepPlan) -> float:
        tokens = sum(row.num_tokens for row in plan.rows)
        self.steps.append((tokens, self.overhead + tokens / self.speed))
        return self.steps[-1][1]


def paced(machine: Machine, **changes: object) -> World:
    config = make_config(max_model_len=20_000, max_num_batched_tokens=2048, max_step_seconds=1.0, max_num_encoder_tokens=64)
    world = World(make_config(**vars(config) | changes), make_cache(8_000))
    world.seconds = machine.seconds
    return world


@pytest.mark.parametrize("speed", [15.0, 100.0, 1_000.0, 100_000.0])
def test_steps_take_about_a_second_whatever_the_speed(speed: float) -> None:
    machine = Machine(speed)
    world = paced(machine)
    world.add(make_request("a", [1] * min(16_000, int(20 * speed)), max_tokens=1))
    world.run()
    tokens, seconds = zip(*machine.steps, strict=True)
    assert max(seconds) < max(1.3, FIRST_TOKENS / speed + 0.1) and max(seconds[1:]) < max(1.3, LEAST_TOKENS / speed + 0.1)
    assert min(tokens[:-1]) >= LEAST_TOKENS
    fastest = min(2048.0, 0.75 * speed)
    assert sum(count >= fastest for count in tokens) >= len(tokens) - 5, "a few steps find the speed"


def test_a_machine_that_becomes_busy_and_idle_again_is_followed() -> None:
    machine = Machine(2_000.0)
    world = paced(machine)
    world.add(make_request("a", [1] * 16_000, max_tokens=1))
    for _ in range(5):
        world.step()
    assert machine.steps[-1][0] > 1_500
    machine.speed, machine.overhead = 100.0, 1.0 / 20
    world.step()
    assert machine.steps[-1][1] > 10.0, "one step is late to notice"
    for _ in range(10):
        world.step()
        assert machine.steps[-1][1] < 1.3
    machine.speed = 2_000.0
    for _ in range(4):
        world.step()
    assert machine.steps[-1][0] > 1_500


def test_small_steps_and_decode_do_not_lower_the_pace() -> None:
    pace = PrefillPace(None, 1.0)
    pace.measured(64, 0.1)
    assert pace.tokens == 256, "at most four times what was tried"
    for _ in range(10):
        pace.measured(5, 0.5)
    assert pace.tokens == 256
    pace.measured(256, 2.0)
    assert pace.tokens == 128
    pace.measured(128, 1e6)
    assert pace.tokens == LEAST_TOKENS
    machine = Machine(1_000.0, overhead=3.0)
    world = paced(machine)
    world.add(make_request("a", [1], max_tokens=50))
    world.step()
    before = world.scheduler._pace.tokens
    for _ in range(10):
        world.step()
    assert world.scheduler._pace.tokens == before


def test_atomic_items_are_computed_whole_and_alone() -> None:
    """Also behind a prompt that uses up the pace of every step."""
    machine = Machine(20.0)
    world = paced(machine)
    pictures = (item(10, 310), item(400, 700, "dog"))
    world.add(make_request("text", [1] * 600, max_tokens=1))
    world.add(make_request("pictures", [2] * 800, max_tokens=2, items=pictures))
    world.run()
    world.assert_right()
    assert sum(tokens >= 300 for tokens, _ in machine.steps) == 2
    assert max(tokens for tokens, _ in machine.steps) < 300 + FIRST_TOKENS


def test_steps_with_encoder_work_say_nothing_of_the_speed() -> None:
    machine = Machine(1_000.0)
    world = paced(machine)
    world.add(make_request("a", [2] * 50, max_tokens=1, items=(item(10, 20, encoder_tokens=30),)))
    world.seconds = lambda plan: 60.0
    world.run()
    assert world.scheduler._pace.tokens == FIRST_TOKENS
