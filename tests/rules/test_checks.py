"""Run-time checks do not use ``assert``, which ``python -O`` strips."""

from __future__ import annotations

import ast

import pytest

from rules.source import Module, modules


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_nothing_is_checked_by_assert(module: Module) -> None:
    found = [f"{module.where}:{node.lineno}" for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]
    assert not found, "\n".join(found)
