"""A foreign model's weights under its own library's names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from headrace.weights.names import NameTable


def name_table(foreign: nn.Module) -> NameTable:
    """The library's names, and the parameters of the adapter (whose ``foreign`` the model is) that they are.

    A tied weight has one name.
    """
    table = NameTable()
    for name, _ in foreign.named_parameters():
        table.add(name, f"foreign.{name}")
    return table


@torch.inference_mode()
def update_weights(foreign: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Puts new values in place of weights, under the library's names.

    Returns:
        How many there were.

    Raises:
        ValueError: there is no such weight, or it has another shape. Those before it are in place by then.
    """
    parameters = dict(foreign.named_parameters(remove_duplicate=False))
    count = 0
    for name, tensor in tensors:
        if name not in parameters:
            raise ValueError(f"{type(foreign).__name__} has no weight {name} to update")
        if parameters[name].shape != tensor.shape:
            raise ValueError(f"{name} has the shape {list(parameters[name].shape)}, the update {list(tensor.shape)}")
        parameters[name].data.copy_(tensor)
        count += 1
    return count
