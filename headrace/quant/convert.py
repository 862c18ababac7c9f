"""Converter: walks the candidates of a quantization for each layer, and says which took it and why the others did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.layers.stored import StoredMatrix
from headrace.quant.candidates import LayerFacts
from headrace.quant.experts import ExpertsFacts
from headrace.quant.registry import Quantization


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The format of one layer."""

    format: str
    reason: str
    error: float
    """Root mean square of (held - exact weights) over that of the exact ones."""


class Converter:
    """Gives layers the methods of a quantization on one device.

    Args:
        device: that holds the weights.
        quantization: whose candidates are asked, in their order.
        planned: layers are on the meta device and are not loaded. What shows in values alone, such as a scale that a format
            does not hold, is not found then.
    """

    def __init__(self, device: torch.device, quantization: Quantization, *, planned: bool = False) -> None:
        self._device = device
        self._quantization = quantization
        self._planned = planned
        self._place = torch.device("meta") if planned else device

    def convert(self, name: str, layer: Linear, parts: Sequence[StoredMatrix], *, is_head: bool = False) -> Conversion:
        """Loads the layer's weights, by the method of the first candidate that holds them.

        Args:
            name: of the layer, for errors.
            parts: the stored matrices, one below the other.
            is_head: whether it is the output head.

        Raises:
            ConfigError: no candidate holds a matrix of this shape, and the quantization has no floats.
        """
        facts = LayerFacts(
            in_features=layer.in_features,
            out_features=layer.out_features,
            dtype=layer.weight.dtype,
            device=self._device,
            parts=parts,
            is_head=is_head,
        )
        against: list[str] = []
        for candidate in self._quantization.candidates:
            if not candidate.concerns(facts):
                continue
            if reasons := candidate.misfits(facts):
                against += reasons[:1]
                continue
            method = candidate.method(facts)
            method.allocate(layer, facts.dtype, self._place)
            try:
                error = 0.0 if self._planned else method.load(layer, parts)
            except OverflowError as overflow:
                against.append(str(overflow))
                continue
            layer.method = method
            reason = _reason(facts, candidate.reason(facts), against)
            return Conversion(method.format, f"{reason}; by {method.kernel}" if method.kernel else reason, error)
        if not self._quantization.floats:
            why = against[0] if against else f"it has no kernel on {self._device.type}"
            raise ConfigError(f"{self._quantization.name} cannot hold {name}: {why}; set quantization none", "quantization")
        if "weight" not in layer._parameters or layer.weight.device != self._place:
            layer.method.allocate(layer, facts.dtype, self._place)
        if not self._planned:
            layer.method.load(layer, parts)
        coded = any(part.spec is not None or part.codes is not None for part in parts)
        return Conversion(layer.method.format, _reason(facts, "dequantised" if coded else "which is kept", against), 0.0)

    def prepare(self, layer: Experts, stored: Mapping[str, Sequence[StoredMatrix]]) -> Conversion | None:
        """Gives experts the method of the first candidate that holds them, before they are loaded; None: no candidate
        concerns them, and they stay floats.

        Args:
            stored: the stored matrices by matrix of the layer, those of other ranks' experts among them.
        """
        dtype = layer.gate_up_proj.dtype
        facts = ExpertsFacts(hidden_size=layer.gate_up_proj.shape[-1], spec=layer.spec, device=self._device.type, stored=stored)
        against: list[str] = []
        for candidate in self._quantization.experts:
            if not candidate.concerns(facts):
                continue
            if reasons := candidate.misfits(facts):
                against += reasons[:1]
                continue
            layer.method = candidate.method(facts)
            layer.method.allocate(layer, dtype, self._place)
            return Conversion(layer.method.format, _reason(facts, candidate.reason(facts), against), 0.0)
        if against:
            return Conversion(layer.method.format, _reason(facts, "dequantised", against), 0.0)
        if self._quantization.rounding:
            why = f"no kernel here multiplies experts that are rounded to {self._quantization.name}"
            return Conversion(layer.method.format, _reason(facts, "which is kept", [why]), 0.0)
        return None


def _reason(facts: LayerFacts | ExpertsFacts, how: str, against: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys((f"stored as {facts.kinds}, {how}", *against)))
