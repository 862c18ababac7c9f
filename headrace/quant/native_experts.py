"""Experts of mixtures for the native kernels of CPUs: checkpoints' own codes, or floats rounded to integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from headrace.errors import ConfigError
from headrace.kernels import native
from headrace.kernels.moe.native import PackedExperts
from headrace.kernels.moe.reference import ExpertFactors, run_adapted
from headrace.kernels.native import NativeKernels
from headrace.layers.moe import Experts, ExpertsMethod
from headrace.layers.stored import Codes, QuantSpec, StoredMatrix
from headrace.quant.experts import ExpertOrders, ExpertsCandidate, ExpertsFacts
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.groups import GROUP, round_to_groups, rows_at_once
from headrace.quant.native import LANES, NativeFp8Method, Tail, pack, pack_fp8, tail_of, unpack, with_vectors
from headrace.quant.packed import integer_codes


class NativeExperts(ExpertsMethod):
    """Each matrix of an expert is packed as ``NativeMethod`` packs one.

    Buffers: ``gate_up_proj_packed`` and ``down_proj_packed``, ``[num_held, outputs / 16, inputs / 32, bytes of a group]``; and
    ``gate_up_proj_order`` and ``down_proj_order`` ``[num_held, inputs]`` int64, where a checkpoint's groups are not of
    neighbours.

    Args:
        bits: by matrix, 4 or 8; None: its codes are e4m3.
        rounds: floats are rounded, and the checkpoint's codes are not kept.
    """

    constants = ("_order",)

    def __init__(self, kernels: NativeKernels, bits: Mapping[str, int | None], *, rounds: bool = False) -> None:
        self._matmul = kernels.matmul
        self._bits = bits
        self.takes_codes = not rounds
        start = Tail.HALF_MINIMA if rounds else Tail.HALF_ZEROS
        self._tails = {matrix: Tail.FLOAT_SCALES if own is None else start for matrix, own in bits.items()}
        names = ("e4m3" if own is None else f"{own} bits" for own in bits.values())
        self.format = f"{' and '.join(dict.fromkeys(names))}, groups of {GROUP}, native"

    def allocate(self, layer: Experts, dtype: torch.dtype, device: str | torch.device) -> None:
        self._squares = torch.zeros(2, dtype=torch.float64)
        """Sums of the squares of rounding errors and of weights."""
        self._orders = ExpertOrders()
        for matrix, (count, outputs, inputs) in layer.shapes.items():
            if matrix in layer._parameters:
                delattr(layer, matrix)
            nbytes = LANES * GROUP * (self._bits[matrix] or 8) // 8 + self._tails[matrix].nbytes
            packed = torch.empty(count, -(-outputs // LANES), inputs // GROUP, nbytes, dtype=torch.uint8)
            layer.register_buffer(f"{matrix}_packed", packed)
            layer.register_buffer(f"{matrix}_order", None)

    def load(self, layer: Experts, matrix: str, stored: StoredMatrix, expert: int | None = None, start: int = 0) -> None:
        """Raises ConfigError if the checkpoint's codes are not what its description means."""
        if not self.takes_codes:
            self.load_floats(layer, matrix, stored.exact(), expert, start)
            return
        codes = stored.codes
        if codes is None:
            raise ConfigError(f"{matrix} of experts is stored as {stored.kind}, where codes are expected", "model")
        for index in range(layer.shapes[matrix][0]) if expert is None else (expert,):
            one = codes if expert is not None else _of_stack(codes, index)
            if isinstance(one, TileCodes):
                self._fill(layer, matrix, index, start, _packed_fp8(one))
            else:
                self._fill(layer, matrix, index, start, self._kept(layer, matrix, index, one))

    def rounds(self, matrix: str) -> bool:
        return not self.takes_codes

    def load_floats(self, layer: Experts, matrix: str, floats: torch.Tensor, expert: int | None, start: int) -> None:
        for index, one in enumerate(floats if expert is None else floats[None]):
            self._fill(layer, matrix, index if expert is None else expert, start, self._rounded(one, matrix))

    def _kept(self, layer: Experts, matrix: str, expert: int, codes: Codes) -> torch.Tensor:
        integers = integer_codes(codes)
        ordered = None if integers is None else integers.sort()
        weights = None if ordered is None else ordered[1].regroup()
        if ordered is None or weights is None:
            raise ConfigError(f"{matrix} of experts has codes that no groups of {GROUP} hold: set quantization none", "model")
        if weights.zeros is None:
            # Symmetric codes of GGUF: only those of minima in the middle come here.
            weights = dataclasses.replace(weights, offsets=torch.full_like(weights.scales, 2 ** (weights.bits - 1)).byte())
        self._orders.hold(layer, matrix, expert, None if integers is None or integers.order is None else ordered[0])
        if tail_of(weights) is Tail.FLOAT_ZEROS:
            self._widen(layer, matrix)
        bits = cast(int, self._bits[matrix])
        return pack(weights if weights.bits == bits else weights.widen(), self._tails[matrix])

    def _widen(self, layer: Experts, matrix: str) -> None:
        """Holds scales that half precision does not hold: all of the matrix are float32 from now on."""
        tail = self._tails[matrix]
        if tail is Tail.FLOAT_ZEROS:
            return
        held = layer.get_buffer(f"{matrix}_packed")
        wide = held[..., -tail.nbytes :].contiguous().view(tail.dtype).float().view(torch.uint8)
        layer._buffers[f"{matrix}_packed"] = torch.cat((held[..., : -tail.nbytes], wide), dim=-1)
        self._tails[matrix] = Tail.FLOAT_ZEROS

    def _rounded(self, weight: torch.Tensor, matrix: str) -> torch.Tensor:
        bits, packed = cast(int, self._bits[matrix]), []
        # Some blocks of rows at a time: each step is a copy.
        size = rows_at_once(weight.shape[1], LANES)
        for at in range(0, len(weight), size):
            exact = weight[at : at + size].float()
            codes = round_to_groups(exact, bits, torch.float16)
            error = codes.dequantize() - exact
            self._squares += torch.stack([one.square().sum(dtype=torch.float64) for one in (error, exact)])
            packed.append(pack(codes, Tail.HALF_MINIMA))
        return torch.cat(packed)

    def _fill(self, layer: Experts, matrix: str, expert: int, start: int, packed: torch.Tensor) -> None:
        layer.get_buffer(f"{matrix}_packed")[expert].narrow(0, start // LANES, len(packed)).copy_(packed)

    def apply(
        self,
        layer: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        plus: torch.Tensor | None,
        adapters: ExpertFactors | None = None,
        prepared: Any = None,
    ) -> torch.Tensor:
        gate_up = self._packed(layer, "gate_up_proj", layer.gate_up_proj_bias)
        down = self._packed(layer, "down_proj", layer.down_proj_bias)
        return run_adapted(x, experts, weights, gate_up.product, down.product, layer.spec, plus, adapters)

    def _packed(self, layer: Experts, matrix: str, bias: torch.Tensor | None = None) -> PackedExperts:
        code = (self._bits[matrix] or 8) | self._tails[matrix] << 8
        packed, order = layer.get_buffer(f"{matrix}_packed"), layer._buffers[f"{matrix}_order"]
        return PackedExperts(self._matmul, packed, layer.shapes[matrix][1], code, order, bias)

    def dequantize(self, layer: Experts, matrix: str) -> torch.Tensor:
        held, outputs = self._packed(layer, matrix), layer.shapes[matrix][1]
        whole = []
        for expert, packed in enumerate(held.packed):
            weight = unpack(packed, self._bits[matrix] or 8, self._tails[matrix])[:outputs]
            whole.append(weight if held.order is None else torch.empty_like(weight).index_copy_(1, held.order[expert], weight))
        return torch.stack(whole)

    def error(self) -> float:
        error, size = self._squares.tolist()
        return float((error / size) ** 0.5) if size else 0.0


def _of_stack(codes: Codes, index: int) -> Codes:
    """One of stacked matrices."""
    if isinstance(codes, TileCodes):
        return TileCodes(codes.values[index], codes.scales[index], codes.tile, codes.first)
    if isinstance(codes, MicroscaledCodes):
        return MicroscaledCodes(codes.blocks[index], codes.scales[index])
    raise ConfigError(f"stacked experts as {type(codes).__name__} are not read", "model")


def _packed_fp8(codes: TileCodes) -> torch.Tensor:
    if not NativeFp8Method.holds(codes):
        raise ConfigError(f"experts have tiles that no groups of {GROUP} hold: set quantization none", "model")
    try:
        return pack_fp8([codes])
    except OverflowError as error:
        raise ConfigError(f"experts in FP8: {error}: set quantization none", "model") from error


class NativeExpertsCandidate(ExpertsCandidate):
    """Holds experts in the compiled kernels' formats.

    Args:
        kernels: finds the compiled kernels.
    """

    def __init__(self, kernels: Callable[[], NativeKernels | None] = native.load) -> None:
        self._load = kernels

    @property
    def _kernels(self) -> NativeKernels | None:
        return with_vectors(self._load())

    def concerns(self, facts: ExpertsFacts) -> bool:
        return self._kernels is not None

    def misfits(self, facts: ExpertsFacts) -> list[str]:
        sizes = facts.hidden_size, facts.spec.intermediate_size
        return [f"{size} inputs are not a multiple of {GROUP}" for size in sizes if size % GROUP]


class KeepNativeExperts(NativeExpertsCandidate):
    """Keeps codes and scales of a checkpoint as they are."""

    keeps = frozenset({"int4", "int8", "mxfp4", "e4m3"})

    def concerns(self, facts: ExpertsFacts) -> bool:
        stored = (one for matrix in facts.stored.values() for one in matrix)
        return super().concerns(facts) and any(one.spec is not None for one in stored)

    def misfits(self, facts: ExpertsFacts) -> list[str]:
        found = super().misfits(facts)
        for matrix, stored in facts.stored.items():
            specs = list(dict.fromkeys(one.spec for one in stored))
            found += [why for spec in specs if (why := _objection(spec, facts.shape(matrix)[2]))]
            if len({spec is not None and spec.codes == "e4m3" for spec in specs}) > 1:
                found.append(f"the experts' parts of {matrix} have different number formats")
        return found

    def method(self, facts: ExpertsFacts) -> ExpertsMethod:
        bits = {matrix: max(_bits(one.spec) for one in stored) for matrix, stored in facts.stored.items()}
        return NativeExperts(cast(NativeKernels, self._kernels), {matrix: own or None for matrix, own in bits.items()})

    def reason(self, facts: ExpertsFacts) -> str:
        return "whose numbers are kept"


class RoundNativeExperts(NativeExpertsCandidate):
    """Rounds floats, and codes that are not kept, to integers.

    Args:
        bits: 4 or 8.
    """

    def __init__(self, bits: int, kernels: Callable[[], NativeKernels | None] = native.load) -> None:
        super().__init__(kernels)
        self._number = bits

    def method(self, facts: ExpertsFacts) -> ExpertsMethod:
        return NativeExperts(cast(NativeKernels, self._kernels), dict.fromkeys(facts.stored, self._number), rounds=True)

    def reason(self, facts: ExpertsFacts) -> str:
        return f"rounded to {self._number} bits"


def _objection(spec: QuantSpec | None, inputs: int) -> str:
    """Returns why codes are not kept; empty: they are."""
    if spec is None:
        return "not all experts are stored as codes in the order of the layer"
    if spec.codes not in KeepNativeExperts.keeps or spec.zero == "min":
        return f"no kernel here multiplies experts of {spec}"
    group = spec.group[1] if isinstance(spec.group, tuple) else inputs
    if group < inputs and group % GROUP:
        return f"{group} inputs share a scale, which is no multiple of {GROUP}"
    return ""


def _bits(spec: QuantSpec | None) -> int:
    """0: its codes are e4m3."""
    return {"int4": 4, "int8": 8, "mxfp4": 8}.get(spec.codes, 0) if spec is not None else 0
