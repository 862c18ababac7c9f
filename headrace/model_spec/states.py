"""StateSpec: the geometry of a layer that carries a state from token to token; StateGroup: what a sequence keeps of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from headrace.errors import ContradictionError
from headrace.model_spec.kv import ALIGNMENT, DTYPE_BYTES

StateKind = Literal["gdn", "kda", "ssd", "mamba1", "lightning", "conv"]
"""Gated delta rule, Kimi delta attention, Mamba-2 (state space duality), Mamba-1, lightning attention, a short convolution
without a state."""


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """A causal depthwise convolution over the channels of ``parts``, which are stored side by side in this order."""

    width: int
    """Taps: an output reads the current input and the ``width - 1`` before it, which the state keeps."""
    parts: tuple[tuple[str, int], ...]
    """(name, channels) of each part. Tensor-parallel ranks cut each part by itself."""
    bias: bool
    activation: Literal["silu"] | None

    @property
    def channels(self) -> int:
        return sum(channels for _, channels in self.parts)


@dataclasses.dataclass(frozen=True)
class StatePlane:
    """One tensor of a layer's state, of one sequence."""

    name: Literal["conv", "state", "tokens", "until"]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One state layer. Projection widths, the shapes of its state and the kernels' choice derive from it.

    Raises:
        ContradictionError: the numbers do not fit together; the message names the layer.
    """

    index: int
    """Index among the model's state layers; also its place in the StateGroup."""
    kind: StateKind
    heads: int
    """Value heads; of mamba1 channels; of conv 0."""
    key_heads: int
    """Key heads (gdn, kda) or groups (ssd), each of which ``heads / key_heads`` heads share; where there are none, 0."""
    key_dim: int
    """Width of a key head; of ssd and mamba1 the state's size N."""
    value_dim: int
    """Width of a value head; of ssd the head's width P, of mamba1 1."""
    conv: ConvSpec | None
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Bounds of the time step (ssd); of lightning attention 1 and 1."""
    beta_factor: int = 1
    """Factor on the sigmoid of beta (gdn): 2 allows negative eigenvalues."""

    def __post_init__(self) -> None:
        where = f"state layer {self.index}"
        if self.key_heads and self.heads % self.key_heads:
            raise ContradictionError(
                f"{where}: {self.heads} heads cannot be shared evenly by {self.key_heads} key heads or groups", "heads"
            )
        if self.conv is None:
            if self.kind == "conv":
                raise ContradictionError(f"{where} of kind conv has no convolution", "conv")
            return
        if self.conv.width < 2:
            raise ContradictionError(f"{where}: a convolution of width {self.conv.width} keeps nothing", "conv")
        channels = self.conv.channels
        if self.kind != "conv" and channels != self.mixed_channels:
            raise ContradictionError(
                f"{where}: the convolution has {channels} channels, its heads have {self.mixed_channels}", "conv"
            )

    @property
    def mixed_channels(self) -> int:
        """Channels of the queries, keys and values (x, B and C), or of x alone in mamba1: those that are convolved."""
        values = self.heads * self.value_dim
        return values if self.kind == "mamba1" else values + 2 * self.key_heads * self.key_dim

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of the matrices around the state: of a short convolution its three parts, else what is convolved,
        a gate as wide as the values, and the numbers of each head."""
        if self.kind == "conv":
            channels = 0 if self.conv is None else self.conv.channels
            return [(3 * channels, hidden_size), (hidden_size, channels)]
        values = self.heads * self.value_dim
        return [(self.mixed_channels + values + 2 * self.heads, hidden_size), (hidden_size, values)]

    def planes(self, dtype: str, state_dtype: str, pending: int = 0) -> tuple[StatePlane, ...]:
        """The tensors that a sequence keeps of the layer: the single source of their shapes and bytes.

        ``conv [width - 1, channels]`` in the model's dtype is a ring: position p has row ``p % (width - 1)``, so that a step
        that is repeated writes the same bytes. ``state [heads, value_dim, key_dim]`` is in the state dtype. Of a gated delta
        rule it may lack the last ``pending`` tokens: these are in ``tokens``, a ring by position too, and ``until [heads,
        value_dim]`` counts those that it has.
        """
        planes = []
        if self.conv is not None:
            planes.append(StatePlane("conv", (self.conv.width - 1, self.conv.channels), dtype))
        if self.heads:
            planes.append(StatePlane("state", (self.heads, self.value_dim, self.key_dim), state_dtype))
        if pending and self.kind == "gdn":
            channels = self.key_heads * self.key_dim + self.heads * (self.value_dim + 1)
            planes.append(StatePlane("tokens", (pending, channels), "float32"))
            planes.append(StatePlane("until", (self.heads, self.value_dim), "int32"))
        return tuple(planes)


@dataclasses.dataclass(frozen=True)
class StateGroup:
    """The planes of all state layers: a block of the arena holds them for one sequence at one number of tokens."""

    planes: tuple[tuple[StatePlane, ...], ...]
    """Per state layer."""

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per state layer, the offset in a block of each of its planes: a multiple of ``ALIGNMENT``."""
        offsets, end = [], 0
        for planes in self.planes:
            own = []
            for plane in planes:
                own.append(end)
                end += _aligned(plane.nbytes)
            offsets.append(tuple(own))
        return tuple(offsets)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: every plane's, rounded up to ``ALIGNMENT``."""
        return sum(_aligned(plane.nbytes) for planes in self.planes for plane in planes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
