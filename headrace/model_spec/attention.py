"""AttentionSpec: the single source of truth of a layer's attention geometry."""

from __future__ import annotations

import dataclasses
from typing import Literal

from headrace.errors import ContradictionError
from headrace.model_spec.indexer import IndexerSpec
from headrace.model_spec.integers import is_integer
from headrace.model_spec.rope import RopeSpec

Mode = Literal["dense", "elastic", "sparse"]
"""Attention of a row in a step. Not geometry: any layer may run in any mode that its backend supports."""

_LAYOUT = {
    "layer", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "scale", "rotary_dim", "rope",
    "v_from_k", "output_gate", "kv_source", "mla", "indexer",
}  # fmt: skip
"""Fields of an AttentionSpec that say what a layer projects and keeps, or which keys it is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps one vector from which the keys and values of all heads
    are projected. The products with those projections can be absorbed into q and the output: then that vector is the one
    KV head there is.
    """

    head_dim: int
    """Width of a query or key head that is not compressed: its rotated channels, then the others."""
    v_head_dim: int
    """Width of a value head that is not compressed."""
    q_rank: int | None = None
    """Channels through which queries are projected; None: they are projected directly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention. Projection widths, cache shapes and backend choice derive from it and nothing else.

    Raises:
        ContradictionError: the numbers do not fit together; the message names the layer. Each by itself is trusted.
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
    """Number of leading channels of q and k that are rotated; 0: the layer gets q and k in their final form."""
    rope: RopeSpec | None = None
    """Rotation of those channels by position, from which cosines and sines are computed."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None: all."""
    chunked: bool = False
    """The window does not slide: a token sees itself and those before it from the last multiple of ``window`` on."""
    soft_cap: float | None = None
    """logits = soft_cap * tanh(logits / soft_cap)."""
    sinks: bool = False
    """One learned logit a head joins the softmax's denominator."""
    v_from_k: bool = False
    """There is no projection of values: they are the keys' own, before those are normed and rotated."""
    output_gate: bool = False
    """The attention's output is multiplied by the sigmoid of a projection of the hidden states that is as wide."""
    kv_source: int | None = None
    """The layer whose KV this one reads in place of its own."""
    mla: MLASpec | None = None
    """The layer keeps compressed KV. Its one KV head is ``rotary_dim`` rotated channels, which all heads share, and then
    the ``v_head_dim`` channels that keys and values are made of: the values are those channels of the key, no copy.
    ``num_kv_heads``, ``head_dim`` and ``v_head_dim`` are those of the absorbed products, ``uncompressed`` has the others.
    """
    indexer: IndexerSpec | None = None
    """Chooses the keys that a token attends to; None: it attends to all that it sees."""

    def __post_init__(self) -> None:
        where = f"layer {self.layer}"
        if self.num_heads % self.num_kv_heads:
            raise ContradictionError(
                f"{where}: {self.num_heads} query heads cannot be shared evenly by {self.num_kv_heads} KV heads", "num_kv_heads"
            )
        if self.v_from_k and self.v_head_dim != self.head_dim:
            raise ContradictionError(f"{where}: values of {self.v_head_dim} cannot be keys of {self.head_dim}", "v_head_dim")
        if not is_integer(self.rotary_dim, 0) or self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise ContradictionError(
                f"{where}: rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}", "rotary_dim"
            )
        if self.window is not None and not is_integer(self.window, 1):
            raise ContradictionError(
                f"{where}: window must be a whole number of at least 1, not {self.window!r}", "sliding_window"
            )
        if self.chunked and self.window is None:
            raise ContradictionError(f"{where}: attention in chunks needs their size", "attention_chunk_size")
        beyond = (self.window, self.soft_cap, self.kv_source, self.sinks or None)
        if self.indexer is not None and any(value is not None for value in beyond):
            raise ContradictionError(
                f"{where}: an indexer goes with no window, soft cap or sinks, nor with another layer's KV", "indexer"
            )
        if self.indexer is not None and self.num_kv_heads % self.indexer.lists:
            raise ContradictionError(
                f"{where}: {self.num_kv_heads} KV heads cannot be shared evenly by {self.indexer.lists} index heads",
                "index_n_heads",
            )

    @property
    def kinds(self) -> frozenset[str]:
        """Names of the fields that change how heads attend to the keys they are given: a backend lists those it computes."""
        given = (field for field in dataclasses.fields(self) if field.name not in _LAYOUT)
        return frozenset(field.name for field in given if getattr(self, field.name) != field.default)

    @property
    def uncompressed(self) -> AttentionSpec:
        """Returns the attention with the keys and values of every head, as it is computed, whatever is kept.

        Raises:
            ValueError: the layer keeps no compressed KV.
        """
        if self.mla is None:
            raise ValueError(f"layer {self.layer} keeps no compressed KV")
        return dataclasses.replace(
            self,
            num_kv_heads=self.num_heads,
            head_dim=self.mla.head_dim,
            v_head_dim=self.mla.v_head_dim,
            mla=None,
            indexer=None,
        )

    @property
    def row_width(self) -> int:
        """Numbers that one KV head keeps of a token."""
        return self.head_dim if self.mla is not None else self.head_dim + self.v_head_dim

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of every matrix around the attention."""
        output = [(hidden_size, self.out_size)]
        if self.indexer is not None:
            output += self.indexer.matrices(hidden_size, None if self.mla is None else self.mla.q_rank)
        if self.mla is None:
            values = 0 if self.v_from_k else self.v_size
            kept = self.k_size + values if self.kv_source is None else 0
            gate = self.out_size if self.output_gate else 0
            return [(self.q_size + kept + gate, hidden_size), *output]
        rank = self.mla.q_rank
        query = [(self.q_size, hidden_size)] if rank is None else [(rank, hidden_size), (self.q_size, rank)]
        if self.output_gate and rank is not None:
            query = [(rank, hidden_size), (self.q_size + self.out_size, 2 * rank)]
        up = self.num_heads * (self.mla.head_dim - self.rotary_dim + self.mla.v_head_dim)
        return [*query, (self.head_dim, hidden_size), (up, self.v_head_dim), *output]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.head_dim if self.mla is None else self.mla.head_dim)

    @property
    def k_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        return 0 if self.mla is not None else self.num_kv_heads * self.v_head_dim

    @property
    def out_size(self) -> int:
        """Width of the attention output, which is the input of o_proj."""
        return self.num_heads * (self.v_head_dim if self.mla is None else self.mla.v_head_dim)
