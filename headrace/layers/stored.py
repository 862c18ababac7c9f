"""StoredMatrix: one tensor of a checkpoint that is a matrix of a layer, or a part of a fused one, before it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Literal, Protocol

import torch

from headrace.parallel.shards import Cut

ScaleGroup = Literal["tensor", "channel"] | tuple[int, int]
ActivationScale = Literal["none", "token", "group128", "static"]
ActivationCodes = Literal["none", "e4m3", "int8", "fp4"]


class Codes(Protocol):
    """A quantised matrix of a checkpoint: codes and their scales."""

    def dequantize(self) -> torch.Tensor:
        """Returns floats ``[N, K]`` or, for stacked matrices, ``[..., N, K]``."""
        ...

    def cut(self, cut: Cut) -> Codes:
        """One rank's part. Raises ConfigError if the cut splits numbers that share a scale along the inputs."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """The number format of one matrix ``[N, K]`` of a checkpoint, whichever library wrote it."""

    codes: Literal["e4m3", "int4", "int8", "mxfp4", "nvfp4"]
    group: ScaleGroup
    """The numbers that share a scale: all, those of an output, or tiles of (outputs, inputs)."""
    zero: Literal["none", "int", "min"] = "none"
    """int: groups have integer zero points. min: they have minima. none: the codes are symmetric."""
    scale: Literal["float", "e8m0", "e4m3"] = "float"
    """The form of stored scales: floats, exponents of two, or e4m3 with a float for the whole matrix."""
    activations: ActivationScale = "none"
    """The rounding of activations that the writer meant: none, with a scale for each token, for each 128 inputs of a token, or
    with the one scale ``input_scale``."""
    activation_codes: ActivationCodes = "none"
    """The number format to which activations are rounded."""
    order: Literal["none", "g_idx"] = "none"
    """g_idx: the checkpoint may assign inputs to groups in any order."""
    input_scale: float | None = None
    """The static scale of activations, once it is read."""

    def __str__(self) -> str:
        if isinstance(self.group, str):
            shared = f"a scale for each {self.group}"
        elif self.group[0] == 1:
            shared = f"groups of {self.group[1]}"
        else:
            shared = f"tiles of {self.group[0]} x {self.group[1]}"
        words = [self.codes, shared]
        if self.zero == "int":
            words.append("integer zeros")
        elif self.zero == "min":
            words.append("minima")
        if self.activation_codes != "none":
            words.append(f"for {self.activation_codes} activations ({self.activations})")
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    kind: str
    """The stored type, for messages."""
    read: Callable[[], torch.Tensor]
    """Reads its floats, ``[N, K]``, dequantised where it is stored as codes."""
    read_codes: Callable[[], Codes | None] = lambda: None
    """Reads its codes; None: it is stored as floats."""
    read_spec: Callable[[], QuantSpec | None] = lambda: None
    """Reads the number format of the codes; None: it is stored as floats."""

    @cached_property
    def spec(self) -> QuantSpec | None:
        return self.read_spec()

    @cached_property
    def codes(self) -> Codes | None:
        return self.read_codes()

    def exact(self) -> torch.Tensor:
        """``[N, K]``, of the codes where there are any."""
        return self.codes.dequantize() if self.codes is not None else self.read()

    def cut(self, cut: Cut) -> StoredMatrix:
        """One rank's part."""
        return StoredMatrix(
            self.kind,
            lambda: cut.of(self.read()),
            lambda: None if self.codes is None else self.codes.cut(cut),
            self.read_spec,
        )
