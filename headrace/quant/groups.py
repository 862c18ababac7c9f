"""GroupCodes: a weight matrix as small integers, each group of inputs with a scale and a zero point or a minimum of its own.

It is the neutral form between what a file stores and what a kernel wants. Every step of the way knows its error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from headrace.parallel.shards import Cut

GROUP = 32
"""Inputs that share a scale and a minimum: GGUF's, and the one that the packed kernels are fast with."""
AT_ONCE = 2**22
"""Numbers that are rounded or dequantised at once: each step makes a float32 copy of them."""


def rows_at_once(columns: int, multiple: int = 1) -> int:
    """Returns the number of outputs, a multiple, that are rounded or dequantised at once."""
    return max(multiple, AT_ONCE // columns // multiple * multiple)


@dataclasses.dataclass(frozen=True)
class GroupCodes:
    """``weight[n, k] = scales[n, g] * codes[n, k] + offsets[n, g]`` with minima as offsets, or
    ``scales[n, g] * (codes[n, k] - offsets[n, g])`` with integer zero points; the group g of an input k is ``order[k]``, or
    ``k // group``.
    """

    bits: int
    """4 or 8: codes are 0 to 2 ** bits - 1."""
    codes: torch.Tensor
    """``[N, K]`` uint8"""
    scales: torch.Tensor
    """``[N, G]``, in the float dtype in which they are stored"""
    offsets: torch.Tensor
    """``[N, G]``: uint8 zero points, or float32 minima"""
    group: int = GROUP
    """Inputs of a group; the last may have fewer."""
    order: torch.Tensor | None = None
    """``[K]`` int64: the group of each input, where it does not follow from its place."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def zeros(self) -> torch.Tensor | None:
        """``[N, G]`` uint8; None: the groups have minima."""
        return None if self.offsets.is_floating_point() else self.offsets

    @property
    def mins(self) -> torch.Tensor:
        """``[N, G]`` float32: the value of code 0."""
        return self.offsets if self.offsets.is_floating_point() else -self.scales.float() * self.offsets.float()

    def dequantize(self) -> torch.Tensor:
        """``[N, K]`` float32"""
        weight = self.codes.to(torch.float32, memory_format=torch.contiguous_format)
        rows, groups = self.scales.shape
        # Groups of one size broadcast; other scales and offsets are spread, which makes them as large as the weight.
        even = self.order is None and (groups == 1 or groups * self.group == weight.shape[1])
        count = max(rows, 1) if even else rows_at_once(weight.shape[1])
        for start in range(0, rows, count):
            here = slice(start, start + count)
            scales, offsets, part = self.scales[here].float(), self.offsets[here].float(), weight[here]
            if even:
                scales, offsets, part = scales[..., None], offsets[..., None], part.view(rows, groups, -1)
            else:
                scales, offsets = self._for_inputs(scales), self._for_inputs(offsets)
            if self.zeros is None:
                part.mul_(scales).add_(offsets)
            else:
                part.sub_(offsets).mul_(scales)
        return weight

    def _for_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """``[N, G] -> [N, K]``"""
        if self.order is not None:
            return values.index_select(1, self.order)
        return values.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]

    def rows(self, which: slice) -> GroupCodes:
        """Some of the outputs."""
        return dataclasses.replace(self, codes=self.codes[which], scales=self.scales[which], offsets=self.offsets[which])

    def cut(self, cut: Cut) -> GroupCodes:
        """One rank's part. Groups of inputs that the cut splits become smaller ones with the same scales."""
        if cut.along == "outputs":
            return self.rows(slice(cut.start, cut.stop))
        codes = self.codes[:, cut.start : cut.stop]
        if self.order is not None:
            return dataclasses.replace(self, codes=codes, order=self.order[cut.start : cut.stop])
        if self.scales.shape[1] == 1:
            return dataclasses.replace(self, codes=codes)
        whole = self.divide(math.gcd(self.group, cut.start, 0 if cut.stop == cut.whole else cut.stop))
        groups = slice(cut.start // whole.group, -(-cut.stop // whole.group))
        return dataclasses.replace(whole, codes=codes, scales=whole.scales[:, groups], offsets=whole.offsets[:, groups])

    def divide(self, group: int) -> GroupCodes:
        """Returns the same weights in groups of a divisor of their size."""
        count = -(-self.shape[1] // group)
        if self.scales.shape[1] == count:
            return self
        each = count if self.scales.shape[1] == 1 else self.group // group
        scales, offsets = (values.repeat_interleave(each, 1)[:, :count] for values in (self.scales, self.offsets))
        return dataclasses.replace(self, scales=scales, offsets=offsets, group=group)

    def widen(self) -> GroupCodes:
        """Returns the same weights as 8-bit codes."""
        return dataclasses.replace(self, bits=8)

    def sort(self) -> tuple[torch.Tensor, GroupCodes] | None:
        """Sorts the inputs by their groups.

        Returns:
            ``[K]`` int64: the input at each place; and the same weights with the inputs in that order. None: a group is cut.
        """
        places = torch.arange(self.shape[1], device=self.codes.device)
        if self.order is None:
            return places, self
        order = torch.argsort(self.order, stable=True)
        if not torch.equal(self.order[order], places // self.group):
            return None
        return order, dataclasses.replace(self, codes=self.codes[:, order], order=None)

    def regroup(self) -> GroupCodes | None:
        """Returns the same weights in groups of 32 with scales in float32; None: no such groups hold them."""
        if self.order is not None or self.shape[1] % GROUP or (self.group % GROUP and self.scales.shape[1] > 1):
            return None
        if self.group == GROUP and self.scales.dtype == torch.float32:
            return self
        divided = self.divide(GROUP)
        return dataclasses.replace(divided, scales=divided.scales.float(), group=GROUP)


def narrow(values: torch.Tensor) -> torch.Tensor:
    """The same numbers, of float32 in float16 if that holds them."""
    half = values.half()
    return half if values.dtype == torch.float32 and torch.equal(half.float(), values) else values


def concatenate(pieces: Sequence[GroupCodes]) -> GroupCodes:
    """Concatenates pieces along the outputs. All have the same bits, K and groups."""
    if len(pieces) == 1:
        return pieces[0]
    names = ("codes", "scales", "mins" if any(piece.zeros is None for piece in pieces) else "offsets")
    codes, scales, offsets = (torch.cat([getattr(piece, name) for piece in pieces]) for name in names)
    return GroupCodes(pieces[0].bits, codes, scales, offsets, pieces[0].group)


def round_to_groups(weight: torch.Tensor, bits: int, step: torch.dtype, anchor: int = 0) -> GroupCodes:
    """Rounds a float matrix to codes that are spread evenly over each group's range.

    Args:
        weight: ``[N, K]``, K a multiple of 32.
        step: the dtype in which the kernel keeps a group's scale and its value at code ``anchor``. Both are rounded to
            it before the codes are chosen, so that the codes make up for it.
        anchor: 0 for kernels that keep a minimum, ``2 ** (bits - 1)`` for those that keep a middle.
    """
    top = 2**bits - 1
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales, mins = torch.empty(2, weight.shape[0], weight.shape[1] // GROUP).unbind()
    # A few rows at a time: each step is a float32 copy.
    count = rows_at_once(weight.shape[1])
    for start in range(0, len(weight), count):
        here = slice(start, start + count)
        groups = weight[here].float().view(-1, weight.shape[1] // GROUP, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        step_of = ((high - low) / top).to(step).float()
        fixed = (low + anchor * step_of).to(step).float()
        inverse = torch.where(step_of > 0, 1 / step_of, torch.zeros_like(step_of))
        rounded = (groups - fixed[..., None]).mul_(inverse[..., None]).add_(anchor).round_().clamp_(0, top)
        codes[here].copy_(rounded.view(-1, weight.shape[1]))
        scales[here], mins[here] = step_of, fixed - anchor * step_of
    return GroupCodes(bits, codes, scales, mins)


def round_to_zero_points(weight: torch.Tensor, bits: int, step: torch.dtype) -> GroupCodes:
    """Rounds a float matrix to codes with integer zero points: each group's range is widened to include 0.

    Args:
        weight: ``[N, K]``, K a multiple of 32.
        step: the dtype in which the kernel keeps scales.
    """
    top = 2**bits - 1
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((high - low) / top).to(step).float()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    zeros = (-low / scales).round_().clamp_(0, top)
    codes = (groups / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, top)
    return GroupCodes(bits, codes.to(torch.uint8).view(weight.shape), scales.to(step), zeros.to(torch.uint8))


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``exact``."""
    norm = exact.float().norm()
    return float((approximate.float() - exact.float()).norm() / norm) if norm > 0 else float(approximate.float().norm())
