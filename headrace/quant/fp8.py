"""Weights in FP8 (e4m3) for GPUs, as checkpoints store them or rounded from floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kernels import support
from headrace.kernels.linear.fp8 import fp8_linear
from headrace.kernels.linear.fp8_reference import E4M3_MAX, GROUP, LEAST_SCALE, Fp8Weight, dequantize, quantize_rows_ref
from headrace.layers.linear import Linear
from headrace.layers.stored import Codes, StoredMatrix
from headrace.quant.candidates import EngineFacts, Keep, Limit, Round
from headrace.quant.float_codes import TileCodes
from headrace.quant.packed import PackedMethod


class Fp8Method(PackedMethod):
    """A scale for each output. Activations are rounded to e4m3 with a scale for each token.

    Buffers: ``codes`` ``[N, K]`` float8_e4m3fn, ``scales`` ``[N, 1]`` float32 and ``one``, 1.0. They must stay where they are.
    """

    format = "FP8, a scale for each output"
    devices = frozenset({"cpu", "cuda"})
    multiples = 16, 16

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        return isinstance(codes, TileCodes) and codes.tile[1] >= codes.values.shape[1] + codes.first[1]

    def allocate(self, layer: Linear, dtype: torch.dtype, device: str | torch.device) -> None:
        super().allocate(layer, dtype, device)
        self._device = device

    def load(self, layer: Linear, parts: Sequence[StoredMatrix]) -> float:
        codes, scales, error, size = [], [], 0.0, 0.0
        for part in parts:
            if isinstance(part.codes, TileCodes) and self.holds(part.codes):
                held = part.codes.values.to(self._device), self.stored_scales(part.codes).to(self._device)
            else:
                exact = part.exact().to(self._device).float()
                held = self.rounded(exact)
                # In float64 only the two sums: a matrix of float64 would be the largest thing in memory.
                error += float((dequantize(self._weight(*held)) - exact).square().sum(dtype=torch.float64))
                size += float(exact.square().sum(dtype=torch.float64))
            codes.append(held[0])
            scales.append(held[1])
        layer.register_buffer("codes", torch.cat([one.view(torch.uint8) for one in codes]).view(torch.float8_e4m3fn))
        layer.register_buffer("scales", torch.cat(scales).contiguous())
        self.weight = self._weight(layer.get_buffer("codes"), layer.get_buffer("scales"))
        layer.register_buffer("one", self.weight.one)
        return (error / size) ** 0.5 if size else 0.0

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = fp8_linear(x.reshape(-1, layer.in_features), self.weight, layer.bias, layer.out_dtype)
        return y.view(*x.shape[:-1], layer.out_features)

    def dequantize(self, layer: Linear) -> torch.Tensor:
        return dequantize(self.weight)

    @staticmethod
    def stored_scales(codes: TileCodes) -> torch.Tensor:
        """The scales of codes that the method holds."""
        rows = codes.scales.float().repeat_interleave(codes.tile[0], 0)
        return rows.narrow(0, codes.first[0], len(codes.values))

    @staticmethod
    def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a float32 matrix."""
        return quantize_rows_ref(weight, weight.shape[1])

    def _weight(self, codes: torch.Tensor, scales: torch.Tensor) -> Fp8Weight:
        return Fp8Weight(codes, scales, torch.ones((), device=codes.device))


class Fp8BlockMethod(Fp8Method):
    """A scale for each block of 128 outputs and inputs, as in DeepSeek-V3. Activations have one for each token and 128
    channels.

    Buffer ``scales``: ``[N / 128, K / 128]``.
    """

    format = f"FP8, a scale for each {GROUP} x {GROUP}"
    multiples = GROUP, GROUP

    @classmethod
    def holds(cls, codes: Codes) -> bool:
        if not isinstance(codes, TileCodes) or codes.tile != (GROUP, GROUP):
            return False
        return codes.first == (0, 0) and len(codes.values) % GROUP == 0

    @staticmethod
    def stored_scales(codes: TileCodes) -> torch.Tensor:
        return codes.scales.float()

    @staticmethod
    def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, inputs = weight.shape
        blocks = weight.view(outputs // GROUP, GROUP, inputs // GROUP, GROUP)
        scales = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp_min(LEAST_SCALE)
        codes = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
        return codes.view(weight.shape).to(torch.float8_e4m3fn), scales


def _limits(engine: EngineFacts) -> list[Limit]:
    if engine.device == "cpu":
        return [Limit("it is for GPUs: write int8 on a CPU")]
    limits = [Limit(reason) for reason in support.fp8_product_refusals(engine.device)]
    if engine.dtype == "float32":
        limits.append(Limit("its products are of 16-bit activations: set dtype bfloat16 or float16", "dtype"))
    if engine.deterministic:
        limits.append(Limit("it has no product whose rows are independent of each other", "deterministic"))
    return limits


KEEP_FP8 = Keep(methods=(Fp8Method, Fp8BlockMethod), codes=TileCodes, keeps=frozenset({"e4m3"}), title="FP8", limits_of=_limits)


def round_to_fp8(method: type[Fp8Method]) -> Round:
    return Round(by=method, to="FP8", limits_of=_limits)
