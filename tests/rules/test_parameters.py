"""No sampling parameter is accepted and ignored: another module than that of its declaration reads an attribute of its name."""

from __future__ import annotations

import ast

from headrace.sampling_params import SamplingParams
from rules.source import modules

DECLARATION = "headrace.sampling_params"


def test_every_sampling_parameter_is_read() -> None:
    nodes = (node for module in modules() if module.name != DECLARATION for node in module.nodes)
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert set(SamplingParams.__struct_fields__) - read == set()
