"""A docstring can be understood without the code below it: it is a sentence, or for an attribute a noun phrase."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from rules.source import modules

FRAGMENT = re.compile(r"(Of|What|By|As|How|Which|Why|Whose|That|Until|From now on)\b")
"""Beginnings of clauses that only the line above or the signature completes: "Of a block.", "As in ``State``."."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings that stand as statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_are_no_fragments() -> None:
    found = ((module.where, line, text) for module in modules() for line, text in docstrings(module.tree))
    assert [f"{where}:{line} {text[:80]!r}" for where, line, text in found if FRAGMENT.match(text)] == []


def test_fragments_are_seen() -> None:
    tree = ast.parse('size = 1\n"""Of a block."""\n\n\ndef ready():\n    """Whether it is ready."""\n    return "What?"\n')
    assert [line for line, text in docstrings(tree) if FRAGMENT.match(text)] == [2]
