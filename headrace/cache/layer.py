"""LayerCache: one layer's paged keys and values."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch

from headrace.model_spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's paged KV: ``rows[block, offset, kv_head]`` is K then V of one token and head, side by side.

    Of compressed KV it is K, whose last channels are V too.
    """

    spec: AttentionSpec
    group: int
    """Index of the layer's cache group."""
    rows: torch.Tensor
    """``[num_blocks, block_size, num_kv_heads, row_width]``"""
    index_keys: torch.Tensor | None = None
    """``[num_blocks, block_size, width]``, for a layer whose indexer keeps keys of its own. Places that hold no token of a row
    may hold any bytes."""

    @cached_property
    def keys(self) -> torch.Tensor:
        """``[num_blocks, block_size, num_kv_heads, head_dim]``, a view."""
        return self.rows[..., : self.spec.head_dim]

    @cached_property
    def values(self) -> torch.Tensor:
        """``[num_blocks, block_size, num_kv_heads, v_head_dim]``, a view."""
        return self.rows[..., self.spec.row_width - self.spec.v_head_dim :]

    @property
    def block_size(self) -> int:
        return self.rows.shape[1]

    @property
    def dirty(self) -> bool:
        """Whether places of a row's blocks that hold no token of the row may hold any bytes, NaN among them.

        Else they hold what some token wrote there, or 0, and are finite as long as all KV is.
        """
        return False

    @property
    def k_scale(self) -> torch.Tensor | None:
        """``[num_blocks, block_size, num_kv_heads]`` float32: factors of the keys, where they are stored in FP8."""
        return None

    @property
    def v_scale(self) -> torch.Tensor | None:
        """Factors of the values, with the shape and strides of ``k_scale``."""
        return None
