"""The weights of a model under their checkpoint names: the inverse of loading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from headrace.weights.names import NameTable


def export(table: NameTable, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in the order of the table: views, but where a layout differs."""
    parameters = dict(model.named_parameters())
    for name, target in table.items():
        view = target.view(parameters[target.parameter].detach())
        yield name, view if target.layout is None else target.layout.give(view)
