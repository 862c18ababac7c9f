"""Checkpoint names of a decoder, read off its modules: what is fused there is apart in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from headrace.layers.linear import FusedLinear
from headrace.weights.names import NameTable

_MOVED = {".attention.sinks": ".sinks"}
"""Endings of our names -> of a checkpoint's."""


def decoder_names(model: nn.Module, moved: Mapping[str, str] = _MOVED) -> NameTable:
    """Checkpoint names, as Hugging Face saves a causal language model, and the parameters they fill.

    Args:
        moved: endings of the model's names -> of the checkpoint's, where they differ.
    """
    table = NameTable()
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            ours = f"{path}.{kind}"
            theirs = checkpoint_name(ours, moved)
            if id(parameter) in first:
                table.tie(theirs, first[id(parameter)])
                continue
            first[id(parameter)] = ours
            if isinstance(module, FusedLinear):
                folder = checkpoint_name(path, moved).rpartition(".")[0]
                table.fuse(ours, {f"{folder}.{part}.{kind}": rows for part, rows in module.parts.items()})
            else:
                table.add(theirs, ours)
    return table


def checkpoint_name(name: str, moved: Mapping[str, str] = _MOVED) -> str:
    """The checkpoint's name of a parameter or module that is one there too."""
    for ours, theirs in moved.items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
    return name if name.startswith("lm_head") else f"model.{name}"
