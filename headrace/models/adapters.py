"""The matrices of a native model that adapters add to, and what an adapter adds to each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from headrace.config import EngineArgs, MemoryLine
from headrace.errors import ConfigError
from headrace.kernels.lora import STEP_SIZES, Segment
from headrace.layers.linear import FusedLinear, Linear
from headrace.layers.lora import NO_ADAPTER, ExpertTables, LoraPart, LoraRows, LoraTables
from headrace.layers.moe import Experts
from headrace.sources.adapter import PARAM, AdapterFiles, AdapterMatrix
from headrace.weights.names import NameTable, Target

LoadedAdapter = Mapping[str, Sequence[LoraPart]]
"""Key of ``AdapterTargets.layers`` -> what an adapter adds to it."""
EXPERTS = ("gate_up_proj", "down_proj")
"""Parameters of a mixture's experts that may have adapters."""


@dataclasses.dataclass(frozen=True)
class AdaptedLayer:
    """Matrices of a layer, fused or not, with their tables; or those of the experts of a mixture, one behind the other."""

    module: Linear | Experts
    """The layer, or the mixture."""
    tables: LoraTables
    start: int
    """First number of the tables in the memory of a place."""
    in_features: int
    sizes: tuple[int, ...]
    """Outputs of each fused matrix."""
    experts: int = 1
    """Experts that are held."""

    @property
    def size(self) -> int:
        """Numbers of the tables in the memory of a place."""
        return LoraTables.size(self.in_features, self.sizes * self.experts, self.tables.rank)

    @property
    def out_features(self) -> int:
        """Outputs of all fused matrices; of one expert."""
        return sum(self.sizes)

    def split(self, a: torch.Tensor, b: torch.Tensor, start: int, expert: int = 0) -> Iterator[LoraPart]:
        """Yields the addition to the rows of an expert from ``start`` on by the layer's own parts: one that a checkpoint has as
        a whole is several to a fused layer."""
        part, row, first = expert * len(self.sizes), expert * self.out_features, 0
        for index, size in enumerate(self.sizes):
            low, high = max(start, first), min(start + len(b), first + size)
            if low < high:
                yield LoraPart(part + index, row + low, a, b[low - start : high - start])
            first += size


@dataclasses.dataclass(frozen=True)
class AdapterTargets:
    """The layers with tables for adapters. A tensor-parallel rank has its part of each."""

    names: NameTable
    rows: LoraRows
    layers: Mapping[str, AdaptedLayer]
    """name of a parameter, without ``.weight`` -> the layer that has it"""
    modules: Sequence[str]
    """Names of matrices that may have adapters, without the path before them; empty: all that can."""
    memory: torch.Tensor
    """``[places, numbers]``: what all layers have of the adapter in each place."""

    def memory_line(self, args: EngineArgs) -> MemoryLine:
        why = f"{args.max_loras} of rank {args.max_lora_rank} at once (max_loras, max_lora_rank)"
        return MemoryLine("LoRA adapters", self.memory.nbytes, why)

    def warm_up(self, most_tokens: int) -> None:
        """Runs a layer of each shape on tokens of no adapter, so that the kernels are compiled before a step needs them. For a
        GPU."""
        modules: dict[object, nn.Module] = {}
        for layer in self.layers.values():
            own = layer.module
            shape = str(own.shapes) if isinstance(own, Experts) else (layer.in_features, layer.sizes)
            modules.setdefault((shape, own.method.format), own)
        for tokens in sorted({min(size, most_tokens) for size in STEP_SIZES}):
            self.rows.segments = (Segment(0, tokens, 0),)
            self.rows.places = torch.full((tokens,), NO_ADAPTER, dtype=torch.int32, device=self.memory.device)
            for module in modules.values():
                if isinstance(module, Experts):
                    choices = torch.zeros(tokens, module.spec.top_k, dtype=torch.int32, device=self.memory.device)
                    module(self.memory.new_zeros(tokens, module.shapes["down_proj"][1]), choices, choices.float())
                elif isinstance(module, Linear):
                    module(self.memory.new_zeros(tokens, module.in_features))
        self.rows.clear()

    def put(self, place: int, adapter: LoadedAdapter) -> None:
        """Fills a place with an adapter, instead of what it held."""
        for name, layer in self.layers.items():
            layer.tables.put(place, adapter.get(name, ()))

    def image(self, adapter: LoadedAdapter) -> torch.Tensor:
        """``[numbers]``: what a place with the adapter holds, in the host's memory."""
        image = torch.empty(self.memory.shape[1], dtype=self.memory.dtype)
        for name, layer in self.layers.items():
            layer.tables.fill(image[layer.start : layer.start + layer.size], adapter.get(name, ()))
        return image

    def read(self, files: AdapterFiles, dtype: torch.dtype) -> LoadedAdapter:
        """Reads an adapter to the host's memory, in ``dtype``.

        Raises:
            ConfigError: a matrix of the adapter is none of the layers', or has another shape. Names the tensor.
        """
        names = self.names.chosen([name for matrix in files.matrices for name in matrix.stored])
        found: dict[str, list[LoraPart]] = {}
        with safe_open(files.weights, framework="pt") as file:
            for matrix in files.matrices:
                a, b = file.get_tensor(matrix.a), file.get_tensor(matrix.b)
                target, layer = self._target(names, matrix, a.shape[1], b.shape[0])
                if target.empty:  # Of an expert that another rank holds.
                    continue
                b = b.float() * matrix.scale
                if matrix.parameters:
                    a, b = _by_expert(matrix, a, b, target.part.shape[0] if target.part is not None else layer.experts)
                a, b = (part.to(dtype).contiguous() for part in target.low_rank(a, b))
                _check_finite(matrix, a, b)
                if matrix.parameters:
                    stacked = enumerate(zip(a, b, strict=True))
                    parts = [part for expert, own in stacked for part in layer.split(*own, target.start, expert)]
                else:
                    parts = list(layer.split(a, b, target.start, target.index or 0))
                found.setdefault(_key(target), []).extend(parts)
        return found

    def _target(self, names: NameTable, matrix: AdapterMatrix, inputs: int, outputs: int) -> tuple[Target, AdaptedLayer]:
        """The rows that a matrix adds to, and their layer. Raises ConfigError if there are none of its shape."""
        wrong = []
        for name in matrix.stored:
            target = names.part(name)
            layer = None if target is None else self.layers.get(_key(target))
            if target is None or layer is None or not self._allowed(name):
                wrong.append(f"{matrix.a}: {self._refusal(name, target)}")
                continue
            shape = target.matrix_shape(layer.out_features, layer.in_features)
            if target.empty or shape == (outputs, inputs):
                return target, layer
            tensor, has = (matrix.a, f"{inputs} inputs") if shape[1] != inputs else (matrix.b, f"{outputs} outputs")
            wrong.append(f"{tensor} has {has}, and {name} in the model is {list(shape)}")
        raise ConfigError("; ".join(wrong), PARAM)

    def _allowed(self, name: str) -> bool:
        return not self.modules or _matrix_name(name) in self.modules

    def _refusal(self, name: str, target: Target | None) -> str:
        if not self._allowed(name):
            return f"--lora-target-modules has {', '.join(self.modules)} alone"
        return "the model has no such matrix" if target is None else "adapters of this matrix are not supported"


