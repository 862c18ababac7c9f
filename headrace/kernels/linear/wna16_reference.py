"""Weights of 4 and 8 bits for products with float activations (W4A16, W8A16): how kernels want them, and references.

Codes lie in 32-bit words in the order in which the threads of a warp feed them to a matrix instruction. A block of 8 outputs by
``RUN`` inputs is one (8 bits: two) of the 512 bytes that a warp loads at once. Of a block, thread ``4 n + q`` holds, of output
n, the inputs ``32 w + 8 q + c`` for w below 4 and c below 8.

Of 4 bits in groups of a block and more, a word holds the same two neighbours of each w; otherwise, all c of one w. A thread's
16 bytes are the same codes. ``ldmatrix`` gives thread q the words number q of all threads of an output, which are then its
neighbours of every 8 inputs: what instructions of a warpgroup take, with x in its own order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

RUN = 128
"""Inputs of a block."""
GROUPS = (16, 32, 64)
"""Sizes of groups below a block's. Others are its multiples."""
STEP = 32
"""Inputs of the smallest step of a product. Scales of smaller groups multiply weights, which are rounded to the dtype of the
activations; others multiply sums."""
LINES = 8
"""Outputs of a block."""
MAX_TILES = 1024
"""Tiles of a product whose inputs are split."""
_PLACES = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""Bits -> which of a word's codes lies at each place, from the lowest: two neighbours are half a word apart, so that one mask
makes a pair of 16-bit floats of them."""


class PackedWeight(NamedTuple):
    """``weight[n, k] = scales[g, n] * (code[n, k] - 2 ** (bits - 1)) + middles[g, n]``, where g is ``k // group``.

    An integer zero point z is a middle of ``scale * (2 ** (bits - 1) - z)``: exact in float32 if the scale has 16 bits, as is
    the whole sum.
    """

    words: torch.Tensor
    """``[ceil(N / 8), ceil(K / 128), bits / 4, 8, 16]`` int32, as ``pack`` makes them."""
    scales: torch.Tensor
    """``[G, N]`` in the dtype in which they are stored."""
    middles: torch.Tensor | None
    """``[G, N]`` float32: the value of the middle code; None: 0."""
    group: int
    """One of ``GROUPS``, or a multiple of ``RUN``: of a single group, K up to the next."""
    inputs: int
    """K"""
    arrived: torch.Tensor
    """``[MAX_TILES]`` int32 zeros: how many programs have made their part of a tile. Zeros again after each product."""

    @property
    def bits(self) -> int:
        return 4 * self.words.shape[2]

    @property
    def split(self) -> int:
        """Steps of a block; 1 also where groups are larger."""
        return max(RUN // max(self.group, STEP), 1)

    @property
    def on_weights(self) -> bool:
        return self.group < STEP

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]


def pack(codes: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Packs ``[..., N, K]`` uint8 to ``[..., ceil(N / 8), ceil(K / 128), bits / 4, 8, 16]`` int32, for groups of this size.

    Codes past the end are 0: kernels multiply them by zeros, and write none of their outputs.
    """
    *stack, outputs, inputs = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -inputs % RUN, 0, -outputs % LINES))
    if bits == 4 and group >= RUN:
        padded = _exchanged(padded)
    loads, per, places = bits // 4, 32 // bits, _PLACES[bits]
    # [..., block of outputs, output, block of inputs, load, w of the load, q, word of w, place]
    split = padded.view(*stack, -1, LINES, padded.shape[-1] // RUN, loads, 4 // loads, 4, 8 // per, per)
    words = torch.zeros(split.shape[:-1], dtype=torch.int32, device=codes.device)
    for place, code in enumerate(places):
        words |= split[..., code].int() << (bits * place)
    n = len(stack)
    # [..., block of outputs, block of inputs, load, output, q, w of the load, word of w]
    return words.permute(*range(n), *(n + axis for axis in (0, 2, 3, 1, 5, 4, 6))).flatten(n + 4).contiguous()


def _exchanged(codes: torch.Tensor) -> torch.Tensor:
    """Lays each run ``[w, q, pair, 2]`` as ``[pair, q, w, 2]``, and back."""
    return codes.reshape(*codes.shape[:-1], -1, 4, 4, 4, 2).transpose(-4, -2).reshape(codes.shape)


def unpack(words: torch.Tensor, outputs: int, inputs: int, group: int) -> torch.Tensor:
    """Returns the codes ``[..., N, K]`` uint8 that ``pack`` packed."""
    *stack, high, wide, loads, lines, _ = words.shape
    bits, n = 4 * loads, len(stack)
    per, places = 32 // bits, _PLACES[bits]
    split = words.view(*stack, high, wide, loads, lines, 4, 4 // loads, 8 // per)
    split = split.permute(*range(n), *(n + axis for axis in (0, 3, 1, 2, 5, 4, 6)))
    codes = torch.empty(*split.shape, per, dtype=torch.uint8, device=words.device)
    for place, code in enumerate(places):
        codes[..., code] = (split >> (bits * place)) & (2**bits - 1)
    codes = codes.reshape(*stack, high * lines, wide * RUN)
    if bits == 4 and group >= RUN:
        codes = _exchanged(codes)
    return codes[..., :outputs, :inputs]


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """``[N, K]`` float32"""
    codes = unpack(weight.words, weight.outputs, weight.inputs, weight.group).float()
    group = torch.arange(weight.inputs, device=codes.device) // weight.group
    result = codes.sub_(2 ** (weight.bits - 1)).mul_(weight.scales.float()[group].t())
    return result if weight.middles is None else result.add_(weight.middles[group].t())


def wna16_linear_ref(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``x W^T + bias``, rounded once."""
    y = x.float() @ dequantize(weight).t()
    return (y if bias is None else y + bias.float()).to(out_dtype)
