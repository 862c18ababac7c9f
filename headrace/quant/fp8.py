"""Weights in FP8 (e4m3) for GPUs, as checkpoints store them or rounded from floats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from headrace.kernels import support
from headrace.kernels.linear.fp8 import fp8_linear, fp8_linear_gated, streams
from headrace.kernels.linear.fp8_reference import (
    E4M3_MAX,
    GROUP,
    LEAST_SCALE,
    Activations,
    Fp8Rows,
    Fp8Weight,
    dequantize,
    quantize_rows_ref,
)
from headrace.layers.linear import Linear
from headrace.layers.stored import Codes, StoredMatrix
from headrace.quant.candidates import EngineFacts, Keep, Limit, Round
from headrace.quant.float_codes import TileCodes
from headrace.quant.groups import rows_at_once
from headrace.quant.packed import PackedMethod, copy_numbers


class Fp8Method(PackedMethod):
    """A scale for each output. Activations are rounded to e4m3 with a scale for each token.

    Buffers, which must stay where they are: ``codes`` ``[N, K]`` float8_e4m3fn, ``scales`` ``[N, 1]`` float32, and ``one`` and
    ``turns`` as an ``Fp8Weight`` has them.
    """

    format = "FP8, a scale for each output"
    devices = frozenset({"cpu", "cuda"})
    kernel = "Triton or cuBLASLt, as the number of rows decides"
    constants = frozenset({"one", "turns"})
    multiples = 16, 16
    batch_invariant = True
    shared: ClassVar[int] = 1
    """Outputs that share a scale."""

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        return isinstance(codes, TileCodes) and codes.tile[1] >= codes.values.shape[1] + codes.first[1]

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        super().allocate(layer, dtype, device)
        self._device = device

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        codes = torch.empty(layer.out_features, layer.in_features, dtype=torch.float8_e4m3fn, device=self._device)
        scales = torch.empty(self.scales_shape(layer), device=self._device)
        turns = torch.zeros(-(-layer.out_features // 64), dtype=torch.int32, device=self._device)
        self.weight = Fp8Weight(codes, scales, torch.ones((), device=self._device), turns)
        floats: list[torch.Tensor] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        start = 0
        for part in parts:
            aligned = not (start + sum(map(len, floats))) % self.shared
            if not aligned or not isinstance(part.codes, TileCodes) or not self.holds(part.codes):
                floats.append(part.exact().to(self._device))
                continue
            start += self._round(floats, start, sums)
            stored = self._rows(start, start + len(part.codes.values))
            copy_numbers(part.codes.values, stored.codes)
            copy_numbers(part.codes.scales_of(self.shared, self.group(layer)), stored.scales)
            start += len(stored.codes)
            floats = []
        self._round(floats, start, sums)
        for name, tensor in self.weight._asdict().items():
            layer.register_buffer(name, tensor)
        error, size = sums.tolist()
        return (error / size) ** 0.5 if size else 0.0

    def _round(self, parts: Sequence[torch.Tensor], start: int, sums: torch.Tensor) -> int:
        """Rounds floats, one below the other, to the rows from ``start`` on, and returns their number. Adds the squares of the
        errors and of the weights to ``sums``."""
        count = sum(map(len, parts))
        # A few rows at a time: each step is a float32 copy. Blocks may have rows of two parts.
        size = rows_at_once(self.weight.codes.shape[1], self.shared)
        for first in range(0, count, size):
            exact = torch.cat([rows.float() for rows in _slices(parts, first, first + size)])
            held = self._rows(start + first, start + first + len(exact))
            for there, here in zip(held, self.rounded(exact), strict=False):
                copy_numbers(here, there)
            # In float64 only the two sums: a matrix of float64 would be the largest thing in memory.
            error = dequantize(held).sub_(exact)
            sums += torch.stack([one.square_().sum(dtype=torch.float64) for one in (error, exact)])
        return count

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = self._product(layer, x.reshape(-1, layer.in_features))
        return y.view(*x.shape[:-1], layer.out_features)

    def group(self, layer: Linear) -> int:
        return layer.in_features

    def apply_rounded(self, layer: Linear, x: Fp8Rows) -> torch.Tensor:
        return self._product(layer, x)

    def apply_rounded_gated(self, layer: Linear, x: Fp8Rows) -> torch.Tensor | None:
        return None if layer.batch_invariant else fp8_linear_gated(x, self.weight)

    def streams(self, layer: Linear, rows: int) -> bool:
        return rows == 1 and not layer.batch_invariant and streams(self.weight)

    def _product(self, layer: Linear, x: Activations) -> torch.Tensor:
        return fp8_linear(x, self.weight, layer.bias, layer.out_dtype, batch_invariant=layer.batch_invariant)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return dequantize(self.weight)

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a float32 matrix."""
        return quantize_rows_ref(weight, weight.shape[1])

    def scales_shape(self, layer: Linear) -> tuple[int, int]:
        return layer.out_features, 1

    def _rows(self, start: int, stop: int) -> Fp8Weight:
        """Some outputs of the weight, as views."""
        codes, scales, one, turns = self.weight
        return Fp8Weight(codes[start:stop], scales[start // self.shared : -(-stop // self.shared)], one, turns)


class Fp8BlockMethod(Fp8Method):
    """A scale for each block of 128 outputs and inputs, as in DeepSeek-V3. Activations have one for each token and 128
    channels. The last block may have fewer outputs.

    Buffer ``scales``: ``[ceil(N / shared), K / 128]``.
    """

    format = f"FP8, a scale for each {GROUP} x {GROUP}"
    multiples = 16, GROUP
    shared = GROUP

    @classmethod
    def supports(cls, in_features: int, out_features: int, device: str) -> list[str]:
        return [*super().supports(in_features, out_features, device), *_block_refusals(device)]

    def group(self, layer: Linear) -> int:
        return GROUP

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        if not isinstance(codes, TileCodes) or codes.tile[1] != GROUP or codes.first[1]:
            return False
        return codes.tile[0] % cls.shared == codes.first[0] % cls.shared == 0

    @classmethod
    def holds_all(cls, parts: Sequence[Codes]) -> bool:
        """No part begins within a block."""
        before = (part.values for part in parts[:-1] if isinstance(part, TileCodes))
        return super().holds_all(parts) and not any(len(values) % cls.shared for values in before)

    def scales_shape(self, layer: Linear) -> tuple[int, int]:
        return -(-layer.out_features // self.shared), layer.in_features // GROUP

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % self.shared))
        blocks = padded.view(-1, self.shared, inputs // GROUP, GROUP)
        scales = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp_min(LEAST_SCALE)
        codes = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
        return codes.view(padded.shape)[:outputs].to(torch.float8_e4m3fn), scales


class Fp8HalfBlockMethod(Fp8BlockMethod):
    """A scale for each block of 64 outputs and 128 inputs: codes of blocks of 128 of which a rank has a half, or whose outputs
    a model has in another order, as latent projections of DeepSeek-V3, of whose heads 64 channels are rotated."""

    format = f"FP8, a scale for each {GROUP // 2} x {GROUP}"
    shared = GROUP // 2


def _slices(parts: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
    """The rows ``[start, stop)`` of matrices that lie one below the other, as views."""
    for part in parts:
        if start < len(part) and stop > 0:
            yield part[max(start, 0) : stop]
        start, stop = start - len(part), stop - len(part)


def _limits(engine: EngineFacts) -> list[Limit]:
    if engine.device == "cpu":
        return [Limit("it is for GPUs: write int8 on a CPU")]
    limits = [Limit(reason) for reason in support.fp8_product_refusals(engine.device)]
    if engine.dtype == "float32":
        limits.append(Limit("its products are of 16-bit activations: set dtype bfloat16 or float16", "dtype"))
    if engine.deterministic and support.compute_capability(engine.device) not in (None, support.HOPPER_SM):
        limits.append(Limit("its products have rows that are independent of each other on Hopper alone", "deterministic"))
    return limits


def _block_refusals(device: str) -> list[str]:
    hopper = device == "cpu" or support.compute_capability(device) in (None, support.HOPPER_SM)
    return [] if hopper else ["cuBLASLt multiplies FP8 in blocks on Hopper alone: write fp8"]


def _block_limits(engine: EngineFacts) -> list[Limit]:
    return [*_limits(engine), *map(Limit, _block_refusals(engine.device))]


KEEP_FP8 = Keep(
    methods=(Fp8Method, Fp8BlockMethod, Fp8HalfBlockMethod),
    codes=(TileCodes,),
    keeps=frozenset({"e4m3"}),
    title="FP8",
    limits_of=_limits,
)


def round_to_fp8(method: type[Fp8Method]) -> Round:
    return Round(by=method, to="FP8", limits_of=_block_limits if method is Fp8BlockMethod else _limits)