def _key(target: Target) -> str:
    return target.parameter.removesuffix(".weight")


def _matrix_name(stored: str) -> str:
    """The name of a matrix as ``lora_target_modules`` has it."""
    return stored.removesuffix(".weight").rpartition(".")[2]


def _by_expert(matrix: AdapterMatrix, a: torch.Tensor, b: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[experts, rank, inputs]`` and ``[experts, outputs, rank]``, as peft has them in its tensors."""
    if matrix.experts != count:
        raise ConfigError(f"{matrix.a} is for {matrix.experts} experts, and the model has {count}", PARAM)
    return a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)


def _check_finite(matrix: AdapterMatrix, a: torch.Tensor, b: torch.Tensor) -> None:
    """Tokens of other adapters multiply them by zeros, and must not notice."""
    for name, tensor in ((matrix.a, a), (matrix.b, b)):
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has numbers that are not finite in {str(tensor.dtype).removeprefix('torch.')}", PARAM)


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
        ConfigError: one of ``modules`` is not a matrix of the model.
    """
    rows, shapes, known = LoraRows(), dict[str, tuple[int, tuple[int, ...], int]](), set[str]()
    linears, mixtures = dict[str, Linear](), dict[str, Experts]()

    def wanted(parameter: str, *more: str) -> bool:
        own = {*map(_matrix_name, names.names(parameter)), *more}
        known.update(own)
        return not modules or bool(own & set(modules))

    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and path.startswith("layers."):
            if wanted(f"{path}.weight"):
                linears[path], shapes[path] = layer, (layer.in_features, _sizes(layer), 1)
        elif isinstance(layer, Experts):
            asked = [wanted(f"{path}.{parameter}", parameter) for parameter in EXPERTS]
            if layer.whole_steps and any(asked):
                mixtures[path], inner = layer, layer.spec.intermediate_size
                first = (inner,) * (layer.spec.first_outputs // inner)
                for parameter, sizes in zip(EXPERTS, (first, (layer.shapes["down_proj"][1],)), strict=True):
                    shapes[f"{path}.{parameter}"] = layer.shapes[parameter][2], sizes, layer.spec.num_held
    if unknown := sorted(set(modules) - known):
        raise ConfigError(
            f"lora_target_modules has {unknown[0]}, and the model's matrices are {', '.join(sorted(known))}",
            "lora_target_modules",
        )
    ends = list(itertools.accumulate(LoraTables.size(inputs, own * count, max_rank) for inputs, own, count in shapes.values()))
    memory = torch.zeros(num_places, ends[-1] if ends else 0, dtype=dtype, device=device)
    layers = {}
    for (name, (inputs, sizes, count)), start, end in zip(shapes.items(), (0, *ends), ends, strict=False):
        tables = LoraTables(rows, inputs, sizes * count, max_rank, memory[:, start:end])
        module = mixtures.get(name.rpartition(".")[0]) or linears[name]
        layers[name] = AdaptedLayer(module, tables, start, inputs, sizes, count)
        if isinstance(module, Linear):
            module.lora = tables
    for path, mixture in mixtures.items():
        both = (layers[f"{path}.{parameter}"].tables for parameter in EXPERTS)
        mixture.lora = ExpertTables(rows, *both)
    return AdapterTargets(names, rows, layers, modules, memory)


def adapter_targets(model: Any) -> AdapterTargets | None:
    """Returns the layers of a model with tables for adapters; None: it has none."""
    return getattr(model, "adapter_targets", None)
