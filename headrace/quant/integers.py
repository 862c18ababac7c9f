"""Integers of 4 and 8 bits on CPUs: which kernel holds a matrix, with how many bits, and which GGUF files are kept so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import torch

from headrace.kernels import native
from headrace.kernels.native import NativeKernels
from headrace.layers.linear import LinearMethod
from headrace.layers.stored import StoredMatrix
from headrace.quant.candidates import Candidate, EngineFacts, LayerFacts, Limit
from headrace.quant.formats.gguf import INT4_TYPES, INT8_TYPES
from headrace.quant.groups import GROUP
from headrace.quant.hybrid import HybridMethod
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.native import NativeFp8Method, NativeMethod, keep, with_vectors
from headrace.quant.packed import PackedMethod, integer_codes, kept_codes

INT4_ROWS = 16
"""Most rows for which PyTorch's packed int4 product is faster than a bfloat16 one (two Zen 4 cores, milliseconds of the
products of a step of the embedded model: 14 and 26 at 8 rows, 27 and 31 at 16, 53 and 41 at 32)."""
INT8_ROWS = 6
"""Most rows for its packed int8 product (12 and 23 at 4 rows, 28 and 26 at 8)."""
AMX_ROWS = 16
"""Most rows for which the compiled kernels are faster than bfloat16 on a CPU with AMX (one core of a Xeon with it, milliseconds
of 82 million weights of 4 bits, of 8 bits, and of bfloat16: 14, 20 and 27 at 8 rows, 24, 27 and 28 at 16, 35, 39 and 30 at
24)."""
_EXACT = "the weights are made {}, for exact results"


class Integers(Candidate):
    """Keeps the integers of a checkpoint, and rounds everything else.

    Args:
        bits: 4 or 8, of matrices that the checkpoint does not say more about.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def bits_of(self, layer: LayerFacts) -> int:
        """Codes of the output head have 8 bits, since its errors go straight into the logits."""
        return max(self._part_bits(part, layer.is_head) for part in layer.parts)

    def _part_bits(self, part: StoredMatrix, is_head: bool) -> int:
        """4 for what is stored with 4 bits, 8 for what is stored with more or in smaller groups than kernels keep; floats as
        asked."""
        if is_head or self.bits == 8:
            return 8
        codes = integer_codes(part.codes)
        if codes is None:
            return self.bits
        return 8 if codes.group < GROUP else codes.bits

    def _keeps(self, layer: LayerFacts, bits: int) -> bool:
        return all(kept_codes(part, bits) is not None for part in layer.parts)

    def reason(self, layer: LayerFacts) -> str:
        bits = self.bits_of(layer)
        why = "whose integers are kept" if self._keeps(layer, bits) else f"rounded to {bits} bits"
        return why + ("; the output head is always of 8 bits" if layer.is_head and self.bits == 4 else "")


class Native(Candidate):
    """The compiled kernels' formats. Without vector instructions these are slower than PyTorch's.

    Args:
        kernels: finds the compiled kernels.
    """

    def __init__(self, kernels: Callable[[], NativeKernels | None] = native.load) -> None:
        self._load = kernels

    @property
    def _kernels(self) -> NativeKernels | None:
        return with_vectors(self._load())

    def limits(self, engine: EngineFacts) -> list[Limit]:
        absent = [] if engine.compiled else [Limit("the native kernels are not available here")]
        return [*super().limits(engine), *absent]

    def supports(self, in_features: int, out_features: int, device: str) -> list[str]:
        return NativeMethod.supports(in_features, out_features, device)

    def concerns(self, layer: LayerFacts) -> bool:
        return self._kernels is not None


