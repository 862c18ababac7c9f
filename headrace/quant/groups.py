"""GroupCodes: a weight matrix as small integers, each group of 32 inputs with a scale and a minimum of its own.

It is the neutral form between what a file stores and what a kernel wants. Every step of the way knows its error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from headrace.errors import ConfigError
from headrace.parallel.shards import Cut

GROUP = 32
"""Inputs that share a scale and a minimum: GGUF's, and the one that the packed kernels are fast with."""


@dataclasses.dataclass(frozen=True)
class GroupCodes:
    """``weight[n, k] = scales[n, k // 32] * codes[n, k] + mins[n, k // 32]``"""

    bits: int
    """4 or 8: codes are 0 to 2 ** bits - 1."""
    codes: torch.Tensor
    """``[N, K]`` uint8"""
    scales: torch.Tensor
    """``[N, K / 32]`` float32"""
    mins: torch.Tensor
    """``[N, K / 32]`` float32"""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self) -> torch.Tensor:
        """``[N, K]`` float32"""
        codes = self.codes.reshape(*self.scales.shape, GROUP).float()
        return codes.mul_(self.scales[..., None]).add_(self.mins[..., None]).view(self.shape)

    def rows(self, which: slice) -> GroupCodes:
        """Some of the outputs."""
        return GroupCodes(self.bits, self.codes[which], self.scales[which], self.mins[which])

    def cut(self, cut: Cut) -> GroupCodes:
        """One rank's part. Raises ConfigError if the cut splits a group of inputs."""
        if cut.along == "outputs":
            return self.rows(slice(cut.start, cut.stop))
        if cut.start % GROUP or (cut.stop % GROUP and cut.stop != cut.whole):
            raise ConfigError(
                f"inputs {cut.start} to {cut.stop} split a group of {GROUP} that share a scale", "tensor_parallel_size"
            )
        groups = slice(cut.start // GROUP, -(-cut.stop // GROUP))
        return GroupCodes(self.bits, self.codes[:, cut.start : cut.stop], self.scales[:, groups], self.mins[:, groups])

    def widen(self) -> GroupCodes:
        """Returns the same weights as 8-bit codes."""
        return dataclasses.replace(self, bits=8)


def concatenate(pieces: Sequence[GroupCodes]) -> GroupCodes:
    """Concatenates pieces along the outputs. All have the same bits and K."""
    if len(pieces) == 1:
        return pieces[0]
    codes, scales, mins = (torch.cat([getattr(piece, name) for piece in pieces]) for name in ("codes", "scales", "mins"))
    return GroupCodes(pieces[0].bits, codes, scales, mins)


def round_to_groups(weight: torch.Tensor, bits: int, step: torch.dtype, anchor: int = 0) -> GroupCodes:
    """Rounds a float matrix to codes that are spread evenly over each group's range.

    Args:
        weight: ``[N, K]``, K a multiple of 32.
        step: the dtype in which the kernel keeps a group's scale and its value at code ``anchor``. Both are rounded to
            it before the codes are chosen, so that the codes make up for it.
        anchor: 0 for kernels that keep a minimum, ``2 ** (bits - 1)`` for those that keep a middle.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    top = 2**bits - 1
    scales = ((high - low) / top).to(step).float()
    fixed = (low + anchor * scales).to(step).float()
    inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
    codes = ((groups - fixed[..., None]) * inverse[..., None]).add_(anchor).round_().clamp_(0, top)
    return GroupCodes(bits, codes.to(torch.uint8).view(weight.shape), scales, fixed - anchor * scales)


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``exact``."""
    norm = exact.float().norm()
    return float((approximate.float() - exact.float()).norm() / norm) if norm > 0 else float(approximate.float().norm())
