"""ExpertCodes: the matrices of experts in a number format that the kernels decode."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from headrace.kernels.linear.fp8_reference import E4M3_MAX, quantize_rows_ref

ExpertCodec = Literal["e4m3", "int4", "mxfp4", "int8"]
ExpertKind = Literal["e4m3", "e4m3_blocks", "int4", "mxfp4", "int4_e4m3", "int8", "int4_minima", "int8_minima"]
"""The sorts of products, which differ in speed."""
X_GROUP = 128
"""Channels of a row that share a scale where a token has several."""
BLOCK = 128
"""Inputs of a block of words."""
PLACE = BLOCK // 4
"""Inputs in one place of a block's words."""
HALF_PLACE = PLACE // 2
"""Every group of inputs has a multiple of these."""
MIDDLE = {"int4": 8, "int8": 128}
"""The zero point of symmetric codes."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class ExpertCodes:
    """Stacked matrices ``[E, N, K]``. ``weight[e, n, k] = (code - zero) * scales[e, k // group[1], n // group[0]]``, or with
    minima ``code * scale + minimum``, of the same groups.

    Four codes of 4 bits lie in a word of 16, four of 8 bits in one of 32: the inputs are cut into blocks of ``BLOCK``, and
    the word ``i`` of a block has, from the lowest bits on, the inputs ``i``, ``i + 32``, ``i + 64`` and ``i + 96``. Each
    place in the words is thus a run of 32 inputs, and two words at once are decoded to two neighbours. Blocks are outermost, so
    that a tile of outputs reads a contiguous range.

    Scales of groups multiply sums, so that products are exact. With minima, and where groups end within a place, weights are
    computed in float32 and rounded to the dtype of the activations.
    """

    codec: ExpertCodec
    shape: tuple[int, int, int]
    codes: torch.Tensor
    """``[E, N, K]`` uint8 that hold e4m3, or words ``[E, ceil(K / BLOCK), N, PLACE]``: int16 of 4 bits, int32 of 8"""
    scales: torch.Tensor
    """``[E, ceil(K / group[1]), N / group[0]]``: floats, or uint8 exponents of two of mxfp4, 127 for 1"""
    group: tuple[int, int]
    """Outputs and inputs that share a scale. Outputs are of e4m3 a divisor of N, else 1."""
    offsets: torch.Tensor | None = None
    """int8 zero points of int4 less ``MIDDLE``, or minima as floats, in the shape of ``scales``; None: zero points are
    ``MIDDLE``"""
    x_group: int | None = None
    """Activations are rounded to e4m3 with a scale for each row and so many channels; None: they are not."""
    x_scale: torch.Tensor | None = None
    """``[1]`` float32: the one scale of all activations, in place of theirs"""
    order: torch.Tensor | None = None
    """``[E, K]`` int32: the input at each place, where groups are not of neighbours; None: they are in order."""

    @property
    def minima(self) -> torch.Tensor | None:
        return self.offsets if self.offsets is not None and self.offsets.is_floating_point() else None

    @property
    def on_weights(self) -> bool:
        """Whether scales of integers multiply weights."""
        return self.minima is not None or (self.group[1] < self.shape[2] and not scales_sums(self.group[1]))

    @property
    def kind(self) -> ExpertKind:
        if self.codec == "e4m3":
            return "e4m3" if self.group[1] >= self.shape[2] else "e4m3_blocks"
        if self.on_weights and self.codec in MIDDLE:
            return "int4_minima" if self.codec == "int4" else "int8_minima"
        return "int4_e4m3" if self.codec == "int4" and self.x_group is not None else self.codec

    def dequantize(self, expert: int) -> torch.Tensor:
        """``[N, K]`` float32 of one expert"""
        _, outputs, inputs = self.shape
        codes, scales = self.codes[expert], self.scales[expert]
        if self.codec == "mxfp4":
            scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
        if self.codec == "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            bits = 8 if self.codec == "int8" else 4
            places = torch.stack([codes >> bits * place & (2**bits - 1) for place in range(4)], 1)  # [blocks, 4, N, words]
            numbers = places.permute(2, 0, 1, 3).reshape(outputs, -1)[:, :inputs]
            if self.codec == "mxfp4":
                table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
                values = table[numbers.long()]
            else:
                values = numbers.float()
        wide = self._wide(scales.float())
        if self.minima is not None:
            values = values * wide + self._wide(self.minima[expert].float())
        else:
            if self.codec in MIDDLE:
                values = values - MIDDLE[self.codec]
            if self.offsets is not None:
                values = values - self._wide(self.offsets[expert].float())
            values = values * wide
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order[expert].long(), values)

    def _wide(self, values: torch.Tensor) -> torch.Tensor:
        """``[groups, N / group[0]] -> [N, K]``"""
        rows = values.t().repeat_interleave(self.group[0], 0)
        return rows.repeat_interleave(self.group[1], 1)[:, : self.shape[2]]

    def round_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, K]`` float32 as the product takes it"""
        if self.x_group is None:
            return x.float()
        if self.x_scale is not None:
            codes = (x.float() / self.x_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            return codes.float() * self.x_scale
        width, group = x.shape[1], min(self.x_group, x.shape[1])
        padded = torch.nn.functional.pad(x, (0, -width % group))
        codes, scales = quantize_rows_ref(padded, group)
        return (codes.float() * scales.repeat_interleave(group, 1))[:, :width]


def scales_sums(group: int) -> bool:
    """Whether scales of groups of so many inputs multiply sums: places of words are wholes of them, or they of blocks."""
    return group in (PLACE, 2 * PLACE) or group % BLOCK == 0


def pack_words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Packs ``[..., N, K]`` uint8 of so many bits as ``[..., ceil(K / BLOCK), N, PLACE]``. Code 0 fills the last block."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % BLOCK))
    places = padded.view(*codes.shape[:-1], -1, 4, PLACE)
    if bits == 8:
        words = places.transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1)
    else:
        low, high = (places[..., at, :] | places[..., at + 1, :] << 4 for at in (0, 2))
        words = torch.stack((low, high), -1).view(torch.int16).squeeze(-1)
    return words.transpose(-3, -2).contiguous()