class KeepNative(Native):
    """Keeps integers, MXFP4 and FP8 of checkpoints as they are."""

    keeps = frozenset({"int4", "int8", "mxfp4", "e4m3"})
    title = "integers, MXFP4 or FP8"

    def limits(self, engine: EngineFacts) -> list[Limit]:
        exact = [Limit(_EXACT.format(engine.dtype))] if engine.dtype != "bfloat16" and engine.asked_dtype else []
        return [*super().limits(engine), *exact]

    def concerns(self, layer: LayerFacts) -> bool:
        return super().concerns(layer) and any(part.codes is not None for part in layer.parts)

    def misfits(self, layer: LayerFacts) -> list[str]:
        if reasons := super().misfits(layer):
            return reasons
        codes = [part.codes for part in layer.parts if part.codes is not None]
        if len(codes) < len(layer.parts):
            return ["not all of it has codes"]
        if all(NativeFp8Method.holds(one) for one in codes) or keep(layer.parts, self._bits(layer)) is not None:
            return []
        sorts = [one.sort() for code in codes if (one := integer_codes(code)) is not None]
        orders = [found[0] for found in sorts if found is not None]
        if any(not torch.equal(orders[0], order) for order in orders[1:]):
            return ["the inputs of its parts are in several orders"]
        return [f"the native kernels have groups of {GROUP}, which do not hold these codes"]

    def _bits(self, layer: LayerFacts) -> int:
        integers = [integer_codes(part.codes) for part in layer.parts]
        return max((one.bits for one in integers if one is not None), default=0)

    def method(self, layer: LayerFacts) -> LinearMethod:
        kernels, bits = cast(NativeKernels, self._kernels), self._bits(layer)
        return NativeMethod(kernels, bits) if bits else NativeFp8Method(kernels)

    def reason(self, layer: LayerFacts) -> str:
        return "whose numbers are kept"


class NativeIntegers(Native, Integers):
    """The compiled kernels' formats, for integers and for floats that are rounded to them."""

    def __init__(self, bits: int, kernels: Callable[[], NativeKernels | None] = native.load) -> None:
        Integers.__init__(self, bits)
        Native.__init__(self, kernels)

    def _keeps(self, layer: LayerFacts, bits: int) -> bool:
        return keep(layer.parts, bits) is not None

    def method(self, layer: LayerFacts) -> LinearMethod:
        method = NativeMethod(cast(NativeKernels, self._kernels), self.bits_of(layer))
        if layer.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
            return HybridMethod(method, AMX_ROWS)
        return method


class TorchIntegers(Integers):
    """PyTorch's formats, with a copy in floats for many rows."""

    def _method(self, bits: int) -> tuple[type[PackedMethod], int]:
        return (Int4Method, INT4_ROWS) if bits == 4 else (Int8Method, INT8_ROWS)

    def limits(self, engine: EngineFacts) -> list[Limit]:
        limits = super().limits(engine)
        if engine.mixture:
            limits.append(Limit("PyTorch's packed kernels are not for the experts of a mixture: set quantization none"))
        if engine.dtype != "bfloat16":
            made = f"PyTorch's packed int{self.bits} kernel is made for bfloat16"
            limits.append(Limit(f"{made}: leave dtype at auto or bfloat16, or set quantization none"))
        return limits

    def supports(self, in_features: int, out_features: int, device: str) -> list[str]:
        return self._method(self.bits)[0].supports(in_features, out_features, device)

    def misfits(self, layer: LayerFacts) -> list[str]:
        return self._method(self.bits_of(layer))[0].supports(*layer.shape)

    def method(self, layer: LayerFacts) -> LinearMethod:
        kind, rows = self._method(self.bits_of(layer))
        return HybridMethod(kind(), rows)

    def reason(self, layer: LayerFacts) -> str:
        coarse = "; PyTorch's int8 kernel has one scale for each output" if self.bits_of(layer) == 8 else ""
        return super().reason(layer) + coarse


def integers_of_file(engine: EngineFacts, types: Counter[str] | None) -> tuple[int, str]:
    """Decides how a checkpoint is held on a CPU where the user leaves it open.

    Args:
        types: the matrices of a GGUF file by type; None: it is none.

    Returns:
        Bits of the integers that are kept, 0: weights become floats; and why.
    """
    if engine.mixture:
        return 0, "the experts of a mixture are not packed"
    if types is None:
        return 0, "the checkpoint is not a quantised GGUF file"
    if engine.dtype != "bfloat16" and engine.asked_dtype:
        return 0, _EXACT.format(engine.dtype)
    if engine.dtype != "bfloat16" and not engine.compiled:
        return 0, f"PyTorch's packed kernels are made for bfloat16, and this CPU computes in {engine.dtype}"
    packable = INT4_TYPES | INT8_TYPES if engine.compiled else INT4_TYPES
    if others := sorted(types.keys() - packable):
        return 0, f"no packed kernel here holds {', '.join(others)} as it is"
    whose = f"compiled {engine.native_kernels}" if engine.compiled else "PyTorch's"
    kept = f"{whose} kernels hold {', '.join(sorted(types))} as it is"
    return (4 if types.keys() & INT4_TYPES else 8), kept
