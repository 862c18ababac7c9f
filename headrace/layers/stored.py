"""StoredMatrix: one tensor of a checkpoint that is a matrix of a layer, or a part of a fused one, before it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from headrace.parallel.shards import Cut


class Codes(Protocol):
    """A quantised matrix of a checkpoint: codes and their scales."""

    def dequantize(self) -> torch.Tensor:
        """Returns floats ``[N, K]`` or, for stacked matrices, ``[..., N, K]``."""
        ...

    def cut(self, cut: Cut) -> Codes:
        """One rank's part. Raises ConfigError if the cut splits numbers that share a scale along the inputs."""
        ...


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    kind: str
    """The stored type, for messages."""
    read: Callable[[], torch.Tensor]
    """Reads its floats, ``[N, K]``, dequantised where it is stored as codes."""
    read_codes: Callable[[], Codes | None] = lambda: None
    """Reads its codes; None: it is stored as floats."""

    @cached_property
    def codes(self) -> Codes | None:
        return self.read_codes()

    def exact(self) -> torch.Tensor:
        """``[N, K]``, of the codes where there are any."""
        return self.codes.dequantize() if self.codes is not None else self.read()

    def cut(self, cut: Cut) -> StoredMatrix:
        """One rank's part."""
        return StoredMatrix(self.kind, lambda: cut.of(self.read()), lambda: None if self.codes is None else self.codes.cut(cut))
