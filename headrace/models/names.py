"""Checkpoint names of a decoder, read off its modules: what is fused there is apart in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from headrace.layers.linear import FusedLinear
from headrace.models.decoder import SelfAttention
from headrace.spec.projection import grouped_rows
from headrace.weights.names import IGNORABLE, Layout, NameTable

GROUPED = ("query_key_value", "linear_qkv")
"""Names of fused projections that hold, for each KV group, its query heads, its gates, its K head and its V head."""
_MOVED = {".attention.sinks": ".sinks"}
"""Endings of our names -> of a checkpoint's."""


def decoder_names(model: nn.Module, moved: Mapping[str, str] = _MOVED, ignorable: Sequence[str] = ()) -> NameTable:
    """Checkpoint names, as Hugging Face saves a causal language model, and the parameters they fill.

    Args:
        moved: endings of the model's names -> of the checkpoint's, where they differ.
        ignorable: regular expressions of names that a checkpoint may have and that carry nothing to load.
    """
    table = NameTable((*IGNORABLE, *ignorable))
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, SelfAttention):
            _add_grouped(table, checkpoint_name(path, moved), path, module)
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
                table.instead(theirs, ours)
            else:
                table.add(theirs, ours)
    return table


def checkpoint_name(name: str, moved: Mapping[str, str] = _MOVED) -> str:
    """The checkpoint's name of a parameter or module that is one there too."""
    for ours, theirs in moved.items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
    return name if name.startswith("lm_head") else f"model.{name}"


def _add_grouped(table: NameTable, theirs: str, ours: str, module: SelfAttention) -> None:
    """What a checkpoint may have in place of q, k and v: one tensor with their rows interleaved by KV group."""
    layout = Layout(partial(grouped_rows, module.spec))
    for kind, _ in module.qkv_proj.named_parameters(recurse=False):
        for name in GROUPED:
            table.instead(f"{theirs}.{name}.{kind}", f"{ours}.qkv_proj.{kind}", layout)
