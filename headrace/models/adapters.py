"""The matrices of a native model that adapters add to, and what an adapter adds to each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from headrace.errors import ConfigError
from headrace.layers.linear import FusedLinear, Linear
from headrace.layers.lora import LoraPart, LoraRows, LoraTables
from headrace.sources.adapter import PARAM, AdapterFiles, AdapterMatrix
from headrace.weights.names import NameTable, Target

LoadedAdapter = Mapping[str, Sequence[LoraPart]]
"""Path of a layer -> what an adapter adds to it."""


@dataclasses.dataclass(frozen=True)
class AdapterTargets:
    """The layers with tables for adapters. A tensor-parallel rank has its part of each."""

    names: NameTable
    rows: LoraRows
    layers: Mapping[str, Linear]
    """path -> layer"""
    modules: Sequence[str]
    """Names of matrices that may have adapters, without the path before them; empty: all that can."""

    @property
    def tables(self) -> dict[str, LoraTables]:
        return {path: layer.lora for path, layer in self.layers.items() if layer.lora is not None}

    @property
    def nbytes(self) -> int:
        return sum(tables.nbytes for tables in self.tables.values())

    def read(self, files: AdapterFiles, dtype: torch.dtype, *, pinned: bool) -> LoadedAdapter:
        """Reads an adapter to the host's memory, in ``dtype``. ``pinned``: so that copies to a GPU overlap with work.

        Raises:
            ConfigError: a matrix of the adapter is none of the layers', or has another shape. Names the tensor.
        """
        names = self.names.chosen([f"{matrix.module}.weight" for matrix in files.matrices])
        found: dict[str, list[LoraPart]] = {}
        with safe_open(files.weights, framework="pt") as file:
            for matrix in files.matrices:
                target = names.part(f"{matrix.module}.weight")
                path = "" if target is None else target.parameter.rpartition(".")[0]
                layer = self.layers.get(path)
                if target is None or layer is None or not self._allowed(matrix):
                    raise ConfigError(f"{matrix.a}: {self._refusal(matrix, target)}", PARAM)
                a, b = file.get_tensor(matrix.a), file.get_tensor(matrix.b)
                _check_shapes(matrix, a, b, target.matrix_shape(layer.out_features, layer.in_features))
                a, b = (part.to(dtype).contiguous() for part in target.low_rank(a, b.float() * matrix.scale))
                _check_finite(matrix, a, b)
                parts = _split(layer, a, b, target.start)
                found.setdefault(path, []).extend(_pinned(parts) if pinned else parts)
        return found

    def _allowed(self, matrix: AdapterMatrix) -> bool:
        return not self.modules or matrix.module.rpartition(".")[2] in self.modules

    def _refusal(self, matrix: AdapterMatrix, target: Target | None) -> str:
        if not self._allowed(matrix):
            return f"--lora-target-modules has {', '.join(self.modules)} alone"
        if target is None:
            return "the model has no such matrix"
        return "adapters of this matrix are not supported"


def _check_shapes(matrix: AdapterMatrix, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    for name, tensor, axis, size in ((matrix.a, a, 1, inputs), (matrix.b, b, 0, outputs)):
        if tensor.shape[axis] != size:
            raise ConfigError(
                f"{name} has the shape {list(tensor.shape)}, and its matrix in the model is [{outputs}, {inputs}]", PARAM
            )


def _check_finite(matrix: AdapterMatrix, a: torch.Tensor, b: torch.Tensor) -> None:
    """Tokens of other adapters multiply them by zeros, and must not notice."""
    for name, tensor in ((matrix.a, a), (matrix.b, b)):
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has numbers that are not finite in {str(tensor.dtype).removeprefix('torch.')}", PARAM)


def _split(layer: Linear, a: torch.Tensor, b: torch.Tensor, start: int) -> list[LoraPart]:
    """The addition to rows of a layer from ``start`` on, by the layer's own parts: one that a checkpoint has as a whole is
    several to a fused layer."""
    parts, first = [], 0
    for index, size in enumerate(_sizes(layer)):
        low, high = max(start, first), min(start + len(b), first + size)
        if low < high:
            parts.append(LoraPart(index, low, a, b[low - start : high - start]))
        first += size
    return parts


def _pinned(parts: Sequence[LoraPart]) -> list[LoraPart]:
    return [dataclasses.replace(part, a=part.a.pin_memory(), b=part.b.pin_memory()) for part in parts]


def _sizes(layer: Linear) -> tuple[int, ...]:
    return tuple(layer.parts.values()) if isinstance(layer, FusedLinear) else (layer.out_features,)


def add_tables(
    model: nn.Module,
    names: NameTable,
    modules: Sequence[str],
    num_places: int,
    max_rank: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> AdapterTargets:
    """Gives the matrices of a model's layers tables for adapters.

    Raises:
        ConfigError: one of ``modules`` is no matrix of the model.
    """
    rows, layers, known = LoraRows(), dict[str, Linear](), set[str]()
    for path, layer in model.named_modules():
        if not isinstance(layer, Linear) or not path.startswith("layers."):
            continue
        own = {name.removesuffix(".weight").rpartition(".")[2] for name in names.names(f"{path}.weight")}
        known |= own
        if not modules or own & set(modules):
            layer.lora = LoraTables(rows, layer.in_features, _sizes(layer), num_places, max_rank, dtype, device)
            layers[path] = layer
    if unknown := sorted(set(modules) - known):
        raise ConfigError(
            f"lora_target_modules has {unknown[0]}, and the model's matrices are {', '.join(sorted(known))}",
            "lora_target_modules",
        )
    return AdapterTargets(names, rows, layers, modules)


def adapter_targets(model: Any) -> AdapterTargets | None:
    """Returns the layers of a model with tables for adapters; None: it has none."""
    return getattr(model, "adapter_targets", None)
