"""No sampling parameter is accepted and ignored: another module than that of its declaration reads an attribute of its name."""

from __future__ import annotations

import ast

import pytest

from headrace.sampling_params import SamplingParams
from rules.source import Module, modules

DECLARATION = "headrace.sampling_params"


def attributes(module: Module) -> set[str]:
    """Names of the attributes that the module reads."""
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_sampling_parameter_is_read(name: str) -> None:
    assert any(name in attributes(module) for module in modules() if module.name != DECLARATION), f"nothing reads {name}"
