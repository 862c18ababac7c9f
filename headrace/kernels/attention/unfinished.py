"""Unfinished: q, k and v of decode rows as their projection left them, for attention that finishes them itself."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Unfinished(NamedTuple):
    """The arguments of ``kernels.qkv.norm_rotate_and_cache`` that attention may take over, of the same meaning."""

    qkv: torch.Tensor
    slot_mapping: torch.Tensor
    cos_sin: torch.Tensor | None
    rotary_dim: int
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    offset: bool
    streamed: bool = False
    """The projection fills the shared memory of all multiprocessors, as the kernel of ``single.cu`` does."""

    def of_tokens(self, tokens: slice) -> Unfinished:
        """Returns the part of some tokens."""
        angles = None if self.cos_sin is None else self.cos_sin[tokens]
        return self._replace(qkv=self.qkv[tokens], slot_mapping=self.slot_mapping[tokens], cos_sin=angles)
