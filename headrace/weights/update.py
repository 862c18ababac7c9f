"""New values for the weights of a model that is there already, in the memory where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch

from headrace.errors import ConfigError, listed
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.packed import PackedMethod
from headrace.weights.names import NameTable, Target

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Tensors under their names."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class WeightUpdate:
    """Tensors that were checked, each with its place, and not written yet.

    Weights are written where they are: whatever reads that memory, a captured graph included, reads the new values.

    Args:
        table: the names of the model's weights.
        parameters: what the table's parameters are, by their names there.
        packed: layers that hold such a parameter in another form, by its name. What is tied to a parameter is one beside it.
        tensors: new values, of some weights or all, under the table's names. Of another float dtype than the weight they are
            rounded, as those of a checkpoint are.

    Raises:
        ConfigError: a name is unknown or given twice, or a tensor is not one of the shape that its weight has, or of no float
            dtype, or contradicts what it is tied to; or lacks others that are packed as one matrix with it. Names the weight.
    """

    def __init__(
        self,
        table: NameTable,
        parameters: Mapping[str, torch.Tensor],
        tensors: Named,
        packed: Mapping[str, Linear] | None = None,
    ) -> None:
        values: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if name in values:
                raise ConfigError(f"{name} is given twice", "tensors")
            values[name] = tensor
        self._places: list[tuple[Target, torch.Tensor, torch.Tensor]] = []
        """(place, parameter, value)"""
        self._packed: list[tuple[Linear, list[tuple[Target, torch.Tensor]]]] = []
        """(layer, all that it holds)"""
        self._count = 0
        packed = packed or {}
        # A checkpoint may have other tensors in place of the usual ones, and so may an update.
        table = table.chosen(values)
        for name, tensor in values.items():
            if (part := table.part(name)) is not None:
                layer = packed.get(part.parameter)
                if layer is None or part.parameter in parameters:
                    parameter = _held(parameters, part.parameter, name)
                    self._places.append((part, parameter, tensor))
                else:
                    parameter = torch.empty(layer.out_features, layer.in_features, device="meta")
                _check(name, tensor, part.stored_shape(parameter))
                self._count += 1
            elif (tied := table.tied(name)) is not None:
                held, place = _held(parameters, tied, name), table.tied_part(name)
                _check_tie(name, tensor, place, values.get(table.names(tied)[0]), held)
            elif not table.ignored(name):
                raise ConfigError(f"the model has no weight {name} to update", "tensors")
        for parameter_name, layer in packed.items():
            names = table.names(parameter_name)
            given = [name for name in names if name in values]
            if given and (missing := [name for name in names if name not in values]):
                raise ConfigError(
                    f"{given[0]} is packed as one matrix with {listed(missing)}: an update must have them too", "tensors"
                )
            if given:
                self._packed.append((layer, [(cast(Target, table.part(name)), values[name]) for name in names]))

    @torch.inference_mode()
    def write(self) -> int:
        """Puts the values in their places, rounded as loading rounds them. Returns how many there were."""
        for part, parameter, value in self._places:
            part.fill(parameter.data, value.detach())
        for layer, values in self._packed:
            device = next(layer.buffers()).device
            parts = [_stored(part, value.detach(), device) for part, value in values if not part.empty]
            cast(PackedMethod, layer.method).rewrite(layer, parts)
        return self._count


def _stored(part: Target, value: torch.Tensor, device: torch.device) -> StoredMatrix:
    """The value as a matrix to be packed."""
    return StoredMatrix(_named(value.dtype), lambda: part.take(value).to(device))


def _held(parameters: Mapping[str, torch.Tensor], parameter: str, name: str) -> torch.Tensor:
    if parameter not in parameters:
        raise ConfigError(
            f"{name} is of experts that are packed, which are not updated: load the model with quantization none",
            "quantization",
        )
    return parameters[parameter]


def check_whole(name: str, tensor: object) -> torch.Tensor:
    """Raises: ConfigError: it is no tensor, or has no values, or a part of them."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        raise ConfigError(f"{name} must be a tensor with values, not {type(tensor).__name__}", "tensors")
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"{name} is distributed over processes: give what its full_tensor() returns", "tensors")
    return tensor


def _check(name: str, value: object, expected: tuple[int, ...]) -> None:
    tensor = check_whole(name, value)
    if tensor.dtype not in _FLOATS:
        floats = ", ".join(_named(dtype) for dtype in _FLOATS)
        raise ConfigError(f"{name} is {_named(tensor.dtype)}, and must be one of {floats}", "tensors")
    if tuple(tensor.shape) != expected:
        raise ConfigError(f"{name} has the shape {list(expected)}, the update {list(tensor.shape)}", "tensors")


def _check_tie(name: str, tensor: torch.Tensor, tied: Target, other: torch.Tensor | None, held: torch.Tensor) -> None:
    """Checks that a tied tensor equals its target in the update (``other``) or in the model."""
    expected = tied.stored_shape(held)
    _check(name, tensor, expected)
    own = tied.take(tensor).to(held.device, held.dtype)
    will_be = held if other is None or other.shape != expected else tied.take(other).to(held.device, held.dtype)
    if not torch.equal(own, will_be):
        raise ConfigError(f"the model ties {name} to {tied.parameter}, and the update gives it another value", "tensors")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
