"""Integers of 4 and 8 bits for GPUs, as checkpoints store them or rounded from floats. Activations stay floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from headrace.kernels.linear.wna16 import wna16_gated, wna16_linear
from headrace.kernels.linear.wna16_reference import GROUPS, LINES, MAX_TILES, RUN, PackedWeight, dequantize, pack
from headrace.layers.linear import Linear
from headrace.layers.stored import Codes, StoredMatrix
from headrace.quant.candidates import EngineFacts, Keep, Limit, Round
from headrace.quant.float_codes import MicroscaledCodes
from headrace.quant.groups import GroupCodes, narrow, relative_error, rows_at_once
from headrace.quant.packed import PackedMethod, integer_codes

GROUP = 128
"""Inputs that share a scale where floats are rounded to 4 bits. Those of 8 bits have one for each output."""


class Int4GpuMethod(PackedMethod):
    """Codes of 4 bits with a scale for each group of inputs and, where a checkpoint has them, zero points or minima.

    Buffers: ``words``, ``scales`` and ``middles`` of ``PackedWeight``; ``order`` ``[K]``, where the checkpoint's groups are not
    of neighbours: the input that each place of the packed matrix has; and ``arrived``.
    """

    bits: ClassVar[int] = 4
    format = "int4 in groups"
    kernel = "Triton, CUDA C++ or cuBLAS, as the number of rows decides"
    devices = frozenset({"cpu", "cuda"})
    constants = frozenset({"order", "arrived"})
    batch_invariant = True

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        held = integer_codes(codes)
        if held is None or held.bits > cls.bits:
            return False
        return held.scales.shape[1] == 1 or held.group in GROUPS or held.group % RUN == 0

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        super().allocate(layer, dtype, device)
        self._device = device
        self._order: torch.Tensor | None = None

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        """Raises OverflowError if the parts have no common order of inputs, or groups of several sizes in one."""
        pieces: list[GroupCodes] = []
        approximate, exact = [], []
        for part in parts:
            codes = integer_codes(part.codes)
            if codes is not None and self.holds(codes):
                pieces.append(codes)
                continue
            floats = part.exact().to(self._device)
            pieces.append(self.rounded(floats))
            every = slice(0, None, max(1, len(floats) * len(parts) // 256))
            approximate.append(pieces[-1].rows(every).dequantize())
            exact.append(floats[every].float())
        self._order, pieces = _in_order([_on(piece, self._device) for piece in pieces])
        self._weight = self._fused(pieces)
        for name, tensor in self._weight._asdict().items():
            if isinstance(tensor, torch.Tensor):
                layer.register_buffer(name, tensor)
        if self._order is not None:
            layer.register_buffer("order", self._order)
        return relative_error(torch.cat(approximate), torch.cat(exact)) if exact else 0.0

    def rewrite(self, layer: Linear, parts: Sequence[StoredMatrix]) -> None:
        """Rounds floats to the groups that the layer has, in its order of inputs."""
        held = self._weight
        floats = torch.cat([part.exact().to(self._device) for part in parts])
        ordered = floats if self._order is None else floats[:, self._order]
        rounded = self._fused([round_symmetric(ordered, self.bits, held.group, held.scales.dtype)])
        held.words.copy_(rounded.words)
        held.scales.copy_(rounded.scales)
        if held.middles is not None:
            held.middles.zero_()

    def _fused(self, pieces: Sequence[GroupCodes]) -> PackedWeight:
        """One below the other, in the smallest of their groups."""
        middle, inputs = 2 ** (self.bits - 1), pieces[0].shape[1]
        group = min(_group(piece) for piece in pieces)
        if any(_group(piece) % group for piece in pieces):
            raise OverflowError("its parts have groups of sizes that do not divide each other")
        scales, middles, codes = [], [], []
        for piece in pieces:
            # Of codes with fewer bits the middle one becomes this middle, so that symmetric ones need no shift.
            own = 2 ** (piece.bits - 1)
            codes.append(piece.codes + (middle - own) if own < middle else piece.codes)
            scale = piece.scales.float()
            shift = piece.offsets + own * scale if piece.zeros is None else scale * (own - piece.offsets.float())
            each, count = _group(piece) // group, -(-inputs // group)
            scales.append(piece.scales.repeat_interleave(each, 1)[:, :count].t())
            middles.append(shift.repeat_interleave(each, 1)[:, :count].t())
        shifts = torch.cat(middles, 1).contiguous()
        return PackedWeight(
            words=_pack(codes, self.bits, group),
            scales=narrow(torch.cat(scales, 1)).contiguous(),
            middles=shifts if bool(shifts.any()) else None,
            group=group,
            inputs=inputs,
            arrived=torch.zeros(MAX_TILES, dtype=torch.int32, device=self._device),
        )

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, layer.in_features)
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        y = wna16_linear(rows, self._weight, layer.bias, layer.out_dtype, batch_invariant=layer.batch_invariant)
        return y.view(*x.shape[:-1], layer.out_features)

    def apply_gated(self, layer: Linear, x: torch.Tensor) -> torch.Tensor | None:
        return None if self._order is not None or layer.batch_invariant else wna16_gated(x, self._weight)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        weight = dequantize(self._weight)
        return weight if self._order is None else torch.empty_like(weight).index_copy_(1, self._order, weight)

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> GroupCodes:
        return round_symmetric(weight, cls.bits, GROUP, torch.bfloat16)


class Int8GpuMethod(Int4GpuMethod):
    """Codes of 8 bits, and of 4 where a part of a fused matrix has 8; MXFP4 and NVFP4 are integers, halves of them counted.
    Rounded floats have a scale for each output."""

    bits = 8
    format = "int8 in groups"

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> GroupCodes:
        return round_symmetric(weight, cls.bits, weight.shape[1], torch.float32)


def round_symmetric(weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype) -> GroupCodes:
    """Rounds ``[N, K]`` to the nearest of ``scale * (code - 2 ** (bits - 1))``.

    The number that is furthest from 0 in its group gets code 0, so that all codes are used; scales may be negative.

    Args:
        dtype: of scales, to which they are rounded before the codes are chosen.
    """
    (rows, inputs), middle = weight.shape, 2 ** (bits - 1)
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, -(-inputs // group), dtype=dtype, device=weight.device)
    # A few rows at a time: each step is a float32 copy.
    count = rows_at_once(inputs)
    for start in range(0, rows, count):
        here = slice(start, start + count)
        padded = torch.nn.functional.pad(weight[here].float(), (0, -inputs % group))
        groups = padded.view(len(padded), -1, group)
        peaks = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales[here] = (peaks / -middle).squeeze(2).to(dtype)
        wide = scales[here, :, None].float()
        chosen = torch.where(wide == 0, 0.0, groups / wide).round_().add_(middle).clamp_(0, 2 * middle - 1)
        codes[here].copy_(chosen.view(len(padded), -1)[:, :inputs])
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    return GroupCodes(bits, codes, scales, zeros, group)


def _pack(codes: Sequence[torch.Tensor], bits: int, group: int) -> torch.Tensor:
    """``pack`` of matrices one below the other, a few rows at a time: each of its steps is a copy."""
    if any(len(part) % LINES for part in codes[:-1]):
        codes = [torch.cat(list(codes))]
    size = rows_at_once(codes[0].shape[1], LINES)
    return torch.cat([pack(part[at : at + size], bits, group) for part in codes for at in range(0, len(part), size)])


def _group(piece: GroupCodes) -> int:
    """Inputs that share a scale; of one group, all, up to a multiple of a block's."""
    return -(-piece.shape[1] // RUN) * RUN if piece.scales.shape[1] == 1 else piece.group


def _on(piece: GroupCodes, device: str | torch.device) -> GroupCodes:
    order = None if piece.order is None else piece.order.to(device)
    tensors = {name: getattr(piece, name).to(device) for name in ("codes", "scales", "offsets")}
    return dataclasses.replace(piece, order=order, **tensors)


def _in_order(pieces: list[GroupCodes]) -> tuple[torch.Tensor | None, list[GroupCodes]]:
    """Sorts the inputs by their groups: the input at each place, and codes whose groups are of neighbours."""
    if all(piece.order is None for piece in pieces):
        return None, pieces
    ordered = [found for piece in pieces if (found := piece.sort()) is not None]
    if len(ordered) < len(pieces) or any(not torch.equal(order, ordered[0][0]) for order, _ in ordered):
        raise OverflowError("the inputs of its parts are in several orders, or its groups are cut")
    return ordered[0][0], [piece for _, piece in ordered]


def _limits(engine: EngineFacts) -> list[Limit]:
    if engine.dtype == "float32":
        return [Limit("its products are of 16-bit activations: set dtype bfloat16 or float16", "dtype")]
    return []


KEEP_INTEGERS = Keep(
    methods=(Int4GpuMethod, Int8GpuMethod),
    codes=(GroupCodes, MicroscaledCodes),
    keeps=frozenset({"int4", "int8", "mxfp4", "nvfp4"}),
    title="integers, MXFP4 or NVFP4",
    limits_of=_limits,
)


def round_to_integers(method: type[Int4GpuMethod]) -> Round:
    return Round(by=method, to=f"int{method.bits}", limits_of=_limits)
