"""The KV that a layer keeps in the cache, in planes, and the layers that share a block table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.errors import ConfigError
from headrace.model_spec.attention import AttentionSpec

ALIGNMENT = 16
"""Bytes: the widest load of a GPU, at which FlashInfer's kernels want rows to begin."""
FP8_KV = "fp8_e4m3"
"""A KV dtype: e4m3 numbers, with a float32 scale for each token and head of K and of V."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8_KV: 1, "float64": 8, "int32": 4}


@dataclasses.dataclass(frozen=True)
class Plane:
    """One kind of value kept for each token: ``heads * width`` numbers of ``dtype``."""

    name: str
    heads: int
    width: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes for one token."""
        return self.heads * self.width * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """The planes of one layer. K and V of one token and head lie side by side: two planes of one tensor. The index keys of a
    block's tokens lie behind all of them.

    In FP8 a block's tokens lie side by side plane after plane, the scales behind: see ``headrace.cache.fp8``.
    """

    layer: int
    planes: tuple[Plane, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same token positions and so share one block table."""

    index: int
    window: int | None
    """None: every position is kept. W: only positions that a later token can still see."""
    layers: tuple[int, ...]
    """Layers of the group, which keep KV of their own."""
    bytes_per_token: int
    layer_bytes: tuple[int, ...] = ()
    """``bytes_per_token`` of each of ``layers``; none given: it is one run of bytes."""
    chunked: bool = False
    """The window does not slide: see ``AttentionSpec.chunked``."""

    @property
    def name(self) -> str:
        if self.window is None:
            return "full"
        return f"chunk {self.window}" if self.chunked else f"window {self.window}"

    def first_seen(self, position: int) -> int:
        """Returns the first position that the token at ``position`` sees; later tokens see none before it."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)

    def unseen_from(self, position: int, window: int) -> int:
        """Returns the first position whose token sees none before ``position``. ``window``: the group's."""
        return -(-position // window) * window if self.chunked else position + window - 1

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes of one block in all layers: the sum over the layers, none padded to another.

        Only where some layers' runs of bytes are multiples of ``ALIGNMENT`` and others' are not, the block ends with what
        the former need to be aligned in every block.
        """
        total = block_size * self.bytes_per_token
        aligned = any(block_size * size % ALIGNMENT == 0 for size in self.layer_bytes)
        return -(-total // ALIGNMENT) * ALIGNMENT if aligned else total

    def layer_offsets(self, block_size: int) -> tuple[int, ...]:
        """Returns the offset in a block at which each of ``layers`` has its run of bytes.

        The larger the power of two that divides a run, the earlier it comes: so each begins at a multiple of its own.
        """
        sizes = [block_size * size for size in self.layer_bytes]
        offsets, end = [0] * len(sizes), 0
        for place in sorted(range(len(sizes)), key=lambda place: -(sizes[place] & -sizes[place])):
            offsets[place] = end
            end += sizes[place]
        return tuple(offsets)


def block_sizes(groups: Sequence[CacheGroup], block_size: int, state_bytes: int = 0) -> tuple[int, ...]:
    """Bytes of a block of each group, and then of a state block where there are state layers.

    The layers of a model's only group have a tensor each: nothing is to be aligned.
    """
    if len(groups) == 1 and not state_bytes:
        return (block_size * groups[0].bytes_per_token,)
    sizes = tuple(group.block_bytes(block_size) for group in groups)
    return (*sizes, state_bytes) if state_bytes else sizes


def layer_kv(spec: AttentionSpec, dtype: str) -> LayerKV:
    """The planes that a layer keeps: K and V, or one for compressed KV, or none if it reads another layer's.

    Raises:
        ConfigError: compressed KV, of which FP8 would round every head's keys and values at once; or index keys, of which the
            order of near scores depends on every digit.
    """
    if spec.kv_source is not None:
        return LayerKV(spec.layer, ())
    if spec.mla is not None and dtype == FP8_KV:
        raise ConfigError(f"layer {spec.layer}: compressed KV cannot be kept in FP8", "kv_cache_dtype")
    width = 0 if spec.indexer is None else spec.indexer.width
    if width and dtype == FP8_KV:
        raise ConfigError(f"layer {spec.layer}: the keys of its indexer cannot be kept in FP8", "kv_cache_dtype")
    index = [Plane("index", 1, width, dtype)] if width else []
    if spec.mla is not None:
        return LayerKV(spec.layer, (Plane("mla", 1, spec.row_width, dtype), *index))
    heads = spec.num_kv_heads
    planes = [Plane("k", heads, spec.head_dim, dtype), Plane("v", heads, spec.v_head_dim, dtype), *index]
    if dtype == FP8_KV:
        planes += [Plane("k_scale", heads, 1, "float32"), Plane("v_scale", heads, 1, "float32")]
    return LayerKV(spec.layer, tuple(planes))


def cache_groups(specs: Sequence[AttentionSpec], dtype: str) -> tuple[CacheGroup, ...]:
    """Groups layers by the positions they keep; full attention first, then windows and chunks from wide to narrow.

    A layer that reads another's KV is in no group: it costs nothing.
    """
    keepers = [spec for spec in specs if spec.kv_source is None]
    kinds = {(spec.window, spec.chunked) for spec in keepers}
    groups = []
    for index, kind in enumerate(sorted(kinds, key=lambda kind: (kind[0] is not None, -(kind[0] or 0), kind[1]))):
        members = [spec for spec in keepers if (spec.window, spec.chunked) == kind]
        sizes = tuple(layer_kv(spec, dtype).bytes_per_token for spec in members)
        groups.append(CacheGroup(index, kind[0], tuple(spec.layer for spec in members), sum(sizes), sizes, kind[1]))
    return tuple(groups)
