"""What a layer keeps in the KV cache, in planes, and which layers share a block table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from headrace.spec.attention import AttentionSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Plane:
    """One kind of value kept for each token (or once a sequence): ``heads * width`` numbers of ``dtype``."""

    name: str
    heads: int
    width: int
    dtype: str
    per: Literal["token", "sequence"] = "token"

    @property
    def nbytes(self) -> int:
        """Bytes for one token (or one sequence)."""
        return self.heads * self.width * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """The planes of one layer. K and V of one token and head lie side by side: two planes of one tensor."""

    layer: int
    planes: tuple[Plane, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.nbytes for plane in self.planes if plane.per == "token")


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same token positions and so share one block table."""

    index: int
    window: int | None
    """None: every position is kept. W: only positions that a later token can still see."""
    layers: tuple[int, ...]
    bytes_per_token: int

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window {self.window}"


def layer_kv(spec: AttentionSpec, dtype: str) -> LayerKV:
    """The planes that a layer keeps: K and V, or one for compressed KV, or none if it reads another layer's."""
    if spec.kv_source is not None:
        return LayerKV(spec.layer, ())
    if spec.latent is not None:
        return LayerKV(spec.layer, (Plane("latent", 1, spec.row_width, dtype),))
    return LayerKV(
        spec.layer,
        (Plane("k", spec.num_kv_heads, spec.head_dim, dtype), Plane("v", spec.num_kv_heads, spec.v_head_dim, dtype)),
    )


def cache_groups(specs: Sequence[AttentionSpec], dtype: str) -> tuple[CacheGroup, ...]:
    """Groups layers by the positions they keep; full attention first, then windows from wide to narrow."""
    windows = {spec.window for spec in specs}
    order = sorted(windows, key=lambda window: (window is not None, -(window or 0)))
    groups = []
    for index, window in enumerate(order):
        members = [spec for spec in specs if spec.window == window]
        size = sum(layer_kv(spec, dtype).bytes_per_token for spec in members)
        groups.append(CacheGroup(index, window, tuple(spec.layer for spec in members), size))
    return tuple(groups)
