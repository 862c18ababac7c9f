"""Token bitmasks over logits."""

from __future__ import annotations

import torch


def apply_masks(logits: torch.Tensor, masks: torch.Tensor, which: torch.Tensor) -> None:
    """Sets the logits of tokens that a row's mask does not allow to -inf, in place.

    Args:
        logits: ``[N, vocab]`` float32, contiguous.
        masks: ``[M, ceil(vocab / 32)]`` int32: bit b of word w set: token 32 w + b is allowed.
        which: ``[N]`` int32: row -> its mask; -1: none.
    """
    octets = masks.view(torch.uint8)  # little-endian words
    bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits.masked_fill_(banned[which.clamp(min=0)] & (which >= 0).unsqueeze(1), -torch.inf)
