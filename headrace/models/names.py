"""Derives a decoder's checkpoint names from its modules, and splits fused projections into the checkpoint's matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from headrace.layers.linear import FusedLinear, Linear
from headrace.layers.moe import Experts
from headrace.model_spec.projection import GROUPED, grouped_rows
from headrace.models.decoder import DecoderAttention
from headrace.weights.names import IGNORABLE, NameTable, StoredLayout

_MOVED = {".attention.sinks": ".sinks"}
"""Suffixes of the model's names -> of a checkpoint's."""
_HEADS = ("lm_head", "score")
"""Parts that a checkpoint has beside the layers, and not within ``model``."""
_BARE = {f"model.{part}": part for part in ("embed_tokens.", "layers.", "norm.")}
"""Prefixes of names -> those of a checkpoint of the layers without a head."""


def decoder_names(
    model: nn.Module,
    moved: Mapping[str, str] = _MOVED,
    *,
    experts: Callable[[NameTable, str, str, Experts], None] | None = None,
    layouts: Mapping[str, StoredLayout] | None = None,
    ignorable: Sequence[str] = (),
) -> NameTable:
    """Maps the names with which Hugging Face saves a causal language model to parameters.

    Args:
        moved: suffixes of the model's names -> of the checkpoint's, where they differ.
        experts: adds the parameters of an Experts module, from its names in the checkpoint and in the model; None: as most
            checkpoints have them, each expert's matrices apart, or stacked as transformers has them.
        layouts: suffixes of the model's names -> the layout in checkpoints, where it differs.
        ignorable: regular expressions of further names to skip.
    """
    table = NameTable((*IGNORABLE, *ignorable))
    table.elsewhere(_BARE)
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, DecoderAttention) and not module.qkv_proj.stored_rows:
            _add_grouped(table, checkpoint_name(path, moved), path, module)
        if isinstance(module, Experts):
            (experts or _apart_or_stacked)(table, checkpoint_name(path, moved), path, module)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            ours = f"{path}.{kind}"
            theirs = checkpoint_name(ours, moved)
            if id(parameter) in first:
                table.tie(theirs, first[id(parameter)])
                continue
            first[id(parameter)] = ours
            if isinstance(module, FusedLinear):
                _add_fused(table, checkpoint_name(path, moved).rpartition(".")[0], ours, kind, module)
            else:
                layout = next((own for ending, own in (layouts or {}).items() if ours.endswith(ending)), None)
                rows = module.stored_rows.get(path.rpartition(".")[2]) if isinstance(module, Linear) else None
                table.add(theirs, ours, layout=StoredLayout(rows) if rows else layout)
    return table


def _add_fused(table: NameTable, folder: str, ours: str, kind: str, module: FusedLinear) -> None:
    """Adds each matrix by its own name, and one tensor of all in the same order as an alternative."""
    names = {f"{folder}.{part}.{kind}": rows for part, rows in module.parts.items()}
    table.fuse(
        ours, names, layouts={f"{folder}.{part}.{kind}": StoredLayout(rows) for part, rows in module.stored_rows.items()}
    )
    if not module.stored_rows:
        table.instead(f"{folder}.{ours.split('.')[-2]}.{kind}", ours)


def _apart_or_stacked(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """``experts.3.gate_proj.weight`` and so on of every expert; or ``experts.gate_up_proj`` of all, as transformers has it."""
    if module.gate_up_proj_bias is not None:
        raise ValueError(f"{theirs}: experts with biases have names of their family's own")
    experts_apart(table, theirs, ours, module)
    table.instead(f"{theirs}.{'gate_up_proj' if module.spec.gated else 'up_proj'}", f"{ours}.gate_up_proj")
    table.instead(f"{theirs}.down_proj", f"{ours}.down_proj")


def experts_apart(
    table: NameTable,
    theirs: str,
    ours: str,
    module: Experts,
    first: int = 0,
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """Adds each expert's matrices by separate names, which count from ``first``. ``matrices``: names of gate, up and down;
    experts without gates have no first."""
    gate, up, down = matrices
    parts = (gate, up) if module.spec.gated else (up,)
    for expert in range(module.spec.num_experts):
        one = f"{theirs}.{first + expert}"
        names = {f"{one}.{part}.weight": module.spec.intermediate_size for part in parts}
        table.fuse(f"{ours}.gate_up_proj", names, index=expert)
        table.add(f"{one}.{down}.weight", f"{ours}.down_proj", index=expert)


def block_sparse_experts(table: NameTable, theirs: str, ours: str, module: Experts) -> None:
    """Adds Mixtral's names of each expert's matrices, and those that are stacked as transformers has them."""
    here = theirs.replace(".block_sparse_moe.", ".mlp.")
    experts_apart(table, here.replace(".mlp.", ".block_sparse_moe."), ours, module, matrices=("w1", "w3", "w2"))
    for kind in ("gate_up_proj", "down_proj"):
        table.instead(f"{here}.{kind}", f"{ours}.{kind}")


def checkpoint_name(name: str, moved: Mapping[str, str] = _MOVED) -> str:
    """Returns the checkpoint's name of a parameter or module."""
    for ours, theirs in moved.items():
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
    return name if name.startswith(_HEADS) else f"model.{name}"


def _add_grouped(table: NameTable, theirs: str, ours: str, module: DecoderAttention) -> None:
    """Adds the alternative to q, k and v: one tensor with their rows interleaved by KV group."""
    layout = StoredLayout(partial(grouped_rows, module.spec))
    for kind, _ in module.qkv_proj.named_parameters(recurse=False):
        for name in GROUPED:
            table.instead(f"{theirs}.{name}.{kind}", f"{ours}.qkv_proj.{kind}", layout)
