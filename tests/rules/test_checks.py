"""Run-time checks do not use ``assert``, which ``python -O`` strips."""

from __future__ import annotations

import ast

from rules.source import modules


def test_nothing_is_checked_by_assert() -> None:
    nodes = ((module, node) for module in modules() for node in module.nodes)
    assert [f"{module.where}:{node.lineno}" for module, node in nodes if isinstance(node, ast.Assert)] == []
