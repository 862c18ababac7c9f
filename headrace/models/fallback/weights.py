"""A foreign model's weights under its own library's names."""

from __future__ import annotations

import torch
from torch import nn

from headrace.weights.names import NameTable
from headrace.weights.update import Named, WeightUpdate


def name_table(foreign: nn.Module) -> NameTable:
    """The library's names, and the weights of the adapter (whose ``foreign`` the model is) that they are.

    A tied weight has one name, and its others are ties.
    """
    table, first = NameTable(), dict[int, str]()
    for name, weight in _weights(foreign).items():
        if id(weight) in first:
            table.tie(name, f"foreign.{first[id(weight)]}")
        else:
            first[id(weight)] = name
            table.add(name, f"foreign.{name}")
    return table


def weight_update(foreign: nn.Module, tensors: Named) -> WeightUpdate:
    """New values under the library's names, checked and not written yet. Errors as of ``WeightUpdate``."""
    parameters = {f"foreign.{name}": weight for name, weight in _weights(foreign).items()}
    return WeightUpdate(name_table(foreign), parameters, tensors)


def _weights(foreign: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and those buffers that are saved: what chooses experts may be one. Libraries save states beside them."""
    stored = foreign.state_dict(keep_vars=True)
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
