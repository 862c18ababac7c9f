"""New values for the weights of a model that is there already, in the memory where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, cast

import torch

from headrace.core.weights import PACKED, PartSum
from headrace.errors import ConfigError, listed
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.layers.stored import StoredMatrix
from headrace.quant.packed import PackedMethod
from headrace.weights.checksum import packed_sum, part_sums
from headrace.weights.matrices import CodedTensor, load_expert
from headrace.weights.names import NameTable, Target

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Tensors under their names."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TensorFacts(NamedTuple):
    """Name, dtype and shape of a tensor, which are known before its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    coded: bool = False
    """It comes as the codes of a checkpoint, in place of floats."""


class WeightUpdate:
    """Places for tensors that were checked by name, shape and dtype. ``put`` writes one, and ``finish`` ends the update.

    Weights are written where they are: whatever reads that memory, a captured graph included, reads the new values.

    Args:
        table: the names of the model's weights.
        parameters: what the table's parameters are, by their names there.
        facts: of all tensors of the update, of some weights or all, under the table's names. Of another float dtype than the
            weight they are rounded, as those of a checkpoint are.
        packed: layers that hold such a parameter in another form, by its name. What is tied to a parameter is one beside it.
        experts: the same of stacked experts.

    Raises:
        ConfigError: a name is unknown or given twice, or a tensor is not one of the shape that its weight has, or of no float
            dtype; or lacks others that are packed as one matrix with it. Names the weight.
    """

    def __init__(
        self,
        table: NameTable,
        parameters: Mapping[str, torch.Tensor],
        facts: Iterable[TensorFacts],
        packed: Mapping[str, Linear] | None = None,
        experts: Mapping[str, Experts] | None = None,
    ) -> None:
        given: dict[str, TensorFacts] = {}
        for one in facts:
            if one.name in given:
                raise ConfigError(f"{one.name} is given twice", "tensors")
            given[one.name] = one
        # A checkpoint may have other tensors in place of the usual ones, and so may an update.
        self._table = table = table.chosen(given)
        self._parameters, self._packed, self._experts = parameters, packed or {}, experts or {}
        self._missing = dict.fromkeys(given)
        """Tensors that have not come."""
        self._held: dict[str, dict[str, torch.Tensor | CodedTensor]] = {}
        """Parameter -> the tensors that wait for the others that are packed as one matrix with them."""
        self._ties: dict[str, torch.Tensor] = {}
        """Tied tensors, which are compared at the end."""
        self.count = 0
        """Weights that were written."""
        self.written: dict[str, set[str]] = {}
        """Parameter -> the names of its tensors that were written."""
        for name, one in given.items():
            self._check(name, one)
        for parameter in self._packed:
            names = table.names(parameter)
            mine = [name for name in names if name in given]
            if mine and (missing := [name for name in names if name not in given]):
                raise ConfigError(
                    f"{mine[0]} is packed as one matrix with {listed(missing)}: an update must have them too", "tensors"
                )

    def _check(self, name: str, one: TensorFacts) -> None:
        """Raises: ConfigError: the model has no place for the tensor."""
        if (part := self._table.part(name)) is not None:
            _check(one, part.stored_shape(self._shaped(part.parameter, one)))
        elif (tied := self._table.tied(name)) is not None:
            _check(one, self._table.tied_part(name).stored_shape(self._parameters[tied]))
        elif not self._table.ignored(name):
            raise ConfigError(f"the model has no weight {name} to update", "tensors")

    def _is_packed(self, parameter: str) -> bool:
        return parameter in self._packed and parameter not in self._parameters

    def _shaped(self, parameter: str, one: TensorFacts) -> torch.Tensor:
        if self._is_packed(parameter):
            layer = self._packed[parameter]
            return torch.empty(layer.out_features, layer.in_features, device="meta")
        if parameter in self._experts:
            experts, matrix = self._experts[parameter], parameter.rpartition(".")[2]
            if experts.method.rounds(matrix) or (one.coded and experts.method.takes_codes):
                return torch.empty(experts.shapes[matrix], device="meta")
            raise ConfigError(
                f"{one.name} is of experts that are kept as {experts.method.format}, to which new values are not rounded: load "
                "the model with quantization none",
                "quantization",
            )
        return self._parameters[parameter]

    def check_ties(self, values: Mapping[str, torch.Tensor]) -> None:
        """Compares tied tensors before any is written. ``values``: all of the update.

        Raises:
            ConfigError: a tensor contradicts what it is tied to.
        """
        for name in values:
            if (tied := self._table.tied(name)) is not None:
                other = values.get(self._table.names(tied)[0])
                self._check_tie(name, values[name], self._parameters[tied], other)

    def _check_tie(self, name: str, value: torch.Tensor, held: torch.Tensor, other: torch.Tensor | None = None) -> None:
        """Checks that a tied tensor equals its target in the update (``other``) or in the model (``held``)."""
        place = self._table.tied_part(name)
        own = place.take(value).to(held.device, held.dtype)
        will_be = held if other is None else place.take(other).to(held.device, held.dtype)
        if not torch.equal(own, will_be):
            raise ConfigError(f"the model ties {name} to {place.parameter}, and the update gives it another value", "tensors")

    @torch.inference_mode()
    def put(self, name: str, value: torch.Tensor | CodedTensor) -> None:
        """Writes a tensor, rounded as loading rounds it; one of codes as loading writes it. One that is packed with others is
        written with the last of them."""
        del self._missing[name]
        if (part := self._table.part(name)) is None:
            if self._table.tied(name) is not None:
                self._ties[name] = value.read() if isinstance(value, CodedTensor) else value.detach()
            return
        if parameter := part.parameter if part.parameter in self._packed else None:
            held = self._held.setdefault(parameter, {})
            held[name] = value
            names = self._table.names(parameter)
            if len(held) == len(names):
                self._pack(self._packed[parameter], {each: held[each] for each in names})
                del self._held[parameter]
        if part.parameter in self._experts:
            if not part.empty:
                layer, matrix = self._experts[part.parameter], part.parameter.rpartition(".")[2]
                if isinstance(value, CodedTensor):
                    load_expert(value.checkpoint, name, part, layer, matrix)
                else:
                    layer.method.load_floats(layer, matrix, part.take(value), part.index, part.start)
        elif not self._is_packed(part.parameter):
            part.fill(self._parameters[part.parameter].data, value.read() if isinstance(value, CodedTensor) else value.detach())
        self.count += 1
        self.written.setdefault(part.parameter, set()).add(name)

    def _pack(self, layer: Linear, values: Mapping[str, torch.Tensor | CodedTensor]) -> None:
        device = next(layer.buffers()).device
        stored = list[StoredMatrix]()
        for name, value in values.items():
            part = cast(Target, self._table.part(name))
            if isinstance(value, CodedTensor):
                stored += value.parts(part)
            elif not part.empty:
                stored.append(_stored(part, value.detach(), device))
        method = cast(PackedMethod, layer.method)
        if any(isinstance(value, CodedTensor) for value in values.values()):
            method.reload(layer, stored)
        else:
            method.rewrite(layer, stored)

    def finish(self) -> None:
        """Compares tied tensors with what they are tied to.

        Raises:
            ConfigError: one contradicts it, or a tensor has not come.
        """
        if self._missing:
            raise ConfigError(f"{listed(list(self._missing))} did not come", "tensors")
        for name, value in self._ties.items():
            self._check_tie(name, value, self._parameters[cast(str, self._table.tied(name))])

    def sums(self, rank: int) -> dict[str, list[PartSum]]:
        """Returns the sums of what this rank holds of each weight, by its name. Of a weight that is kept packed, which is no
        tensor of a checkpoint, there is that of the whole packed matrix, or of all experts, by its name and ``PACKED``."""
        found = dict[str, list[PartSum]]()
        for name, part in self._table.items():
            if part.parameter in self._parameters:
                found[name] = part_sums(part, self._parameters[part.parameter])
        packed = {parameter: dict(layer.named_buffers(recurse=False)) for parameter, layer in self._packed.items()}
        for parameter, experts in self._experts.items():
            start = f"{parameter.rpartition('.')[2]}_"
            own = experts.named_buffers(recurse=False)
            packed[parameter] = {name: buffer for name, buffer in own if name.startswith(start)}
        for parameter, buffers in packed.items():
            value = packed_sum([buffers[name] for name in sorted(buffers)], rank)
            found |= {f"{name}{PACKED}": [value] for name in self._table.names(parameter)}
        return found

    def tied(self) -> dict[str, str]:
        """Returns the names that are tied, with those that they must equal."""
        return {name: self._table.names(parameter)[0] for name, parameter in self._table.ties().items()}

    def unwritten(self, written: Mapping[str, set[str]]) -> list[str]:
        """Returns the names of the model's tensors that are not in ``written`` (parameter -> names)."""
        parameters = {part.parameter: None for _, part in self._table.items()}
        return [
            name
            for parameter in parameters
            for name in self._table.names(parameter)
            if name not in written.get(parameter, set())
        ]


