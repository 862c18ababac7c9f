"""Number of packages that an optional subsystem reaches. A change that needs one more has found no place to plug in."""

from __future__ import annotations

import pytest

from rules.source import imports, modules

ROOMS = {
    ("sparse",): 7,
    ("media", "vision", "multimodal"): 8,
    ("quant",): 6,
    ("states",): 8,
    # With the package itself, which re-exports LoRARequest.
    ("lora", "adapter"): 9,
}
"""Words in a module's name, and the most packages that may import such modules."""


def target(name: str, known: set[str]) -> str:
    """The module that an import names, where it names something in it."""
    return name if name in known else name.rpartition(".")[0]


@pytest.mark.parametrize(("words", "most"), ROOMS.items())
def test_a_subsystem_stays_in_its_rooms(words: tuple[str, ...], most: int) -> None:
    known = {module.name for module in modules()}
    own = {name for name in known if any(word in part for part in name.split(".")[1:] for word in words)}
    rooms = {module.package for module in modules() for _, name in imports(module) if target(name, known) in own}
    assert len(rooms) <= most, f"modules named {words} are imported in {sorted(rooms)}"


def test_the_runner_names_no_part_that_may_be_absent() -> None:
    (runner,) = (module for module in modules() if module.name == "headrace.runner.runner")
    named = {name.rpartition(".")[2] for _, name in imports(runner) if name.startswith("headrace.runner.parts.")}
    assert not named
