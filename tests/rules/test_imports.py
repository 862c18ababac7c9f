"""A room imports only from the rooms before it: docs/architecture.md lists them, this test holds them to it."""

from __future__ import annotations

import pytest

from rules.source import Module, imports, modules

ROOMS: list[set[str]] = [
    {"errors"},
    {"sampling_params", "outputs"},
    {"spec"},
    {"config"},
    {"metrics"},
    {"kv"},
    {"core"},
    {"text", "sources"},
    # Below this line torch is allowed.
    {"parallel"},
    {"kernels"},
    {"cache"},
    {"attention"},
    {"layers"},
    {"quant"},
    {"weights"},
    {"models"},
    {"multimodal"},
    {"sampling"},
    {"runner"},
    {"resolve"},
    {"engine"},
    {"server"},
    {"bench"},
    {"cli"},
]
"""Lowest floor first; rooms of one set may use each other."""

TORCH_LINE = ROOMS.index({"text", "sources"})
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def name_of(module: Module) -> str:
    return module.name


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_imports_point_down(module: Module) -> None:
    if module.name == "headrace":
        return
    assert module.room in FLOOR, f"{module.where}: {module.room} is not in the list of rooms"
    wrong = [
        f"{module.where}:{line} imports {name}"
        for line, name in imports(module)
        if name.startswith("headrace.") and name.split(".")[1] in FLOOR and FLOOR[name.split(".")[1]] > FLOOR[module.room]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", modules(), ids=name_of)
def test_no_torch_above_the_line(module: Module) -> None:
    if module.name != "headrace" and FLOOR[module.room] > TORCH_LINE:
        return
    wrong = [f"{module.where}:{line} imports {name}" for line, name in imports(module) if name.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


def test_the_public_names_are_loaded_late() -> None:
    """``import headrace`` alone must not pay for torch."""
    (top,) = (module for module in modules() if module.name == "headrace")
    typed = {"headrace.engine.async_llm", "headrace.engine.llm", "headrace.sampling_params"}
    assert {name for _, name in imports(top) if name.startswith("headrace.")} <= typed


def test_the_imports_are_seen() -> None:
    """The rule would hold of anything if it saw nothing."""
    found = {name for module in modules() for _, name in imports(module)}
    assert {"headrace.errors", "headrace.spec", "torch"} <= found
    lazy = {name for module in modules() if module.name == "headrace.cli.serve" for _, name in imports(module)}
    assert "headrace.server.run" in lazy
