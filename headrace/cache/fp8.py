"""Fp8LayerCache: one layer's paged KV in e4m3, with a scale for each token and head."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import torch

from headrace.cache.layer import LayerCache
from headrace.errors import ConfigError
from headrace.kernels.kv_cache import FP8
from headrace.model_spec import AttentionSpec, layer_kv
from headrace.model_spec.kv import ALIGNMENT, FP8_KV


@dataclasses.dataclass(frozen=True)
class Fp8LayerCache(LayerCache):
    """A block is one run of bytes: keys by token, values by channel, then the scales of both by head.

    Values of a block's tokens lie side by side, so that attention reads what a matrix product sums over in one piece: bytes
    cannot be transposed on the way. ``rows`` is ``[num_blocks, bytes]`` uint8; to move blocks needs to know no more.
    """

    tokens: int = 0
    """Tokens of a block."""
    dirty: bool = False

    @property
    def block_size(self) -> int:
        return self.tokens

    @cached_property
    def keys(self) -> torch.Tensor:
        spec = self.spec
        strides = (self.rows.stride(0), spec.k_size, spec.head_dim, 1)
        shape = (len(self.rows), self.tokens, spec.num_kv_heads, spec.head_dim)
        return self.rows.view(FP8).as_strided(shape, strides)

    @cached_property
    def values(self) -> torch.Tensor:
        spec = self.spec
        strides = (self.rows.stride(0), 1, spec.v_head_dim * self.tokens, self.tokens)
        shape = (len(self.rows), self.tokens, spec.num_kv_heads, spec.v_head_dim)
        return self.rows.view(FP8).as_strided(shape, strides, self.rows.storage_offset() + self.tokens * spec.k_size)

    @cached_property
    def k_scale(self) -> torch.Tensor:
        return self._scale(0)

    @cached_property
    def v_scale(self) -> torch.Tensor:
        return self._scale(1)

    def _scale(self, side: int) -> torch.Tensor:
        spec = self.spec
        count = self.tokens * spec.num_kv_heads
        first = (self.rows.storage_offset() + self.tokens * (spec.k_size + spec.v_size)) // 4 + side * count
        strides = (self.rows.stride(0) // 4, 1, self.tokens)
        return self.rows.view(torch.float32).as_strided((len(self.rows), self.tokens, spec.num_kv_heads), strides, first)


def check_alignment(spec: AttentionSpec, block_size: int) -> None:
    """Raises ConfigError if the layer's runs of bytes would not be aligned."""
    if spec.kv_source is not None:
        return
    runs = (block_size * spec.k_size, block_size * spec.v_size, block_size * layer_kv(spec, FP8_KV).bytes_per_token)
    if math.gcd(*runs) % ALIGNMENT:
        raise ConfigError(
            f"layer {spec.layer}: an FP8 KV cache needs a block_size that makes a block's keys, its values and all its bytes "
            f"multiples of {ALIGNMENT}; {block_size} makes them {runs[0]}, {runs[1]} and {runs[2]}",
            "block_size",
        )
