"""Rounding to FP8 in the kernel that makes the rows, where all that reads them multiplies such rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm


@runtime_checkable
class _HasNorms(Protocol):
    def norm_readers(self) -> Iterable[tuple[RMSNorm, nn.Module]]:
        """Gives norms with the only module that reads each of them."""
        ...


@runtime_checkable
class _Reader(Protocol):
    def readers(self) -> Sequence[Linear]:
        """The layers that multiply the module's input, which nothing else reads."""
        ...


def round_norms(model: nn.Module) -> None:
    """Makes norms round their results where all of their readers would, to the same numbers."""
    for module in model.modules():
        if isinstance(module, _HasNorms):
            for norm, reader in module.norm_readers():
                groups = {layer.rounds for layer in reader.readers()} if isinstance(reader, _Reader) else {None}
                norm.rounds = groups.pop() if len(groups) == 1 else None
