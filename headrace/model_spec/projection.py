"""The matrices around a layer's attention, each with its own heads and width. Nothing infers one width from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.errors import ConfigError
from headrace.model_spec.attention import AttentionSpec

GROUPED = ("query_key_value", "linear_qkv")
"""Names of fused projections that hold, for each KV group, its query heads, its gates, its K head and its V head."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A projection: ``heads`` heads of ``width`` outputs each (of inputs, for o)."""

    name: str
    """q, k, v, gate or o."""
    heads: int
    width: int

    @property
    def size(self) -> int:
        return self.heads * self.width


def input_matrices(spec: AttentionSpec) -> tuple[Matrix, ...]:
    """Returns the matrices that project the hidden states, in the order in which the fused projection holds them.

    A layer that reads another's KV has no k and v; one whose values are its keys' has no v.

    Raises:
        ConfigError: the layer keeps compressed KV, whose projections are its family's own.
    """
    if spec.mla is not None:
        raise ConfigError(
            f"layer {spec.layer} keeps compressed KV: its projections cannot be cut or fused as q, k and v", "model"
        )
    made = [Matrix("q", spec.num_heads, spec.head_dim)]
    if spec.kv_source is None:
        made.append(Matrix("k", spec.num_kv_heads, spec.head_dim))
        if not spec.v_from_k:
            made.append(Matrix("v", spec.num_kv_heads, spec.v_head_dim))
    if spec.output_gate:
        made.append(Matrix("gate", spec.num_heads, spec.v_head_dim))
    return tuple(made)


def output_matrix(spec: AttentionSpec) -> Matrix:
    """o_proj by its inputs."""
    return Matrix("o", spec.num_heads, spec.v_head_dim)


def grouped_rows(spec: AttentionSpec) -> list[int]:
    """Maps the rows of the fused projection to those of a checkpoint that interleaves the matrices by KV group.

    A group has its share of the query heads, of their gates, and one K and one V head, each of its own width.

    Returns:
        For each row of the fused projection, the row of the checkpoint's tensor: a permutation.
    """
    groups = spec.num_kv_heads
    matrices = {matrix.name: matrix for matrix in input_matrices(spec)}
    members = [matrices[name] for name in ("q", "gate", "k", "v") if name in matrices]
    starts: dict[tuple[str, int], int] = {}
    at = 0
    for group in range(groups):
        for matrix in members:
            starts[matrix.name, group] = at
            at += matrix.size // groups
    return [
        starts[matrix.name, group] + row
        for matrix in matrices.values()
        for group in range(groups)
        for row in range(matrix.size // groups)
    ]


def halves(width: int) -> tuple[int, ...]:
    """Returns, for each channel of a head that is rotated in halves, its channel in a head that is rotated in pairs of
    neighbours."""
    return (*range(0, width, 2), *range(1, width, 2))


def of_heads(heads: int, order: Sequence[int]) -> list[int]:
    """``order`` of the channels of one head, for several side by side."""
    return [head * len(order) + channel for head in range(heads) for channel in order]
