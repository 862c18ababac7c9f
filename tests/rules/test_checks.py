"""Run-time checks do not use ``assert``, which ``python -O`` strips."""

from __future__ import annotations

import ast

from rules.source import modules


def test_nothing_is_checked_by_assert() -> None:
    nodes = ((module, node) for module in modules() for node in module.nodes)
    assert [f"{module.where}:{node.lineno}" for module, node in nodes if isinstance(node, ast.Assert)] == []


def test_functions_beside_kernels_have_types() -> None:
    """mypy lets Triton's kernels have parameters without, and so all of ``headrace.kernels``."""
    lacking = []
    for module in modules():
        if module.name.startswith("headrace.kernels.") and "triton" not in module.name:
            for node in module.nodes:
                if isinstance(node, ast.FunctionDef):
                    own = node.args
                    given = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, (own.vararg, own.kwarg))]
                    typed = [each for each in given if each.annotation is not None or each.arg in ("self", "cls")]
                    if len(typed) < len(given) or node.returns is None:
                        lacking.append(f"{module.where}:{node.lineno}")
    assert lacking == []
