"""Candidates: ways to hold the weights of a layer. A quantization lists them in order of preference."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from headrace.layers.linear import LinearMethod
from headrace.layers.stored import Codes, StoredMatrix
from headrace.model_spec import AnySpec, ModelSpec, MoeSpec


class Limit(NamedTuple):
    """A reason why an engine cannot use a candidate, and the parameter that would have to be another."""

    reason: str
    param: str = "quantization"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts of an engine that a number format of its weights depends on."""

    device: str
    """Type of the device."""
    native_kernels: str
    """Instructions of the compiled kernels for CPUs, as ``DeviceFacts`` has them."""
    dtype: str
    asked_dtype: bool
    """Whether the user named the dtype."""
    deterministic: bool
    model: AnySpec
    matrices: Sequence[tuple[int, int]]
    """(outputs, inputs) of every matrix of the layers that may be held in another format."""

    @property
    def mixture(self) -> bool:
        """Whether a native model has layers of experts. Those of another library's model stay floats."""
        return isinstance(self.model, ModelSpec) and any(isinstance(mlp, MoeSpec) for mlp in self.model.mlps)

    @property
    def compiled(self) -> bool:
        """Whether there are compiled kernels for CPUs that are faster than PyTorch's."""
        return self.native_kernels not in ("", "portable")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """A layer and the stored matrices that it is to hold, one below the other."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    """Dtype of the activations."""
    device: torch.device
    parts: Sequence[StoredMatrix]
    is_head: bool = False
    """Whether it is the output head."""

    @property
    def shape(self) -> tuple[int, int, str]:
        """The arguments of ``LinearMethod.supports``."""
        return self.in_features, self.out_features, self.device.type

    @property
    def kinds(self) -> str:
        return " and ".join(dict.fromkeys(part.kind for part in self.parts))


class Candidate(ABC):
    """A way to hold the weights of a layer. Each returns reasons against itself; the first without any takes the layer."""

    keeps: frozenset[str] = frozenset()
    """The codes of checkpoints that it can hold as they are, as ``QuantSpec.codes`` names them."""
    title: str = ""
    """The number format of these codes, for messages."""

    def limits(self, engine: EngineFacts) -> list[Limit]:
        """Returns why this engine cannot use the candidate for any matrix."""
        return []

    @abstractmethod
    def supports(self, in_features: int, out_features: int, device: str) -> list[str]:
        """Returns the reasons of ``LinearMethod.supports``."""

    def concerns(self, layer: LayerFacts) -> bool:
        """Returns whether the candidate is worth a word about this layer if it does not take it."""
        return True

    def misfits(self, layer: LayerFacts) -> list[str]:
        """Returns why the candidate does not hold this layer; empty: it does."""
        return self.supports(*layer.shape)

    @abstractmethod
    def method(self, layer: LayerFacts) -> LinearMethod:
        """Returns a new method for a layer that the candidate holds. Its ``load`` may raise OverflowError, and leaves the layer
        to the next candidate."""

    @abstractmethod
    def reason(self, layer: LayerFacts) -> str:
        """Returns how the stored numbers become those that the layer holds, for reports."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep(Candidate):
    """Keeps codes and scales of a checkpoint as they are.

    Args:
        methods: the first that holds the codes of all parts takes the layer.
        codes: the types of these codes.
        limits_of: the engine's limits.
    """

    methods: tuple[type[LinearMethod], ...]
    codes: tuple[type[Codes], ...]
    keeps: frozenset[str]
    title: str
    limits_of: Callable[[EngineFacts], list[Limit]]

    def limits(self, engine: EngineFacts) -> list[Limit]:
        return self.limits_of(engine)

    def supports(self, in_features: int, out_features: int, device: str) -> list[str]:
        return min((method.supports(in_features, out_features, device) for method in self.methods), key=len)

    def concerns(self, layer: LayerFacts) -> bool:
        """Floats, and codes of other formats, are for other candidates."""
        return any(isinstance(part.codes, self.codes) for part in layer.parts)

    def _holding(self, layer: LayerFacts) -> list[type[LinearMethod]]:
        codes = [part.codes for part in layer.parts]
        present = [one for one in codes if one is not None]
        return [method for method in self.methods if len(present) == len(codes) and method.holds_all(present)]

    def misfits(self, layer: LayerFacts) -> list[str]:
        if any(part.codes is None for part in layer.parts):
            return ["not all of it has codes"]
        if not (methods := self._holding(layer)):
            return [f"no kernel here multiplies {self.title} with such scales"]
        return methods[0].supports(*layer.shape)

    def method(self, layer: LayerFacts) -> LinearMethod:
        return self._holding(layer)[0]()

    def reason(self, layer: LayerFacts) -> str:
        return "whose numbers are kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Candidate):
    """Rounds floats, and codes that the method does not hold.

    Args:
        to: the number format, for reports.
        limits_of: the engine's limits.
    """

    by: type[LinearMethod]
    to: str
    limits_of: Callable[[EngineFacts], list[Limit]]

    def limits(self, engine: EngineFacts) -> list[Limit]:
        return self.limits_of(engine)

    def supports(self, in_features: int, out_features: int, device: str) -> list[str]:
        return self.by.supports(in_features, out_features, device)

    def method(self, layer: LayerFacts) -> LinearMethod:
        return self.by()

    def reason(self, layer: LayerFacts) -> str:
        return f"rounded to {self.to}"
