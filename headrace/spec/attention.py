"""AttentionSpec: the single source of truth of a layer's attention geometry."""

from __future__ import annotations

import dataclasses
from typing import Literal

from headrace.errors import ConfigError
from headrace.spec.rope import RopeSpec

Mode = Literal["dense", "elastic", "sparse"]
"""How a row attends in a step. Not geometry: any layer may be run in any mode its backend supports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention. Projection widths, cache shapes and backend choice derive from it and nothing else.

    Raises:
        ConfigError: the numbers do not fit together; the message names the layer.
    """

    layer: int
    """Index of the layer, 0 to N - 1; also its place in the cache."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a query or key head."""
    v_head_dim: int
    """Width of a value head; the attention output is ``num_heads * v_head_dim`` wide."""
    scale: float
    """Factor on q.k before the softmax."""
    rotary_dim: int = 0
    """How many leading channels of q and k are rotated; 0: the layer is handed q and k already in their final form."""
    rope: RopeSpec | None = None
    """How those channels turn with the position; needed by whoever makes the cosines and sines."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None: all."""
    soft_cap: float | None = None
    """logits = soft_cap * tanh(logits / soft_cap)."""
    sinks: bool = False
    """One learned logit a head joins the softmax's denominator."""
    output_gate: bool = False
    """The attention's output is multiplied by the sigmoid of a projection of the hidden states that is as wide."""
    kv_source: int | None = None
    """The layer whose KV this one reads in place of its own."""

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}: {name} must be at least 1, not {getattr(self, name)}", name)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{where}: {self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads} KV heads", "num_kv_heads"
            )
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"{where}: rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}", "rotary_dim"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"{where}: window must be at least 1, not {self.window}", "sliding_window")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        return self.num_kv_heads * self.v_head_dim

    @property
    def out_size(self) -> int:
        """Width of the attention output, which is the input of o_proj."""
        return self.num_heads * self.v_head_dim