class WholeUpdate:
    """An update whose tensors are all there: checked, and not written yet.

    Raises:
        ConfigError: as ``WeightUpdate``; or a tensor has no values, or contradicts what it is tied to.
    """

    def __init__(self, plan: Callable[[list[TensorFacts]], WeightUpdate], tensors: Named) -> None:
        """``plan``: finds places for tensors."""
        self._pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self.update = plan([facts_of(name, tensor) for name, tensor in self._pairs])
        self.update.check_ties(dict(self._pairs))

    def write(self) -> int:
        """Puts the values in their places. Returns how many there were."""
        for name, tensor in self._pairs:
            self.update.put(name, tensor)
        return self.update.count


def facts_of(name: str, tensor: torch.Tensor) -> TensorFacts:
    """Raises: ConfigError: it is not a tensor with values, or has a part of them."""
    check_whole(name, tensor)
    return TensorFacts(name, tensor.dtype, tuple(tensor.shape))


def _stored(part: Target, value: torch.Tensor, device: torch.device) -> StoredMatrix:
    """The value as a matrix to be packed."""
    return StoredMatrix(_named(value.dtype), lambda: part.take(value).to(device))


def check_whole(name: str, tensor: object) -> torch.Tensor:
    """Raises: ConfigError: it is not a tensor, or has no values, or a part of them."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        raise ConfigError(f"{name} must be a tensor with values, not {type(tensor).__name__}", "tensors")
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"{name} is distributed over processes: give what its full_tensor() returns", "tensors")
    return tensor


def _check(one: TensorFacts, expected: tuple[int, ...]) -> None:
    if one.dtype not in _FLOATS:
        floats = ", ".join(_named(dtype) for dtype in _FLOATS)
        raise ConfigError(f"{one.name} is {_named(one.dtype)}, and must be one of {floats}", "tensors")
    if one.shape != expected:
        raise ConfigError(f"{one.name} has the shape {list(expected)}, the update {list(one.shape)}", "tensors")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
