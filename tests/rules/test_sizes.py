"""Files and functions of a size that one can hold in mind. One that wants more usually owns two states."""

from __future__ import annotations

import ast

import pytest

from rules.source import Module, modules

FILE_LINES = 600
FUNCTION_LINES = 80

ALLOWED: set[str] = set()
"""``path`` or ``path:function`` of what may be larger, each with its reason beside it."""


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_file_size(module: Module) -> None:
    count = len(module.path.read_text(encoding="utf-8").splitlines())
    assert count <= FILE_LINES or module.where in ALLOWED, f"{module.where} has {count} lines"


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_function_sizes(module: Module) -> None:
    for node in ast.walk(module.tree):
        # A command's parameters are its options, with the help that they show: they count as data, the body as code.
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            assert length <= FUNCTION_LINES or f"{module.where}:{node.name}" in ALLOWED, (
                f"{module.where}:{node.lineno} {node.name} has {length} lines"
            )


def test_the_allowance_is_used() -> None:
    known = {module.where for module in modules()}
    assert all(entry.split(":")[0] in known for entry in ALLOWED)
